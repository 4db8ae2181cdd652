"""Requests pass the gate of guides, then that of images, then the engine gets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from djl_trtllm.executor.gated import GatedExecutor
from djl_trtllm.executor.guides import GuideGate
from djl_trtllm.executor.images import ImageGate
from djl_trtllm.executor.protocol import (
    GUIDES,
    LOGPROBS,
    PENALTIES,
    Feature,
    FirstRequest,
    Refusal,
    Stats,
    Step,
    Submit,
    Try,
    first_requests,
)
from djl_trtllm.request import FinishReason, Guide, GuideKind, Image, Sampling

GUIDE = Guide(GuideKind.REGEX, "a")
IMAGES = (Image(b"", 1, 1, 1),)


class Gate:
    """Holds requests until `advance`, which lets them through or refuses them; `bad` are those that it refuses."""

    def __init__(self, submit: Callable[..., None], refuse: Callable[..., None], bad: object, *more: object) -> None:
        self.held: dict[int, Any] = {}
        self.seen: list[int] = []
        self.closed = False
        self.submit, self.refuse, self.bad, self.more = submit, refuse, bad, more

    def __len__(self) -> int:
        return len(self.held)

    def hold(self, request: Any) -> None:
        self.held[request.request_id] = request
        self.seen.append(request.request_id)

    def cancel(self, request_id: int) -> Any:
        return self.held.pop(request_id, None)

    def advance(self, seconds: float = 0.0) -> None:
        held, self.held = self.held, {}
        for request_id, request in held.items():
            self.refuse(request, self.bad) if request_id < 0 else self.submit(request, *self.more)

    def count_in(self, stats: Stats) -> Stats:
        return Stats(stats.running, guides_waiting=len(self))

    def close(self) -> None:
        self.closed = True


class GuidesGate(Gate, GuideGate):
    def __init__(self, program: str, directory: str, submit: Any, refuse: Any, **prepare: Any) -> None:
        Gate.__init__(self, submit, refuse, Refusal(f"{program} in {directory}"))


class ImagesGate(Gate, ImageGate):
    def __init__(self, read: Any, submit: Any, fail: Any) -> None:
        Gate.__init__(self, submit, fail, ValueError("damaged"), read(None))


class Engine(GatedExecutor):
    """It ends each request in the iteration after its start; `wrong` are errors of requests."""

    gates = GuidesGate, ImagesGate

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[int, object]] = []
        self.running: list[Submit] = []
        self.wrong: dict[int, str] = {}
        self.open_guides("program", "directory")
        self.open_images(lambda request: "pixels")

    @property
    def busy(self) -> bool:
        return bool(self.running or self.news.has_news or self.holds)

    def start(self, request: Submit, images: Any = None) -> None:
        self.started.append((request.request_id, images))
        self.running.append(request)

    def fail(self, request: Submit, error: Exception) -> None:
        self.refuse(request, str(error))

    def step(self) -> Step:
        self.advance(0.0)
        for request in self.running:
            error = self.wrong.get(request.request_id)
            self.end(request.request_id, FinishReason.ERROR if error else FinishReason.LENGTH, error)
        self.running.clear()
        step, self.news = self.news, Step()
        return step

    def ends(self) -> dict[int, tuple[FinishReason, object]]:
        found: dict[int, tuple[FinishReason, object]] = {}
        while self.busy:
            for end in self.step().ends:
                assert end.request_id not in found
                found[end.request_id] = end.finish, end.error
        return found


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_request_waits_at_each_gate_that_it_needs_and_then_starts(engine: Engine) -> None:
    engine.submit(Submit(1, [1], Sampling(1)))
    assert (engine.started, engine.holds) == ([(1, None)], False)
    engine.submit(Submit(2, [1], Sampling(1), guide=GUIDE))
    engine.submit(Submit(3, [1], Sampling(1), images=IMAGES))
    assert (engine.started, engine.holds) == ([(1, None)], True)
    assert engine.count_in(Stats(1)).guides_waiting == 1
    engine.submit(Submit(4, [1], Sampling(1), guide=GUIDE, images=IMAGES))
    assert engine.ends() == dict.fromkeys((1, 2, 3, 4), (FinishReason.LENGTH, None))
    assert sorted(engine.started) == [(1, None), (2, None), (3, "pixels"), (4, "pixels")]


def test_what_a_gate_refuses_ends_with_its_reason_and_does_not_start(engine: Engine) -> None:
    engine.submit(Submit(-1, [1], Sampling(1), guide=GUIDE))
    engine.submit(Submit(-2, [1], Sampling(1), images=IMAGES))
    engine.try_guide(Try(-3, GUIDE))
    engine.try_guide(Try(4, GUIDE))
    bad = FinishReason.ERROR, Refusal("program in directory")
    assert engine.ends() == {-1: bad, -2: (FinishReason.ERROR, "damaged"), -3: bad, 4: (FinishReason.STOP, None)}
    assert engine.started == []


@pytest.mark.parametrize("given", [{"guide": GUIDE}, {"images": IMAGES}], ids=["guide", "images"])
def test_a_held_request_that_is_cancelled_ends_once_for_each_of_its_beams(
    engine: Engine, given: dict[str, Any]
) -> None:
    engine.submit(Submit(5, [1], Sampling(1, beam_width=2), **given))
    assert engine.cancel_held(5) and not engine.cancel_held(5)
    engine.try_guide(Try(9, GUIDE))
    assert engine.cancel_held(9)
    assert engine.ends() == dict.fromkeys((5, 6, 9), (FinishReason.CANCELLED, None))
    assert engine.started == []


def test_a_guide_says_where_the_output_ends(engine: Engine) -> None:
    for number, name in enumerate(("min_new_tokens", "ignore_eos")):
        engine.submit(Submit(number, [1], Sampling(2, **{name: True}), guide=GUIDE))
        engine.submit(Submit(number + 2, [1], Sampling(2, **{name: True})))
        (error,) = (error for finish, error in engine.ends().values() if finish is FinishReason.ERROR)
        assert isinstance(error, Refusal) and f"'{name}'" in error.message
    engine.guides = None
    engine.submit(Submit(7, [1], Sampling(2, ignore_eos=True), guide=GUIDE))
    assert engine.ends() == {7: (FinishReason.LENGTH, None)}, "no gate, no rule of a gate"


def test_first_requests_pass_the_gate_of_guides_untried_and_cost_the_features_that_fail(engine: Engine) -> None:
    engine.wrong = {2: "no kernel", 4: "no memory"}
    lost = frozenset({"regex"})
    requests = [
        FirstRequest("a plain one", Submit(1, [1], Sampling(1))),
        FirstRequest("a guided one", Submit(2, [1], Sampling(1), guide=GUIDE), lost),
        FirstRequest("one with an image", Submit(3, [1], Sampling(1), images=IMAGES), frozenset({"images"})),
    ]
    assert engine.warm_up(requests) == lost
    gates: list[Any] = [engine.guides, engine.images]
    assert [gate.seen for gate in gates] == [[], [3]]
    assert engine.started == [(1, None), (2, None), (3, "pixels")]
    with pytest.raises(RuntimeError, match="no memory"):
        engine.warm_up([FirstRequest("a plain one", Submit(4, [1], Sampling(1)))])


def test_both_gates_end_with_the_engine(engine: Engine) -> None:
    gates: list[Any] = [engine.guides, engine.images]
    engine.close_gates()
    assert [gate.closed for gate in gates] == [True, True]
    engine.guides = engine.images = None
    engine.close_gates()
    assert (engine.count_in(Stats(2)), engine.holds) == (Stats(2), False)


# -- first requests ----------------------------------------------------------------------------------------------------

TAGS = GUIDES - {Feature.JSON}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8}


@pytest.mark.parametrize(
    ("features", "kinds"),
    [
        (frozenset(), []),
        (frozenset({"do_sample"}), [({**SAMPLED, "top_k": 40, "top_p": 0.9}, {}, set())]),
        (
            LOGPROBS | TAGS | PENALTIES | {"do_sample", "seed", "min_p"},
            [
                ({**SAMPLED, "seed": 1, "top_k": 40, "top_p": 0.9}, {}, set()),
                ({"repetition_penalty": 1.1, "presence_penalty": 0.1}, {}, PENALTIES),
                ({**SAMPLED, "seed": 1, "min_p": 0.1}, {}, {"min_p"}),
                ({}, {"logprobs": True}, LOGPROBS),
                ({}, {"logprobs": True, "top_logprobs": 1}, {"top_logprobs"}),
                ({}, {"guide": Guide(GuideKind.REGEX, "[a-z]+")}, TAGS),
            ],
        ),
    ],
    ids=["least", "sampled", "all"],
)
def test_an_engine_first_gets_a_request_of_each_kind_that_it_has_code_for(
    features: frozenset[str], kinds: list[tuple[dict[str, Any], dict[str, Any], set[str]]]
) -> None:
    found: list[Any] = [(each.request, each.features) for each in first_requests(features, [7, 7], 3)]
    expected: list[Any] = [(Submit(0, [7, 7], Sampling(3)), frozenset())]
    expected += [(Submit(0, [7, 7], Sampling(3, **own), **given), lost) for own, given, lost in kinds]
    assert found == expected
    image = Submit(0, [7], Sampling(2), images=IMAGES)
    last = first_requests(features, [7, 7], 3, image)[-1]
    assert (last.request, last.features) == (image, frozenset({"images"}))


def test_where_no_seeds_are_drawn_the_sampled_request_has_none_and_a_seed_is_a_kind_of_its_own() -> None:
    sampled = {**SAMPLED, "top_k": 40, "top_p": 0.9}
    found = first_requests(frozenset({"do_sample", "seed"}), [7], 3, draws_seeds=False)[1:]
    assert [(each.request.sampling, each.features) for each in found] == [
        (Sampling(3, **sampled), frozenset()),
        (Sampling(3, **sampled, seed=1), frozenset({"seed"})),
    ]
    assert len(first_requests(frozenset({"do_sample"}), [7], 3, draws_seeds=False)) == 2
