"""A request in TensorRT-LLM: turns each step of its result into deltas.

Found in TensorRT-LLM's `executor/result.py` (about 1.2): one object per request, which every step of its iteration
changes and returns again, one step per response of the engine; `token_ids` and `logprobs` grow (before 1.2 the engine
backend's `logprobs` are those of the last response only). A request's own failure is raised by the step as
RequestError. The reason of the end comes with the last step: `stop` for the end id, which the engine backend leaves out
of the tokens, and for stop words, with the word as `stop_reason`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from djl_trtllm.executor.protocol import Logprob, Ranked, Refusal, Submit
from djl_trtllm.executor.step_buffer import StepBuffer
from djl_trtllm.request import FinishReason

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "cancelled": FinishReason.CANCELLED}


class Heartbeat:
    """The engine's signs of life so far: responses and iteration statistics."""

    def __init__(self) -> None:
        self.responses = 0
        self.iterations = 0

    @property
    def beats(self) -> int:
        return self.responses + self.iterations


class RunningRequest:
    """`message` is what was asked for, `result` TensorRT-LLM's future of it, `end_id` the tokenizer's end token.

    With beam search it is several sequences, delivered when all have ended.
    """

    def __init__(
        self, message: Submit, result: Any, step_buffer: StepBuffer, heartbeat: Heartbeat, end_id: int | None
    ) -> None:
        self.message = message
        self.result = result
        self.task: asyncio.Task[None]
        self.muted = False
        """Cancelled: later output is not sent."""
        self.responded = False
        """Whether the engine has sent a response for it."""
        self.aborted_for: float | None = None
        """Seconds since it was aborted in the engine."""
        self.aborted_after = 0
        """Responses of the engine until then."""
        self._step_buffer = step_buffer
        self._heartbeat = heartbeat
        self._end_id = end_id
        self._output: Any = None
        """TensorRT-LLM's output of its one sequence, without beams."""
        self._seen = 0
        """Tokens that were put in."""
        self._noted = False
        """Whether the buffer is going to ask for what is new."""

    def follow(self) -> Awaitable[None]:
        """Put the output into the step_buffer, with the terminal deltas. Raises what the result raises."""
        return self._follow_tokens() if self.message.sampling.beam_width == 1 else self._follow_beams()

    def end(self, finish: FinishReason, error: str | Refusal | None = None) -> None:
        """The terminal deltas of all its sequences."""
        for request_id in sequence_ids(self.message):
            self._end(request_id, finish, error)

    async def _follow_tokens(self) -> None:
        heartbeat, step_buffer, wants_logprobs = self._heartbeat, self._step_buffer, self.message.logprobs
        self._output = self.result.outputs[0]
        async for _ in self.result:
            heartbeat.responses += 1
            if wants_logprobs:
                self.collect()  # before the next response takes them away
            elif not self._noted:
                self._noted = True
                step_buffer.collect_from(self)
        self.collect()
        self._finish(self.message.request_id, self._output)

    def collect(self) -> None:
        """Put in the tokens that are new since the last time, once for all responses of a wake-up."""
        self._noted = False
        self.responded = True
        token_ids, seen = self._output.token_ids, self._seen
        if self.muted or len(token_ids) <= seen:
            return
        message, new = self.message, token_ids[seen:]
        logprobs = _chosen(self._output.logprobs, new, message.top_logprobs) if message.logprobs else None
        delta = self._step_buffer.extend(message.request_id, new, logprobs)
        if not seen:
            delta.cached_tokens = getattr(self.result, "cached_tokens", 0)
        self._seen = len(token_ids)

    async def _follow_beams(self) -> None:
        async for _ in self.result:
            self._heartbeat.responses += 1
            self.responded = True
        for request_id, output in zip(sequence_ids(self.message), self.result.outputs, strict=True):
            if not self.muted:
                # Not every version gives a beam's log-probabilities.
                wants_logprobs = self.message.logprobs and output.logprobs
                logprobs = _chosen(output.logprobs, output.token_ids) if wants_logprobs else None
                self._step_buffer.extend(request_id, list(output.token_ids), logprobs)
            self._finish(request_id, output)

    def _finish(self, request_id: int, output: Any) -> None:
        finish = FinishReason.CANCELLED if self.muted else _FINISH.get(output.finish_reason)
        if finish is None:
            self._end(request_id, FinishReason.ERROR, f"TensorRT-LLM ended the request with {output.finish_reason!r}")
            return
        if finish is FinishReason.STOP:
            self._restore_end(request_id, output)
        self._end(request_id, finish)

    def _restore_end(self, request_id: int, output: Any) -> None:
        """The id that ended a sequence is its last, also where TensorRT-LLM leaves it out, with its log-probability."""
        ended_by = self._end_id if output.stop_reason is None else output.stop_reason
        ends = {*self.message.stop_token_ids, self._end_id}
        if isinstance(ended_by, int) and not (output.token_ids and output.token_ids[-1] in ends):
            self._step_buffer.extend(request_id, [ended_by], [None] if self.message.logprobs else None)

    def _end(self, request_id: int, finish: FinishReason, error: str | Refusal | None = None) -> None:
        delta = self._step_buffer.extend(request_id, [], None)
        delta.finish, delta.error = finish, error


def sequence_ids(message: Submit) -> range:
    """The ids of a request's sequences, one per beam."""
    return range(message.request_id, message.request_id + message.sampling.beam_width)


def _chosen(entries: Sequence[Any], new: Sequence[int], most: int = 0) -> list[Logprob]:
    """The log-probabilities of the last tokens: TensorRT-LLM gives each alone, or in a dict of the likeliest.

    `most`: how many of the likeliest to return with each.

    A sampled token need not be among the likeliest (PyTorch backend of about 1.2: TorchSampler takes them by
    `torch.topk`). It has None then.
    """
    if len(entries) < len(new):
        raise ValueError(f"TensorRT-LLM gave {len(entries)} log-probabilities for {len(new)} tokens")
    pairs = zip(entries[-len(new) :], new, strict=True)
    if most:
        return [_ranked(entry, token_id, most) for entry, token_id in pairs]
    return [_logprob(entry, token_id) for entry, token_id in pairs]


def _logprob(entry: Any, token_id: int) -> float | None:
    if not isinstance(entry, dict):
        return float(entry)
    found = entry.get(token_id)
    return None if found is None else float(found.logprob)


def _ranked(entry: Any, token_id: int, most: int) -> Ranked:
    """With the sampled token TensorRT-LLM may give one more than it was asked for."""
    found = entry.items() if isinstance(entry, dict) else ()
    likeliest = sorted(((float(each.logprob), id_) for id_, each in found), key=lambda pair: -pair[0])[:most]
    return Ranked(_logprob(entry, token_id), [id_ for _, id_ in likeliest], [logprob for logprob, _ in likeliest])
