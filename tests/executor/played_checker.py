"""A guide checker whose verdicts come when the test says so."""

from __future__ import annotations

from djl_trtllm.executor.guide_checker import Key, key_of
from djl_trtllm.executor.guide_process import Verdict
from djl_trtllm.request import Guide, GuideKind


class PlayedChecker:
    """See `GuideChecker`. A problem is None where the guide can be used."""

    idle = True

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.waited: set[float] = set()
        """Seconds for which it was to wait."""
        self.verdicts: dict[Key, Verdict] = {}
        self.closed = False

    def check(self, key: Key, guide: Guide) -> None:
        self.checked.append(guide.value)

    def verdict(self, key: Key) -> Verdict | None:
        return self.verdicts.get(key)

    def poll(self, seconds: float) -> None:
        self.waited.add(seconds)

    def close(self) -> None:
        self.closed = True

    def decide(self, text: str, problem: str | None = None) -> None:
        """The verdict on a regular expression."""
        self.verdicts[key_of(regex(text))] = Verdict(problem, 99)


def regex(text: str) -> Guide:
    return Guide(GuideKind.REGEX, text)
