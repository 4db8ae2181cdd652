"""Any order of submits, iterations, cancels, timeouts and failures."""

from __future__ import annotations

from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from djl_trtllm.batching.generation import Generation
from djl_trtllm.errors import GenerationError, OverloadedError
from djl_trtllm.executor.protocol import Delta, Finish, Stats, Step, Submit
from djl_trtllm.model import load_tokenizer

from .helpers import Bench, Recorder

TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "serving" / "models" / "tiny-stories")
WORDS = [TOKENIZER.encode(text, False)[-1] for text in (" wolf", " the", "!", " wood", "a", "b")] + [2]


class RollingBatchMachine(RuleBasedStateMachine):
    """The executor's side is played by the rules; what a consumer sees is checked after each."""

    @initialize(batch=st.integers(1, 4), queue=st.integers(1, 4), blocks=st.sampled_from([0, 6, 12]))
    def begin(self, batch: int, queue: int, blocks: int) -> None:
        self.bench = Bench(TOKENIZER, max_batch_size=batch, max_queue_size=queue, kv_blocks=blocks)
        self.blocks = blocks
        self.live: dict[int, Submit] = {}
        """What the executor runs, and has not ended."""
        self.emitted: dict[int, int] = {}
        self.all: list[tuple[Generation, Recorder, int]] = []

    def sync(self) -> None:
        executor = self.bench.executor
        self.live |= {request.request_id: request for request in executor.submitted}
        executor.submitted.clear()

    @rule(
        prompt=st.integers(1, 20),
        tokens=st.integers(1, 10),
        n=st.integers(1, 3),
        ranked=st.booleans(),
        stop=st.sampled_from([(), (" wolf",), (" wood!", "ab")]),
    )
    def submit(self, prompt: int, tokens: int, n: int, ranked: bool, stop: tuple[str, ...]) -> None:
        best_of = n + 1 if ranked else None
        count = best_of or n
        if count > self.bench.batch.limits.max_batch_size + self.bench.batch.limits.max_queue_size:
            return
        try:
            generation, consumer = self.bench.submit(
                [5] * prompt, max_new_tokens=tokens, n=n, best_of=best_of, do_sample=True, stop=stop, logprobs=True
            )
        except OverloadedError as error:
            assert error.queue_depth == self.bench.batch.waiting
            return
        self.all.append((generation, consumer, n))

    @rule(data=st.data(), iterations=st.integers(1, 3))
    def step(self, data: st.DataObject, iterations: int) -> None:
        self.sync()
        steps = []
        for _ in range(iterations):
            deltas = []
            for request_id, request in list(self.live.items()):
                if data.draw(st.booleans(), label="silent"):
                    continue
                delta = self.advance(request_id, request, data)
                deltas.append(delta)
                if delta.finish:
                    del self.live[request_id]
            steps.append(Step(deltas, Stats()))
        self.bench.batch.process(steps)

    def advance(self, request_id: int, request: Submit, data: st.DataObject) -> Delta:
        if request_id in self.bench.executor.cancelled and data.draw(st.booleans(), label="cancel takes effect"):
            return Delta(request_id, [], finish=Finish.CANCELLED)
        token = data.draw(st.sampled_from(WORDS), label="token")
        self.emitted[request_id] = self.emitted.get(request_id, 0) + 1
        finish = 0
        if token == 2:
            finish = Finish.END
        elif self.emitted[request_id] == request.sampling.max_new_tokens:
            finish = Finish.LENGTH
        return Delta(request_id, [token], [-0.5], finish)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.all:
            self.bench.batch.cancel(data.draw(st.sampled_from(self.all), label="cancelled")[0])

    @rule(seconds=st.integers(0, 6))
    def expire(self, seconds: int) -> None:
        self.bench.now += seconds
        self.bench.batch.expire(10)

    @rule()
    def fail(self) -> None:
        self.bench.batch.fail(GenerationError("gone"))
        self.bench.executor.submitted.clear()
        self.live.clear()
        assert self.bench.batch.idle
        assert all(generation.done for generation, _, _ in self.all)

    @invariant()
    def what_runs_fits(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.sync()
        batch = self.bench.batch
        assert batch.running == len(self.live) <= batch.limits.max_batch_size
        assert 0 <= batch.waiting <= batch.limits.max_batch_size + batch.limits.max_queue_size
        if self.blocks:
            used = sum(
                -(-(len(request.prompt_ids) + request.sampling.max_new_tokens) // 10) + 1
                for request in self.live.values()
            )
            assert used <= self.blocks

    @invariant()
    def every_sequence_ends_once(self) -> None:
        for generation, consumer, n in getattr(self, "all", []):
            if generation.done:
                for index in range(n):
                    finished = consumer.finished(index)
                    ids = [token for token in consumer.ids(index) if token != 2]
                    text = TOKENIZER.decode(ids)
                    if finished.stop_sequence is None:
                        assert consumer.text(index) == text
                    else:
                        assert consumer.text(index) == text[: text.index(finished.stop_sequence)]
                assert {update.index for update in consumer.updates} == set(range(n))

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for generation, _, _ in self.all:
            self.bench.batch.cancel(generation)
        self.sync()
        self.bench.step(*(Delta(request_id, [], finish=Finish.CANCELLED) for request_id in self.live))
        assert self.bench.batch.idle
        assert (self.bench.batch.waiting, self.bench.batch.running) == (0, 0)
        self.live.clear()
        self.every_sequence_ends_once()
        assert sum(self.bench.statistics.finished.values()) == sum(len(g.sequences) for g, _, _ in self.all)


RollingBatchMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRollingBatch = RollingBatchMachine.TestCase
