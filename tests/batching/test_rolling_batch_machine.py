"""Any order of submits, iterations, cancels, timeouts, failures and lost executors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from djl_trtllm.batching.blame import LOSSES
from djl_trtllm.batching.sequence import RequestState
from djl_trtllm.errors import GenerationError, HarmfulRequestError, InvalidRequestError, OverloadedError
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.model import load_tokenizer
from djl_trtllm.request import FinishReason
from tests.batching.helpers import Bench, Recorder
from tests.support.steps import Delta, step_of

TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "serving" / "models" / "tiny-stories")
WORDS = [TOKENIZER.encode(text, False)[-1] for text in (" wolf", " the", "!", " wood", "a", "b")] + [2]
BLOCK_SIZE = 10
TIMEOUT = 10
MOST_OVERTAKING = 8 + 16


class Case(NamedTuple):
    """A request that was submitted."""

    generation: RequestState
    consumer: Recorder
    n: int
    beams: int
    blocks: int
    """KV cache blocks of each sequence, counted here and not by the batch."""
    arrived: float
    client: str
    priority: int
    asked: tuple[object, ...]
    """What it asks the engine for."""


class RollingBatchMachine(RuleBasedStateMachine):
    """The executor's side is played by the rules; what a consumer sees, who runs and who waits is checked each time."""

    @initialize(
        batch=st.integers(1, 4),
        queue=st.integers(1, 4),
        blocks=st.sampled_from([0, 6, 12]),
        lookahead=st.integers(0, 2),
        several=st.booleans(),
    )
    def begin(self, batch: int, queue: int, blocks: int, lookahead: int, several: bool) -> None:
        self.bench = Bench(
            TOKENIZER,
            max_batch_size=batch,
            max_queue_size=queue,
            kv_blocks=blocks,
            block_size=BLOCK_SIZE,
            lookahead=lookahead,
        )
        self.blocks = blocks
        self.places = batch + lookahead
        self.live: dict[int, Submit] = {}
        """The sequences that the executor runs, and has not ended."""
        self.started: list[int] = []
        """The ids of all sequences that ran in this executor, in the order in which it got them."""
        self.moved: set[int] = set()
        """Those that it got twice."""
        self.emitted: dict[int, int] = {}
        self.all: list[Case] = []
        self.lost: set[tuple[object, ...]] = set()
        """What the requests asked for that ran in lost executors: the order of such ones is another."""
        self.losses = 0
        self.several = several
        self.oldest: int | None = None
        self.overtaken = 0
        """Sequences that started while the oldest waited and nothing else of its client ran."""

    def sync(self) -> None:
        """Take what was submitted since the last time."""
        for request in self.bench.executor.submitted:
            self.note_overtaking(request.request_id)
            if request.request_id in self.started:  # it gave its place away before
                self.emitted[request.request_id] = 0
                self.started.remove(request.request_id)
                self.moved.add(request.request_id)
                while request.request_id in self.bench.executor.cancelled:
                    self.bench.executor.cancelled.remove(request.request_id)
            for sequence_id in range(request.request_id, request.request_id + request.sampling.beam_width):
                self.live[sequence_id] = request
                self.started.append(sequence_id)
        self.bench.executor.submitted.clear()

    def note_overtaking(self, started: int) -> None:
        """A sequence starts."""
        waiting = [each for each in self.waiting if each not in self.started]
        oldest = waiting[0] if waiting else None
        if oldest != self.oldest:
            self.oldest, self.overtaken = oldest, 0
        if oldest is None or oldest == started:
            return
        (case,) = self.cases([oldest])
        if case.asked in self.lost:
            return
        if all(other.client != case.client for other in self.cases(self.live)):
            self.overtaken += 1

    def cases(self, sequence_ids: Iterable[int]) -> list[Case]:
        """The request of each sequence."""
        by_id = {sequence_id: case for case in self.all for sequence_id in case.generation.ids}
        return [by_id[sequence_id] for sequence_id in sequence_ids]

    @property
    def waiting(self) -> list[int]:
        """Sequences that the executor has not got, and that go on."""
        return [
            sequence_id
            for case in self.all
            for sequence_id, sequence in zip(case.generation.ids, case.generation.sequences, strict=True)
            if sequence_id not in self.live and sequence.finished is None
        ]

    # -- what may happen -------------------------------------------------------------------------------------------

    @rule(
        prompt=st.integers(1, 20),
        tokens=st.integers(1, 10),
        n=st.integers(1, 3),
        kind=st.sampled_from(["plain", "ranked", "beams"]),
        stop=st.sampled_from([(), (" wolf",), (" wood!", "ab")]),
        client=st.sampled_from("abc"),
        priority=st.integers(-1, 1),
    )
    def submit(
        self, prompt: int, tokens: int, n: int, kind: str, stop: tuple[str, ...], client: str, priority: int
    ) -> None:
        if not self.several:
            client, priority = "", 0
        best_of = n + 1 if kind == "ranked" else None
        beams = max(n, 2) if kind == "beams" else 1
        blocks = -(-(prompt + tokens) // BLOCK_SIZE) + 1
        limits = self.bench.batch.limits
        never = (
            (beams if beams > 1 else best_of or n) > limits.max_batch_size + limits.max_queue_size
            or beams > self.places
            or 0 < self.blocks < blocks * beams
        )
        try:
            generation, consumer = self.bench.submit(
                [5] * prompt,
                max_new_tokens=tokens,
                n=n,
                best_of=best_of,
                beam_width=beams,
                do_sample=beams == 1,
                stop=stop,
                logprobs=True,
                client=client,
                priority=priority,
            )
        except OverloadedError as error:
            assert error.queue_depth == self.bench.batch.waiting
            return
        except HarmfulRequestError:
            assert self.losses >= LOSSES
            return
        except InvalidRequestError:
            assert never
            return
        assert not never
        asked = (prompt, tokens, n, kind, stop)
        self.all.append(Case(generation, consumer, n, beams, blocks, self.bench.now, client, priority, asked))

    @rule(data=st.data(), iterations=st.integers(1, 3))
    def step(self, data: st.DataObject, iterations: int) -> None:
        self.sync()
        steps = []
        for _ in range(iterations):
            deltas = []
            for sequence_id, request in list(self.live.items()):
                if data.draw(st.booleans(), label="silent"):
                    continue
                delta = self.advance(sequence_id, request, data)
                deltas.append(delta)
                if delta.finish:
                    del self.live[sequence_id]
            steps.append(step_of(deltas))
        self.bench.batch.process(steps)

    def advance(self, sequence_id: int, request: Submit, data: st.DataObject) -> Delta:
        if request.request_id in self.bench.executor.cancelled and data.draw(
            st.booleans(), label="cancel takes effect"
        ):
            return Delta(sequence_id, [], finish=FinishReason.CANCELLED)
        token = data.draw(st.sampled_from(WORDS), label="token")
        self.emitted[sequence_id] = self.emitted.get(sequence_id, 0) + 1
        finish = None
        if token == 2:
            finish = FinishReason.STOP
        elif self.emitted[sequence_id] == request.sampling.max_new_tokens:
            finish = FinishReason.LENGTH
        return Delta(sequence_id, [token], [-0.5], finish)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.all:
            self.sync()
            case = data.draw(st.sampled_from(self.all), label="cancelled")
            before = list(self.bench.executor.cancelled)
            unfinished = [
                sequence_id
                for sequence_id, sequence in zip(case.generation.ids, case.generation.sequences, strict=True)
                if sequence.finished is None and sequence_id in self.live
            ]
            self.bench.batch.cancel(case.generation)
            assert case.generation.done
            assert self.bench.executor.cancelled[: len(before)] == before
            assert set(unfinished) <= set(self.bench.executor.cancelled)

    @rule(seconds=st.integers(0, 6))
    def expire(self, seconds: int) -> None:
        self.bench.now += seconds
        young = [case for case in self.all if self.bench.now - case.arrived <= TIMEOUT]
        done = [case.generation.done for case in young]
        self.bench.batch.expire(TIMEOUT)
        assert [case.generation.done for case in young] == done
        assert all(case.generation.done for case in self.all if case not in young)

    @rule()
    def fail(self) -> None:
        self.bench.batch.fail(GenerationError("gone"))
        self.replace_executor()
        assert self.bench.batch.idle
        assert all(case.generation.done for case in self.all)

    @rule()
    def lose(self) -> None:
        """The executor is gone: what can go on does, before all that waited, and the rest ends."""
        self.sync()
        self.losses += 1
        self.lost |= {case.asked for case in self.cases(self.live)}
        lost = {id(case.generation): case for case in self.cases(self.live) if not case.generation.done}
        others = [(case, case.generation.done) for case in self.all if id(case.generation) not in lost]
        self.bench.batch.lose(self.bench.executor, GenerationError("gone"))
        for case in lost.values():
            begun = any(self.emitted.get(sequence_id) for sequence_id in case.generation.ids)
            guilty = self.losses >= LOSSES
            complete = all(sequence.token_ids for sequence in case.generation.sequences)
            assert not case.generation.done or (case.beams > 1 and begun) or guilty or complete
        assert all(case.generation.done == done or case.asked in self.lost for case, done in others)
        for sequence_id in self.live:
            self.emitted[sequence_id] = 0
        self.replace_executor()

    def replace_executor(self) -> None:
        """Another executor, which has nothing yet."""
        self.bench.executor.submitted.clear()
        self.live.clear()
        self.started.clear()
        self.moved.clear()
        self.bench.batch.attach(self.bench.executor)

    # -- what holds all the time -----------------------------------------------------------------------------------

    @invariant()
    def what_runs_fits(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.sync()
        batch = self.bench.batch
        assert len(self.live) <= self.places
        assert batch.running == min(len(self.live), batch.limits.max_batch_size)
        assert batch.waiting == len(self.live) + len(self.waiting) - batch.running
        capacity = batch.limits.max_batch_size + batch.limits.max_queue_size
        assert batch.running + batch.waiting <= (2 * capacity if self.several else capacity)
        if self.blocks:
            assert sum(case.blocks for case in self.cases(self.live)) <= self.blocks

    @invariant()
    def nothing_waits_while_it_fits(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.sync()
        if not self.waiting:
            return
        if self.bench.batch.searching:
            assert self.live, "something is tried"
            return
        if self.several:
            assert self.live
            return
        (first,) = self.cases(self.waiting[:1])
        used = sum(case.blocks for case in self.cases(self.live))
        no_place = len(self.live) + first.beams > self.places
        no_blocks = 0 < self.blocks < used + first.blocks * first.beams
        assert no_place or no_blocks

    @invariant()
    def first_come_is_first_served(self) -> None:
        """Among the requests of a client that have the same priority."""
        lanes: dict[tuple[str, int], list[int]] = {}
        started = [each for each in getattr(self, "started", []) if each not in self.moved]
        for sequence_id, case in zip(started, self.cases(started), strict=True):
            if case.asked in self.lost:
                continue
            lanes.setdefault((case.client, case.priority), []).append(sequence_id)
        assert all(lane == sorted(set(lane)) for lane in lanes.values())

    @invariant()
    def the_oldest_is_overtaken_by_few(self) -> None:
        assert getattr(self, "overtaken", 0) <= MOST_OVERTAKING

    @invariant()
    def every_sequence_ends_once(self) -> None:
        for case in getattr(self, "all", []):
            if case.generation.done:
                for index in range(case.n):
                    finished = case.consumer.finished(index)
                    ids = [token for token in case.consumer.ids(index) if token != 2]
                    text = TOKENIZER.decode(ids)
                    if finished.stop_sequence is None:
                        assert case.consumer.text(index) == text
                    else:
                        assert case.consumer.text(index) == text[: text.index(finished.stop_sequence)]
                assert {update.index for update in case.consumer.updates} == set(range(case.n))

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for case in self.all:
            self.bench.batch.cancel(case.generation)
        self.sync()
        self.bench.step(*(Delta(sequence_id, [], finish=FinishReason.CANCELLED) for sequence_id in self.live))
        assert self.bench.batch.idle
        assert (self.bench.batch.waiting, self.bench.batch.running) == (0, 0)
        for case in self.all:
            client = self.bench.batch._clients.find(case.client)
            assert (client.admitted, client.running, client.blocks, client.expected) == (0, 0, 0, 0)
        self.live.clear()
        self.every_sequence_ends_once()
        sequences = sum(len(case.generation.sequences) for case in self.all)
        assert sum(self.bench.statistics.finished.values()) == sequences


RollingBatchMachine.TestCase.settings = settings(stateful_step_count=30)
TestRollingBatch = RollingBatchMachine.TestCase
