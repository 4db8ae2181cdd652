"""`LLM`: offline batches in Python, under the names of TensorRT-LLM's LLM API.

The results of `LLM.embed` and `LLM.score` have vLLM's names.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import queue
import threading
import weakref
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
from rich.console import Console

from djl_trtllm.api.base import Call, CollectedSequence, Prompt, ResponseEncoder, SequenceCollector
from djl_trtllm.api.content import read_texts
from djl_trtllm.api.parameters import Problems
from djl_trtllm.api.pooling import pooling_requests
from djl_trtllm.batching.sequence import RequestState
from djl_trtllm.config import Origin
from djl_trtllm.config.options import find
from djl_trtllm.config.sources import as_arguments
from djl_trtllm.errors import DjlTrtllmError, InvalidRequestError, NotReadyError, OverloadedError, RequestError
from djl_trtllm.model.remote.fetch import is_remote
from djl_trtllm.offline.arguments import SamplingParams, flattened
from djl_trtllm.progress import batch_progress
from djl_trtllm.request import FINISH_WORDS, FinishReason, GenerationRequest, OutputChunk, Pooling, RankedToken
from djl_trtllm.service.lifecycle import ModelService
from djl_trtllm.service.model import Model, open_remote, open_source, prepare

T = TypeVar("T")
R = TypeVar("R")

# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a text, as float32."""

    embedding: list[float]

    @classmethod
    def of(cls, vector: bytes) -> EmbeddingOutput:
        return cls(array("f", vector).tolist())


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float

    @classmethod
    def of(cls, vector: bytes) -> ScoringOutput:
        return cls(array("f", vector)[0])


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[T]):
    """The result of one text or pair.

    `outputs` is None where it failed, and `error` why; `prompt_tokens` is the number of its tokens.
    """

    request_id: int
    outputs: T | None
    prompt_tokens: int
    error: DjlTrtllmError | None


class OfflineResult(ResponseEncoder):
    """The result of request `number` of a batch (from 0). It keeps the chunks and makes no bytes.

    `failure` is why it failed, if it did; the sequences hold what was generated until then.
    """

    stream = False
    content_type = ""

    def __init__(self, number: int, request: GenerationRequest, *, wants_prompt_tokens: bool) -> None:
        self.number = number
        self.prompt: Prompt | None = None
        """The prompt as the model sees it; None where the request was refused before it was tokenised."""
        self._output = SequenceCollector(request.sampling.n)
        self.sequences = self._output.sequences
        self.prompt_logprobs: list[RankedToken] | None = None
        """The prompt's tokens with their log-probabilities, of a request that asks for them."""
        self.vector = b""
        """See `OutputChunk.vector`."""
        self.failure: DjlTrtllmError | None = None
        self.wants_prompt_tokens = wants_prompt_tokens
        self.complete = False
        """Whether every sequence has ended, or the request has failed before any began."""

    def begin(self, prompt: Prompt) -> None:
        self.prompt = prompt

    def encode(self, chunk: OutputChunk) -> bytes:
        self.complete = self._output.add(chunk)
        self.prompt_logprobs = chunk.prompt or self.prompt_logprobs
        self.vector = chunk.vector
        if chunk.finished is not None:
            self.failure = self.failure or chunk.finished.error
        return b""

    def error(self, error: RequestError) -> bytes:
        self.fail(error)
        return b""

    def fail(self, error: DjlTrtllmError) -> None:
        self.failure = error
        self.complete = True


# -- TensorRT-LLM's shape of results -----------------------------------------------------------------------------------

_FINISH_REASONS = {**FINISH_WORDS, FinishReason.END_TOKEN: "stop", FinishReason.STOP: "stop"}
"""TensorRT-LLM's names."""


class Logprob(NamedTuple):
    """A token's log-probability; not every engine reports `rank`."""

    logprob: float
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence.

    `token_ids` are all generated tokens, one that ended the sequence included. `logprobs` has `{token id: Logprob}` for
    each, `{}` if the engine has none, and is empty unless asked for. `finish_reason` is `stop`, `length`, `cancelled`
    or `error`; `stop_reason` the stop string or token id that ended it, None at the model's own end token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]]
    finish_reason: str
    stop_reason: str | int | None

    @classmethod
    def of(cls, index: int, sequence: CollectedSequence, logprobs: bool) -> CompletionOutput:
        """A sequence's output; a sequence that never ran is one that ended with an error."""
        finished, tokens = sequence.finished, sequence.tokens
        reason = FinishReason.ERROR if finished is None else finished.reason
        stop_reason: str | int | None = None
        if finished is not None and reason is FinishReason.STOP:
            stop_reason = finished.stop_sequence or tokens[-1].id
        shown = tokens if logprobs else []
        return cls(
            index,
            sequence.text,
            [token.id for token in tokens],
            finished.cumulative_logprob if finished is not None and logprobs else None,
            [{} if token.logprob is None else {token.id: Logprob(token.logprob)} for token in shown],
            _FINISH_REASONS[reason],
            stop_reason,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt.

    `prompt` is the text as the model saw it: after the chat template for a chat, None where token ids were given.
    `prompt_token_ids` are empty where the prompt was refused before it was tokenised. `error` is why the prompt failed,
    None if it did not; `outputs` then hold what was generated until that.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    error: DjlTrtllmError | None

    @classmethod
    def of(cls, result: OfflineResult, request: GenerationRequest) -> RequestOutput:
        seen = result.prompt
        text = seen.text if seen is not None and request.messages is not None else request.prompt
        return cls(
            result.number,
            text,
            [] if seen is None else [token.id for token in seen.tokens],
            [CompletionOutput.of(index, each, request.logprobs) for index, each in enumerate(result.sequences)],
            result.failure,
        )


_NO_DEADLINE = Origin.derived("an offline batch: no client waits for a single answer")


def open_offline_model(model: str | Path, options: Mapping[str, Any]) -> Model:
    """The model that `model` names, prepared to be run: fetched and compiled, if it has to be.

    It is a directory, an archive, a model of the hub or one in S3.

    `options` win over every other source; None means not given. `option.predict_timeout` applies only if it is one
    of them: it is a bound on what a client waits, and in a batch requests wait for each other.
    Raises ConfigError, also for what is no option, and DjlTrtllmError.
    """
    given = flattened(options)
    arguments = as_arguments(given, _configuration)
    if isinstance(model, str) and is_remote(model):
        source = open_remote(model, os.environ, arguments)
    else:
        source = open_source(Path(model), os.environ, arguments)
    prepared = prepare(source)
    if given.get("predict_timeout") is not None:
        return prepared
    return replace(prepared, config=prepared.config.replace(_NO_DEADLINE, predict_timeout=math.inf))


def _configuration(name: str) -> str | None:
    if not name.endswith("_config") or find(f"option.{name}"):
        return None
    return (
        f"{name} is not one of TensorRT-LLM's configuration objects that have options here; docs/offline.md lists them"
    )


# -- the event loop ----------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

_ROOM_SECONDS = 0.05
"""Seconds between looks for a free slot: a cancelled sequence ends late, without output for us."""
_ALIVE_SECONDS = 1.0
_SEND_SECONDS = 0.05
"""Nobody sees output before its end here, so the engine process sends the output of several iterations at once."""
_CLOSED = "the model was closed while it was generating"


class _Fed(NamedTuple):
    """The end of the input after `total` requests; `error` is the exception that ended it, if any."""

    total: int
    error: Exception | None


class _Job:
    """The requests of one `Runner.run`."""

    def __init__(self, wants_prompt_tokens: bool) -> None:
        self.wants_prompt_tokens = wants_prompt_tokens
        self.outcomes: queue.SimpleQueue[OfflineResult | _Fed] = queue.SimpleQueue()
        self.states: dict[int, RequestState] = {}
        """The requests that wait or run, by their number."""
        self.abandoned = threading.Event()


class Runner:
    """A loaded model, to be used from any thread, one with a running event loop of its own (a notebook's) included.

    The engine process ends with `close`, and otherwise with this process.
    """

    def __init__(self, model: Model) -> None:
        """Start the engine process and load the tokenizer. Raises DjlTrtllmError."""
        self._service = ModelService(model.name)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._freed = asyncio.Event()
        # Not a thread per run: Linux ends the process with the thread that started it.
        self._thread = threading.Thread(target=self._run_loop, name="offline batch", daemon=True)
        self._thread.start()
        start = msgspec.structs.replace(model.start, send_interval=_SEND_SECONDS)
        loading = asyncio.run_coroutine_threadsafe(self._service.load(model, start), self._loop)
        try:
            loading.result()
        except BaseException:
            loading.cancel()
            self.close()
            raise
        if model.custom is not None:
            logger.warning("the formatters of model.py are for requests over HTTP: an offline batch does without them")

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far, in all runs."""
        return self._service.statistics.generated_tokens

    def run(
        self, requests: Iterable[GenerationRequest], *, wants_prompt_tokens: bool = False
    ) -> Generator[OfflineResult, None, None]:
        """The results, in the order of the requests, each as soon as it and all before it are complete.

        Requests are taken from the iterable as there is room for them, on the event loop's thread. One that fails has
        its `OfflineResult.failure`. When the engine process dies, they go on in its replacement, those that ran where
        `option.resume_after_restart` allows it; without a replacement they fail. Leaving the iteration cancels what
        still runs.

        Raises NotReadyError on a closed runner, and the error that ended the model if that was before.
        """
        if self._service.failure is not None:
            raise self._service.failure
        if self._closing.is_set():
            raise NotReadyError("the model is closed")
        job = _Job(wants_prompt_tokens)
        asyncio.run_coroutine_threadsafe(self._feed(iter(requests), job), self._loop)
        early: dict[int, OfflineResult] = {}
        total: int | None = None
        try:
            for number in itertools.count():
                while number not in early:
                    if number == total:
                        return
                    outcome = self._next(job)
                    if isinstance(outcome, OfflineResult):
                        early[outcome.number] = outcome
                    elif outcome.error is not None:
                        raise outcome.error
                    else:
                        total = outcome.total
                yield early.pop(number)
        finally:
            job.abandoned.set()
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing runs any more
                self._loop.call_soon_threadsafe(lambda: self._service.cancel([*job.states.values()]))

    def close(self) -> None:
        """End the engine process; requests that run get an error."""
        with contextlib.suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._closing.set)
        # The garbage collector, and with it a finalizer, runs in whichever thread allocates.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- in the caller's thread ------------------------------------------------------------------------------------

    def _next(self, job: _Job) -> OfflineResult | _Fed:
        while True:
            with contextlib.suppress(queue.Empty):
                return job.outcomes.get(timeout=_ALIVE_SECONDS)
            if not self._thread.is_alive():
                raise NotReadyError(_CLOSED)

    # -- on the event loop -----------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    async def _live(self) -> None:
        await self._closing.wait()
        await self._service.close()
        # Nothing can be started any more, so they end by themselves.
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    async def _feed(self, requests: Iterator[GenerationRequest], job: _Job) -> None:
        total = 0
        error: Exception | None = None
        try:
            for request in requests:
                if job.abandoned.is_set():
                    break
                if self._closing.is_set():
                    raise NotReadyError(_CLOSED)
                await self._start(total, request, job)
                total += 1
                # Tokenising a short prompt awaits nothing, and the executor's messages are not to wait for all of them.
                await asyncio.sleep(0)
        except Exception as raised:
            error = raised
        job.outcomes.put(_Fed(total, error))

    async def _start(self, number: int, request: GenerationRequest, job: _Job) -> None:
        """Queue a request as soon as there is room for it."""
        result = OfflineResult(number, request, wants_prompt_tokens=job.wants_prompt_tokens)

        def take(chunk: OutputChunk) -> None:
            result.encode(chunk)
            if chunk.finished is not None:
                self._freed.set()
                if result.complete:
                    del job.states[number]
                    job.outcomes.put(result)

        while not job.abandoned.is_set():
            self._freed.clear()
            try:
                (job.states[number],) = await self._service.generate(Call((request,), result), take)
                if job.abandoned.is_set():
                    self._service.cancel([job.states[number]])
                return
            except OverloadedError:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _ROOM_SECONDS)
            except RequestError as error:
                # Once the model has failed, why it has. Without a traceback: its frames would keep all they refer to.
                result.fail((self._service.failure or error).with_traceback(None))
                job.outcomes.put(result)
                return


PromptInput: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a chat."""


class LLM:
    """A model, loaded for offline batches.

    `model` is what `djl-trtllm serve` takes: a directory, an archive, a model of the hub or in S3. Keyword
    arguments are options of docs/options.md without `option.`, in any of their spellings (`tensor_parallel_size`
    for `tensor_parallel_degree`), or TensorRT-LLM's configuration objects (`kv_cache_config=KvCacheConfig(...)`). They
    win over the model's serving.properties and the environment.

    The engine runs in a process of its own, which ends with `close`, with the `with` block, when the object is
    collected and when this process ends, however that comes. Methods may be called from any thread.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load a model; compiles it first if it has to be. Raises DjlTrtllmError: ConfigError, ModelError, ..."""
        prepared = open_offline_model(model, options)
        self._runner = Runner(prepared)
        self._vocab_size = prepared.tokenizer.vocab_size
        self._max_seq_len = prepared.max_seq_len
        self._end = weakref.finalize(self, self._runner.close)

    def generate(
        self,
        prompts: str | Iterable[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; the outputs have the order of the prompts.

        A prompt is a text, a list of token ids or a list of chat messages; a single text is a batch of one.
        `sampling_params` are for all prompts, or one for each; without them TensorRT-LLM's defaults count: greedy, 32
        tokens. `use_tqdm` shows the progress on stderr (the name is TensorRT-LLM's).

        A prompt that fails has its `RequestOutput.error`, and costs no other prompt its output. Raises
        InvalidRequestError before anything runs for what is no prompt, NotReadyError after `close`, and ExecutorError
        once the engine has failed for good.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = _one_each(sampling_params, len(prompts))
        # A template is parsed once, however many prompts share it.
        templates = {id(each): each.template() for each in params}
        requests = [
            self._request(number, prompt, templates[id(each)])
            for number, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]

        def output(result: OfflineResult) -> RequestOutput:
            return RequestOutput.of(result, requests[result.number])

        return self._run(requests, output, use_tqdm=use_tqdm, wants_prompt_tokens=True)

    def embed(
        self,
        prompts: str | Iterable[str],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """The vectors of texts, in their order, of a model that embeds.

        `dimensions`: how many numbers of a vector are returned, from the first on. `truncate_prompt_tokens`: the first
        N tokens of each text, -1 for as many as the model takes; without it a text that is too long has an error.
        Raises as `generate`.
        """
        texts, truncate = _texts(prompts, "prompts"), self._kept(truncate_prompt_tokens)
        if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
            raise InvalidRequestError(f"dimensions is {dimensions!r:.80}: expected a number of at least 1")
        requests = pooling_requests(Pooling("embed", dimensions=dimensions), texts, truncate)
        return self._pooled(requests, EmbeddingOutput.of, use_tqdm=use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """The scores of pairs: of one text with each of `data_2`, or of as many. Raises as `generate`.

        `truncate_prompt_tokens`: as for `embed`, of a pair.
        """
        first, second = _texts(data_1, "data_1"), _texts(data_2, "data_2")
        truncate = self._kept(truncate_prompt_tokens)
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise InvalidRequestError(
                f"data_1 has {len(first)} texts and data_2 {len(second)}: expected one, or as many as data_2 has"
            )
        requests = pooling_requests(Pooling("score"), zip(first, second, strict=True), truncate)
        return self._pooled(requests, ScoringOutput.of, use_tqdm=use_tqdm)

    def _kept(self, tokens: int | None) -> int | None:
        """How many tokens of a text `truncate_prompt_tokens` keeps."""
        if tokens is None or (type(tokens) is int and 1 <= tokens <= self._max_seq_len):
            return tokens
        if type(tokens) is not int or tokens != -1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {tokens!r:.80}: expected -1, or 1 to {self._max_seq_len}, the model's "
                "longest text"
            )
        return self._max_seq_len

    def _pooled(
        self, requests: Sequence[GenerationRequest], read: Callable[[bytes], T], *, use_tqdm: bool
    ) -> list[PoolingRequestOutput[T]]:
        def output(result: OfflineResult) -> PoolingRequestOutput[T]:
            found = read(result.vector) if result.failure is None else None
            tokens = 0 if result.prompt is None else result.prompt.length
            return PoolingRequestOutput(result.number, found, tokens, result.failure)

        return self._run(requests, output, use_tqdm=use_tqdm)

    def _run(
        self,
        requests: Sequence[GenerationRequest],
        output: Callable[[OfflineResult], R],
        *,
        use_tqdm: bool,
        wants_prompt_tokens: bool = False,
    ) -> list[R]:
        """The outputs in the order of the requests, with their progress on stderr."""
        shown: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)
        if use_tqdm:
            shown = batch_progress(len(requests), lambda: self._runner.generated_tokens, Console(stderr=True))
        outputs: list[R] = []
        results = self._runner.run(requests, wants_prompt_tokens=wants_prompt_tokens)
        # An error's traceback may keep this frame, as in a notebook: what still runs is cancelled here.
        with closing(results), shown as advance:
            for result in results:
                outputs.append(output(result))
                advance()
        return outputs

    def close(self) -> None:
        """End the engine's process. What still runs in other threads fails."""
        self._end()

    shutdown = close
    """TensorRT-LLM's name of `close`."""

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, number: int, prompt: PromptInput, template: GenerationRequest) -> GenerationRequest:
        if isinstance(prompt, str):
            return msgspec.structs.replace(template, prompt=prompt)
        items: list[Any] | None = None
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            items = list(prompt)
        if items is not None and all(type(item) is int for item in items):
            if wrong := [id_ for id_ in items if not 0 <= id_ < self._vocab_size]:
                raise InvalidRequestError(
                    f"prompts[{number}] has the token id {wrong[0]}: the tokenizer knows 0 to {self._vocab_size - 1}"
                )
            return msgspec.structs.replace(template, prompt_ids=items)
        if items is not None and all(isinstance(item, Mapping) for item in items):
            problems = Problems()
            messages = read_texts(items, problems)
            problems.raise_any(f"prompts[{number}]: ")
            return msgspec.structs.replace(template, messages=messages)
        raise InvalidRequestError(
            f"prompts[{number}] is {prompt!r:.80}: expected a text, a list of token ids or a list of chat messages "
            "(a single such list is a batch of one: [list])"
        )


def _texts(given: str | Iterable[str], name: str) -> list[str]:
    """One text or several. Raises InvalidRequestError."""
    texts = [given] if isinstance(given, str) else list(given)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name}[{number}] is {text!r:.80}: expected a text")
    return texts


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(f"there are {count} prompts and {len(params)} sampling_params: give one, or one each")
    return params
