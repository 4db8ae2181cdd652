"""The base of executors whose requests wait before the engine: for the trial of a guide, then for their images."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from djl_trtllm.executor.guides import GuideGate, Prepare
from djl_trtllm.executor.images import ImageGate
from djl_trtllm.executor.protocol import End, FirstRequest, Limits, Refusal, Stats, Step, Submit, Try
from djl_trtllm.request import FinishReason

WAIT_SECONDS = 0.005
"""Seconds that an iteration waits for a held request, if nothing else runs."""


class Gated(ABC):
    """The gates before an engine. A derived class loads its engine, and opens the gates that it needs.

    `gates` are their classes: the gates of an engine that iterates itself advance by themselves.
    """

    limits: Limits
    features: frozenset[str]
    details: dict[str, Any]
    gates: ClassVar[tuple[type[GuideGate], type[ImageGate]]] = (GuideGate, ImageGate)

    def __init__(self) -> None:
        self.guides: GuideGate | None = None
        self.images: ImageGate | None = None

    @abstractmethod
    def start(self, request: Submit, images: Any = None) -> None:
        """Give the engine a request that no gate holds, with what was read of its images. An error becomes its end."""

    @abstractmethod
    def fail(self, request: Submit, error: Exception) -> None:
        """End a request that cannot be started, for example because its images cannot be read."""

    @abstractmethod
    def end(self, request_id: int, finish: FinishReason, error: str | Refusal | None = None) -> None:
        """End a sequence that the engine does not get, or the trial of a guide."""

    def open_guides(self, program: str, directory: str, prepare: Prepare = lambda key, guide: "") -> None:
        """Have guides tried by `program`; `directory` has the tokenizer. See `GuideGate`."""
        self.guides = self.gates[0](program, directory, self._let_through, self.refuse, prepare=prepare)

    def open_images(self, read: Callable[[Submit], Any]) -> None:
        """Have images read by a thread, see `ImageGate`."""
        self.images = self.gates[1](read, self.start, self.fail)

    @property
    def holds(self) -> bool:
        """Whether a gate holds a request."""
        return bool(self.guides or self.images)

    def submit(self, request: Submit) -> None:
        if request.guide is None or self.guides is None:
            self.pass_guides(request)
        else:
            self.guides.hold(request)

    def try_guide(self, trial: Try) -> None:
        assert self.guides is not None
        self.guides.hold(trial)

    def cancel_held(self, request_id: int) -> bool:
        """End a request that a gate holds. False if none does."""
        for gate in (self.guides, self.images):
            if gate is not None and (request := gate.cancel(request_id)) is not None:
                self._end_all(request, FinishReason.CANCELLED)
                return True
        return False

    def refuse(self, request: Submit | Try, error: str | Refusal) -> None:
        """End a request that the engine does not get."""
        self._end_all(request, FinishReason.ERROR, error)

    def count_in(self, stats: Stats) -> Stats:
        """The engine's state with the figures of the gates."""
        return stats if self.guides is None else self.guides.count_in(stats)

    def close_gates(self) -> None:
        """End the threads and processes beside the engine; they also end with this process."""
        for gate in (self.guides, self.images):
            if gate is not None:
                gate.close()

    def pass_guides(self, request: Submit) -> None:
        """Let a request pass whose guide, if it has one, can be used."""
        if request.images and self.images is not None:
            self.images.hold(request)
        else:
            self.start(request)

    def _let_through(self, request: Submit | Try) -> None:
        if isinstance(request, Submit):
            self.pass_guides(request)
        else:
            self.end(request.request_id, FinishReason.STOP)

    def _end_all(self, request: Submit | Try, finish: FinishReason, error: str | Refusal | None = None) -> None:
        """End each sequence of a request: with beams it has several."""
        width = request.sampling.beam_width if isinstance(request, Submit) else 1
        for request_id in range(request.request_id, request.request_id + width):
            self.end(request_id, finish, error)


class GatedExecutor(Gated):
    """See `djl_trtllm.executor.process.Executor`. `news` is the next step, also of what ends outside an iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.news = Step()

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Return whether `step` has something to do; not before `holds` and `news.has_news` are false."""

    @abstractmethod
    def step(self) -> Step:
        """Let requests through the gates (`advance`), run one iteration and return `news`."""

    def submit(self, request: Submit) -> None:
        sampling, tried = request.sampling, request.guide is not None and self.guides is not None
        if tried and (sampling.min_new_tokens or sampling.ignore_eos):
            named = "min_new_tokens" if sampling.min_new_tokens else "ignore_eos"
            problem = f"'{named}' with a guide: the guide says where the output ends; leave out one"
            self.refuse(request, Refusal(problem))
        else:
            super().submit(request)

    def end(self, request_id: int, finish: FinishReason, error: str | Refusal | None = None) -> None:
        self.news.end(request_id, finish, error)

    def advance(self, seconds: float) -> None:
        """Let through what the gates need not hold any more, after waiting up to `seconds` at each that holds some."""
        for gate in (self.guides, self.images):
            if gate:
                gate.advance(seconds)

    def warm_up(self, requests: Iterable[FirstRequest]) -> frozenset[str]:
        """Run requests one after the other; their guides, which are known to be good, are not tried.

        Returns the features of those that fail. Raises RuntimeError for one that any client may send.
        """
        lost = frozenset[str]()
        for first in requests:
            began = time.monotonic()
            self.pass_guides(first.request)
            errors = [end.error for end in self._ends() if end.error is not None]
            lost |= first.lost_by(errors[0] if errors else None, time.monotonic() - began)
        return lost

    def _ends(self) -> Iterator[End]:
        while self.busy:
            yield from self.step().ends
