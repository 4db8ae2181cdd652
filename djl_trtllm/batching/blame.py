"""Which request ends engine processes, told from which were there at each loss, and how far each of them had got."""

from array import array
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from djl_trtllm.executor.protocol import Submit

LOSSES = 3
"""The losses in a row after which a suspect is guilty: it did not pass, and all other requests that ran had passed."""
PASSED = 4
"""Tokens in one engine process with which a request passes. A request that ends passes, too."""
STEADY = (16, 64)
"""Steps of an engine process, in which everything else runs, before a suspect that was lost once or twice is tried."""
LONG = 64
"""Tokens that clear a request: one that got as many in a lost process did not end the process by running there."""
SHORT_LIVES = 8
"""After this number of losses in a row with fewer than `LONG` tokens in each, a request needs that many to pass."""
GROUPS = 16
REFUSED_SECONDS = 600.0
MOST_REFUSED = 256
_encode = msgspec.msgpack.Encoder().encode


def digest(message: Submit) -> str:
    """The digest of a message's input and parameters: equal for requests that ask the engine for the same.

    The seed is not part of it: a request without a seed gets another one each time.
    """
    bare = replace(
        message,
        request_id=0,
        prompt_ids=[],
        sampling=replace(message.sampling, seed=None),
        origin="",
        client="",
        cache_salt="",
    )
    return blake2b(array("i", message.prompt_ids).tobytes() + _encode(bare), digest_size=8).hexdigest()


class Verdict(NamedTuple):
    """A verdict that a request is guilty. `explains`: whether the request has caused the earlier losses, too.

    It has not if nothing has passed since the verdict before: an engine in which every request fails is no request's
    work.
    """

    key: str
    explains: bool


class Loss(NamedTuple):
    """The fate of the requests in an engine process that is gone.

    `proved`: a request had passed in the process. `guilty`: the request that ended it.
    """

    resumed: int
    ended: int
    proved: bool = False
    guilty: Verdict | None = None


@dataclass
class _Record:
    """The losses in a row at which a request was there: `unpassed` before it had passed, `short` with fewer than `LONG`
    tokens."""

    at: float
    unpassed: int = 0
    short: int = 0

    @property
    def bar(self) -> int:
        return LONG if self.short >= SHORT_LIVES else PASSED


class Blame:
    """The suspects of a rolling batch. Requests have their `digest` as key.

    Example: 32 streams run, and a request comes whose first token ends the engine process. At the loss each stream has
    more than four tokens: it has passed. The request has none, so it is a suspect. In the next process the streams go
    on, and the request is held back for 16 steps. Then it is tried, and ends that process too; in the one after that it
    is tried after 64 steps. At this third loss it is guilty: it alone ends, and is refused for ten minutes. The streams
    had three pauses.

    Many suspects are divided into 16 groups that are tried one after the other, the remains of a lost group last. That
    is faster than by halves: a trial takes the time of a few tokens, a loss that of loading an engine. So one guilty
    request among n suspects is found in 3 losses up to n = 256, and in one more each time that n is 16 times as many.
    Every loss of a trial makes a group smaller or brings a suspect nearer to its third loss, so a search ends.

    Most of what a loss from outside meets (the kernel kills for memory, say) has passed. What just began would have to
    be met twice more, each time in the moment of its trial; a loss before the trials begin takes back what there is
    against suspects.

    `lost` takes the tokens that each running request had in the lost process. While there is something to find out
    (`searching`), only keys may run that `lost` and `advance` have let go. New requests may start while nothing is
    tried (`is_open`).
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._trial: dict[str, int] = {}
        """Keys that run, and the tokens that each has to get before the next group is tried."""
        self._trying = False
        """Whether the keys in `_trial` are suspects."""
        self._line: deque[list[str]] = deque()
        """Groups that are held back."""
        self._open = True
        self._refused: dict[str, float] = {}
        self._passed = True
        """Whether any request has passed since the last verdict."""

    @property
    def searching(self) -> bool:
        return bool(self._trial or self._line)

    @property
    def is_idle(self) -> bool:
        """Whether there are no suspects, and none have been."""
        return not (self.searching or self.remembers)

    @property
    def is_open(self) -> bool:
        """Whether a new request may start."""
        return self._open or not self.searching

    @property
    def remembers(self) -> bool:
        """Whether there is a reason to look at the digest of a request."""
        return bool(self._records or self._refused)

    def runs(self, key: str) -> bool:
        """Whether a request that was lost goes on now; others are held back until `advance` names them."""
        return not self.searching or key in self._trial

    def refused_for(self, key: str, now: float) -> float:
        """Seconds for which a request is still refused; 0 if it is not."""
        return max(0.0, self._refused.get(key, now) - now)

    def lost(self, tokens: Mapping[str, int], now: float, *, proved: bool) -> Verdict | None:
        """Judge the loss of the engine process. `proved`: a request has passed in it."""
        self._passed |= proved
        self._forget(tokens, now)
        waiting = [[key for key in group if key not in tokens] for group in self._line]
        if not self._trying:  # no suspect was there
            for key in chain(*waiting):
                self._records[key].unpassed = 1
        trusted: list[str] = []
        suspects: list[str] = []
        for key, count in tokens.items():
            record = self._records.setdefault(key, _Record(now))
            record.at = now
            passed = count >= record.bar
            record.unpassed = 0 if passed else record.unpassed + 1
            record.short = 0 if count >= LONG else record.short + 1
            (trusted if passed else suspects).append(key)
        verdict = None
        if len(suspects) == 1 and self._records[suspects[0]].unpassed >= LOSSES:
            verdict = self._convict(suspects.pop(), now)
        self._line = deque(group for group in (*waiting, *_divided(suspects)) if group)
        self._trial = dict.fromkeys(trusted, PASSED) if self._line else {}
        self._trying, self._open = False, True
        return verdict

    def suspect(self, key: str, now: float) -> bool:
        """Whether a new request was lost without passing the last time that it was sent: it is tried by itself."""
        record = self._records.get(key)
        if record is None or not record.unpassed or now - record.at > REFUSED_SECONDS:
            return False
        if key not in self._trial and not self._holds(key):
            self._line.append([key])
            self._open = False
        return True

    def join(self, key: str) -> bool:
        """Whether a new request may start; it has to pass too before a suspect is tried. False for a request that is
        held back."""
        if key in self._trial:
            return True
        if self._holds(key):
            return False
        self._trial[key] = PASSED
        return True

    def advance(self, tokens: Mapping[str, int], held: Container[str], steps: int) -> Sequence[str]:
        """Let the next group go if all that runs has passed. `tokens` has the tokens of each request that has not
        ended.

        `steps` is the number of steps that the engine process has made.
        """
        for key, needed in list(self._trial.items()):
            if key not in tokens:
                del self._trial[key]
            elif tokens[key] >= needed:
                del self._trial[key]
                if (record := self._records.get(key)) is not None:
                    record.unpassed = 0
        released: list[str] = []
        while not self._trial:
            self._trying = False
            if not self._line or (tokens and steps < self._steady):
                break
            self._trying = True
            group = [key for key in self._line.popleft() if key in held]
            self._trial = {key: self._records[key].bar for key in group}
            released += group
        self._open = not self._trying and steps < self._steady
        return released

    def ended(self, key: str) -> None:
        """Note that a request has ended as it should."""
        self._trial.pop(key, None)
        if self._records.pop(key, None) is not None:
            self._line = deque([each for each in group if each != key] for group in self._line)

    def stop(self) -> None:
        """Note that every request has ended."""
        self._trial.clear()
        self._line.clear()

    def _holds(self, key: str) -> bool:
        return any(key in group for group in self._line)

    @property
    def _steady(self) -> int:
        """The steps before the next group is tried."""
        if not self._line:
            return 0
        losses = max((self._records[key].unpassed for key in self._line[0]), default=1)
        return STEADY[min(losses, len(STEADY)) - 1]

    def _convict(self, key: str, now: float) -> Verdict:
        del self._records[key]
        self._refused = dict(list(self._refused.items())[1 - MOST_REFUSED :])
        self._refused[key] = now + REFUSED_SECONDS
        explains, self._passed = self._passed, False
        return Verdict(key, explains)

    def _forget(self, present: Container[str], now: float) -> None:
        """Forget what was not there or did so long ago. Of suspects that have left, the last ones are kept."""
        self._refused = {key: until for key, until in self._refused.items() if until > now}
        held = {key for group in self._line for key in group}
        gone = [key for key in self._records if key not in present and key not in held]
        kept = [key for key in gone if self._records[key].unpassed and now - self._records[key].at <= REFUSED_SECONDS]
        for key in {*gone} - {*kept[-MOST_REFUSED:]}:
            del self._records[key]


def _divided(suspects: Sequence[str]) -> Iterable[list[str]]:
    size = -(-len(suspects) // GROUPS) or 1
    return (list(suspects[start : start + size]) for start in range(0, len(suspects), size))
