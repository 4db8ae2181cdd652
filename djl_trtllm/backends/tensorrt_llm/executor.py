"""TensorRT-LLM's LLM, driven by the process's event loop: ids in, steps out.

What TensorRT-LLM meets only with its first requests is looked for while the engine is loaded. For example, FlashInfer
ships its sampling kernels as source: the first request that samples compiles them, which takes minutes, in the loop
that serves all requests. So the engine process sends such a request before clients do.
"""

import asyncio
import contextlib
import json
import math
import os
import re
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from packaging.version import Version

from djl_trtllm.backends.json_grammar import GUIDE_PROGRAM, guide_arguments
from djl_trtllm.backends.tensorrt_llm.checkpoints import without_code
from djl_trtllm.backends.tensorrt_llm.engine_watch import (
    IterationStatistics,
    background_error,
    dead,
    launched_ranks,
    ranks_below,
    trouble_of,
)
from djl_trtllm.backends.tensorrt_llm.mpi import load_with_ranks, prepare_mpi
from djl_trtllm.backends.tensorrt_llm.names import build_arguments, has, module_of
from djl_trtllm.backends.tensorrt_llm.running_request import Heartbeat, ImagePrompts, RunningRequest
from djl_trtllm.backends.tensorrt_llm.sampling import (
    PYTORCH_READS_TAGS,
    PYTORCH_SCORES_PROMPTS,
    Biases,
    Sampler,
    find_sampler,
    sampling_arguments,
)
from djl_trtllm.config.options.choices import GuidedDecoding
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.executor.gated import Gated
from djl_trtllm.executor.guides import AsyncGuideGate
from djl_trtllm.executor.images import AsyncImageGate
from djl_trtllm.executor.pooling import PoolingExecutor, Vectors
from djl_trtllm.executor.protocol import LOGPROBS, Feature, FirstRequest, Limits, Refusal, Stats, Submit, first_requests
from djl_trtllm.processes import compiler_below
from djl_trtllm.request import FinishReason, Sampling

if TYPE_CHECKING:
    # The process runs that module as `__main__`: imported, it would be there twice.
    from djl_trtllm.executor.process import StepBuffer

_LONGEST_TICK_SECONDS = 0.5
_STATISTICS_SECONDS = 1.0
_NO_RESPONSE_SECONDS = 1.0
_SHUTDOWN_SECONDS = 4.0
_WORDS_SECONDS = 0.5
_PROBE_SECONDS = 5.0
"""The engine is probed after this much silence, which is longer than most iterations."""
_DEGREES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
_BROKEN = re.compile(
    r"cuda (runtime )?error|cudaerror|illegal memory access|device-side assert|nccl error|event loop terminated", re.I
)
"""Errors of a request after which no other request will succeed: the GPU's context is lost, or PyExecutor's loop has
ended (`_broadcast_event_loop_error` in base_worker.py, about 1.4)."""

_OUT_OF_MEMORY = re.compile(r"out of memory", re.I)
"""An iteration that runs out of memory may end TensorRT-LLM's loop: it then takes requests and answers none."""


class EngineLostError(Exception):
    """The engine cannot go on."""


_ENGINE_IS_GONE = (RuntimeError, OSError, EOFError)
"""CppExecutorError is a RuntimeError, and queues to the workers raise the others. All else concerns one request."""


def features_of(
    version: str, backend: str, sampler: Sampler, *, library: str | None, logprobs: bool, lora: bool, apart: bool
) -> frozenset[str]:
    """The features that an LLM honours: `library` is of its guides, `apart` whether it keeps prompts apart."""
    features = sampler.fields | ({Feature.LOGPROBS, "top_logprobs"} if logprobs else set())
    features |= {Feature.BEAM_LOGPROBS} if logprobs and sampler.beam_logprobs is not None else set()
    features |= {Feature.JSON, Feature.REGEX, Feature.GRAMMAR} if library else set()
    tags = library == GuidedDecoding.XGRAMMAR and backend == "pytorch" and Version(version) >= PYTORCH_READS_TAGS
    features |= {Feature.STRUCTURAL_TAG} if tags else set()
    features |= {Feature.ADAPTERS} if lora else set()
    features |= {"cache_salt"} if apart else set()
    scores = backend == "pytorch" and Version(version) >= PYTORCH_SCORES_PROMPTS
    return features | ({"prompt_logprobs"} if scores else set())


class TensorRtLlmExecutor(Gated):
    """See `djl_trtllm.executor.process.AsyncExecutor`.

    `arguments` are those of LLM as plain data (see `build_arguments`). The constructor loads the model, which takes
    minutes. `run` watches that output comes, `check` that the engine's processes live.
    """

    gates = AsyncGuideGate, AsyncImageGate

    def __init__(
        self,
        *,
        backend: str,
        model: str,
        tokenizer: str,
        arguments: Mapping[str, Any],
        max_sequences: int,
        max_seq_len: int,
        max_prompt_len: int = 0,
        lookahead: int = 0,
        environment: Mapping[str, str] | None = None,
        tokens_per_block: int = 32,
        hang_timeout: float = 60.0,
        compile_timeout: float = 1200.0,
        warm_up: bool = True,
        iteration_stats: bool = False,
        logprobs: bool = False,
        lora: bool = False,
        max_beam_width: int = 1,
        stop_in_engine: bool = True,
        accept_ignored_seeds: bool = False,
        vocab_size: int | None = None,
        images: bool = False,
    ) -> None:
        super().__init__()
        os.environ.update(environment or {})
        prepare_mpi()
        version: str = import_module("tensorrt_llm").__version__
        trusted = bool(arguments.get("trust_remote_code"))
        if backend != "tensorrt" and not trusted:
            model = str(without_code(Path(model)))
        guided: str | None = arguments.get("guided_decoding_backend")
        if guided is not None:
            problem = guide_problem(guided, tokenizer, trust_remote_code=trusted)
            if problem is not None:
                print(f"guides are off, requests with one are refused: {problem}", flush=True)
                arguments = {name: value for name, value in arguments.items() if name != "guided_decoding_backend"}
                guided = None
        llm_class = class_of(f"LLM.{backend}", version, "LLM")
        gpus = math.prod(int(arguments.get(name, 1)) for name in _DEGREES)
        self._llm = load_with_ranks(
            lambda: llm_class(model=model, tokenizer=tokenizer, **build_arguments(arguments)), gpus
        )
        self._prompts = ImagePrompts(Path(model), self._llm, version) if images else None
        if self._prompts is not None:
            self.open_images(self._prompts.pictures)
        self._sampling_params = class_of("SamplingParams", version)
        self._guided_params = class_of("GuidedDecodingParams", version)
        self._lora_request = class_of("LoRARequest", version)
        self._request_error: type[Exception] = class_of("RequestError", version)
        self._end_id: int | None = getattr(self._llm.tokenizer, "eos_token_id", None)
        # Aborting a stream with log-probabilities can crash the engine backend (TensorRT-LLM #10810).
        self._abortable_with_logprobs = backend != "tensorrt"
        # PyExecutor's loop goes on only without the overlap scheduler and the guided decoder.
        overlap = not arguments.get("disable_overlap_scheduler", False)
        self._guide_library = guided
        self._ends_with_an_iteration = backend != "tensorrt" and (overlap or guided is not None)
        self._hang_timeout = hang_timeout
        self._compile_timeout = max(compile_timeout, hang_timeout)
        self._told_of_compiler = False
        self._warms_up = warm_up
        self._reads_statistics = iteration_stats
        self._speculates = "speculative_config" in arguments
        self._statistics = IterationStatistics(counts_queued=backend == "tensorrt")
        below = ranks_below()
        self._ranks = [*below, *launched_ranks()]
        self._requests: dict[int, RunningRequest] = {}
        self._unanswered: list[RunningRequest] = []
        """Aborted requests that have ended for the server, while the engine may be silent since before their abort."""
        if guided is not None and find_spec(guided) is not None:
            # A bad guide ended PyExecutor's loop before #9078 (November 2025); on the engine backend it may fail every
            # active request.
            self.open_guides(GUIDE_PROGRAM.format(guided), tokenizer)
        self._heartbeat = Heartbeat()
        self._step_buffer: StepBuffer
        self._lost: asyncio.Future[None]
        self._loss: Exception | None = None
        sampler = find_sampler(version, backend, arguments, max_beam_width)
        self._beam_logprobs = sampler.beam_logprobs
        self._biases = Biases(vocab_size or 0)
        self._salts_prompts = has("generate_async", "cache_salt", version)
        reuses = (arguments.get("kv_cache_config") or {}).get("enable_block_reuse", True)
        apart = self._salts_prompts or not reuses
        self.limits = Limits(
            max_sequences=max_sequences,
            kv_blocks=0,
            block_size=tokens_per_block,
            max_seq_len=max_seq_len,
            lookahead=lookahead,
            stops=stop_in_engine,
            beams=sampler.beams,
            seeded=sampler.seeded,
            most_beams=sampler.most_beams,
            max_prompt_len=max_prompt_len,
            tries_guides=self.guides is not None,
            draft_tokens=int(self._speculates),
            stops_ignored=True,
        )
        self.features = features_of(
            version, backend, sampler, library=guided, logprobs=logprobs, lora=lora, apart=apart
        )
        self.features |= {"seed"} if accept_ignored_seeds else set()
        self.features -= {"logit_bias"} if vocab_size is None else set()
        if images:
            # Log-probabilities of prompts are looked up by ids, which images have none of.
            self.features = (self.features | _IMAGES) - {"prompt_logprobs"}
        self.details = {"TensorRT-LLM": version, "backend": backend, "GPUs": gpus, "worker processes": len(below)}

    # -- life ------------------------------------------------------------------------------------------------------

    def first_requests(self) -> list[FirstRequest]:
        if not self._warms_up:
            return []
        if self._prompts is None:
            return first_requests_of(self.limits, self.features)
        # The end token is a text of its own, also when it is repeated.
        requests = first_requests_of(self.limits, self.features, self._end_id or 1)
        return [*requests, FirstRequest("a request with an image", self._prompts.first(), _IMAGES)]

    async def run(self, step_buffer: "StepBuffer") -> None:
        """Watch that requests make progress; raises EngineLostError, or what the engine raised."""
        self._step_buffer = step_buffer
        self._lost = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(self._read_statistics()) if self._reads_statistics else None
        # In ticks, so that a pause of this process is not silence of the engine.
        tick = min(_LONGEST_TICK_SECONDS, self._hang_timeout / 8)
        silence = silent_for = unsent_for = 0.0
        """Seconds of silence, those without the time of compilers, and those since the last message to the server."""
        try:
            while True:
                beats, sent = self._heartbeat.beats, step_buffer.sent
                await asyncio.wait({self._lost}, timeout=tick)
                if self._lost.done():
                    return self._lost.result()
                silent = beats == self._heartbeat.beats
                if not silent:
                    self._forget_unanswered()
                waiting = len(self._requests) + len(self._unanswered)
                silence = silence + tick if silent and waiting else 0.0
                passed = 0.0 if self._is_compiling(silence) else tick
                silent_for = silent_for + passed if silence else 0.0
                runs = bool(self._requests) or self.holds
                unsent_for = unsent_for + tick if runs and sent == step_buffer.sent else 0.0
                if silent_for > self._hang_timeout:
                    raise EngineLostError(
                        f"TensorRT-LLM has been silent for {self._hang_timeout:g} seconds with {waiting} requests in "
                        "it (option.executor_hang_timeout)"
                    )
                if silence >= _PROBE_SECONDS > silence - tick:
                    self._probe()
                self._check_aborts(passed)
                if unsent_for >= 2 * tick:
                    step_buffer.flush()  # with nothing in it, for the server's own watch
        finally:
            if reading is not None:
                reading.cancel()

    def _is_compiling(self, silence: float) -> bool:
        """Return whether the engine is silent because kernels are compiled, which is no hang. Raises EngineLostError.

        Compiling ends with the process, and would begin anew in the next one.
        """
        if silence < min(_PROBE_SECONDS, self._hang_timeout / 2) or (compiler := compiler_below()) is None:
            return False
        if silence > self._compile_timeout:
            raise EngineLostError(
                f"TensorRT-LLM has been silent for {self._compile_timeout:g} seconds, and {compiler} still runs "
                "(option.model_loading_timeout)"
            )
        if not self._told_of_compiler:
            self._told_of_compiler = True
            print(
                f"TensorRT-LLM is silent because {compiler} compiles kernels: it has {self._compile_timeout:g} seconds "
                f"for that (option.model_loading_timeout), not {self._hang_timeout:g} (option.executor_hang_timeout)",
                flush=True,
            )
        return True

    def check(self) -> None:
        """Raise where a worker process has ended or TensorRT-LLM knows that it cannot go on."""
        trouble = self._trouble()
        if trouble is None:
            return
        # What says more may be on its way: an error that the worker ends with, or that a request is just given.
        time.sleep(_WORDS_SECONDS)
        raise self._loss or EngineLostError(self._trouble() or trouble)

    def _trouble(self) -> str | None:
        trouble = trouble_of(self._llm)
        if trouble is not None:
            return f"TensorRT-LLM cannot go on: {trouble}"
        lost = dead(self._ranks)
        return f"a worker process of TensorRT-LLM is gone (pid {', '.join(map(str, lost))})" if lost else None

    async def close(self) -> None:
        """Shut the engine down, within a few seconds; what does not end by then ends with the process."""
        self.close_gates()
        for request in (*self._requests.values(), *self._unanswered):
            request.leave()
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._llm.shutdown()
            with contextlib.suppress(RuntimeError):  # too late: the loop is closed
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, name="shutdown", daemon=True).start()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(done.wait(), _SHUTDOWN_SECONDS)

    # -- requests --------------------------------------------------------------------------------------------------

    def start(self, message: Submit, images: Any = None) -> None:
        if (lost := background_error(self._llm)) is not None:
            return self._lose(lost)
        request = self._made(message)
        adapter = message.adapter
        try:
            sampling = sampling_arguments(message, self._beam_logprobs)
            if message.guide is not None:
                sampling["guided_decoding"] = self._guided_params(**guide_arguments(message.guide, self._guide_library))
            if message.logit_bias:
                sampling["embedding_bias"] = self._biases.tensor(message.logit_bias)
            if self._speculates:
                sampling["return_perf_metrics"] = True  # has the tokens that drafts proposed
            parameters = self._sampling_params(**sampling)
            lora = None if adapter is None else self._lora_request(adapter.name, adapter.id, adapter.path)
        except Exception as error:  # nothing has reached the engine
            return self._reject(request, error)
        try:
            result = request.result = self._llm.generate_async(
                self._inputs(message, images),
                sampling_params=parameters,
                lora_request=lora,
                streaming=message.sampling.beam_width == 1,
                **self._salt(message),
            )
        except (ValueError, TypeError, IndexError, self._request_error) as error:
            return self._reject(request, error)
        except Exception as error:
            # TensorRT-LLM's processor of images runs in this call, and raises anything.
            if message.images and self._trouble() is None:
                return self._reject(request, error)
            return self._lose(error)
        try:
            if self._prompts is not None:
                self._prompts.check(message, result.prompt_token_ids)
        except InvalidRequestError as error:
            self._abort(request)
            return self._reject(request, error)
        self._requests[message.request_id] = request
        request.follow(result)

    def _inputs(self, message: Submit, images: Any = None) -> Sequence[int] | dict[str, Any]:
        return message.prompt_ids if self._prompts is None else self._prompts.prompt(message, images)

    def _salt(self, message: Submit) -> dict[str, str]:
        """The `cache_salt` of a prompt, its own if it is scored: reused blocks have no logits."""
        salt = message.cache_salt if self._prompts is None else self._prompts.salt(message)
        if message.prompt_logprobs is not None:
            salt = uuid4().hex
        return {"cache_salt": salt} if salt and self._salts_prompts else {}

    def fail(self, message: Submit, error: Exception) -> None:
        self._reject(self._made(message), error)

    def end(self, request_id: int, finish: FinishReason, error: str | Refusal | None = None) -> None:
        self._step_buffer.step.end(request_id, finish, error)

    def _made(self, message: Submit) -> RunningRequest:
        request = RunningRequest(message, self._step_buffer, self._heartbeat, self._end_id, self._settle)
        request.speculates = self._speculates
        return request

    def cancel(self, request_id: int) -> None:
        """End a request early; unknown ids are ignored. Its end comes with the engine's last response."""
        request = self._requests.get(request_id)
        if self.cancel_held(request_id) or request is None or request.muted:
            return
        request.muted = True
        self._abort(request)

    def stats(self) -> Stats:
        return self.count_in(self._statistics.stats(len(self._requests)))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _settle(self, request: RunningRequest, error: Exception | None) -> None:
        """Handle the end of a request after its last response: an error ends the request, or the engine."""
        if error is not None and self._is_loss(error):
            self._lose(error)
            return
        if self._requests.get(request.message.request_id) is not request:
            return  # it had ended for the server before, which may have sent it again
        del self._requests[request.message.request_id]
        if error is None:
            return
        if not isinstance(error, self._request_error) and not request.muted:
            if not isinstance(error, ValueError):
                traceback.print_exception(error)
                error = ValueError(f"TensorRT-LLM's result cannot be read ({type(error).__name__}: {error})")
            self._abort(request)
        self._reject(request, error)

    def _is_loss(self, error: Exception) -> bool:
        return isinstance(error, _ENGINE_IS_GONE) and not isinstance(error, (NotImplementedError, self._request_error))

    def _abort(self, request: RunningRequest) -> None:
        message = request.message
        if message.logprobs and message.sampling.beam_width == 1 and not self._abortable_with_logprobs:
            return  # let it finish; its output is discarded
        if message.prompt_logprobs is not None and not request.responded:
            return  # `_check_aborts` does so later
        request.aborted_for, request.aborted_after = 0.0, self._heartbeat.responses
        try:
            request.result.abort()
        except Exception as error:
            self._lose(error)

    def _reject(self, request: RunningRequest, error: Exception) -> None:
        message = str(error)
        if _BROKEN.search(message) or (self._ends_with_an_iteration and _OUT_OF_MEMORY.search(message)):
            self._lose(EngineLostError(f"TensorRT-LLM cannot go on: {error}"))
        elif request.muted:
            request.end(FinishReason.CANCELLED)
        else:
            request.end(FinishReason.ERROR, Refusal(message) if isinstance(error, InvalidRequestError) else message)

    def _lose(self, error: Exception) -> None:
        self._loss = self._loss or error
        if not self._lost.done():
            self._lost.set_exception(error)

    def _check_aborts(self, tick: float) -> None:
        for request in list(self._requests.values()):
            if request.aborted_for is None:
                if request.muted and request.responded:
                    self._abort(request)
                continue
            request.aborted_for += tick
            if not request.responded and request.aborted_for >= _NO_RESPONSE_SECONDS:
                # The PyTorch backend silently drops a request that waits; the engine backend ends it when its
                # turn comes. If it is being computed after all, the next one waits inside the engine.
                request.end(FinishReason.CANCELLED)
                del self._requests[request.message.request_id]
                if request.aborted_after == self._heartbeat.responses:
                    # Or the engine is dead: its silence goes on, also where no client waits any more.
                    self._unanswered.append(request)
            elif request.aborted_for > self._hang_timeout:
                raise EngineLostError(
                    f"TensorRT-LLM did not end a request within {self._hang_timeout:g} seconds after it was aborted "
                    "(option.executor_hang_timeout)"
                )

    def _probe(self) -> None:
        """Send a request whose answer nobody reads, so that a broken worker is noticed while clients wait and send
        nothing.

        A worker keeps an error of its other threads until its next request, with which it ends (worker.py, about 1.2).
        """
        if not self._requests:
            return
        running = next(iter(self._requests.values())).message
        message = Submit(0, running.prompt_ids[:1], Sampling(1, beam_width=running.sampling.beam_width))
        sampling = self._sampling_params(**sampling_arguments(message, self._beam_logprobs))
        try:
            self._llm.generate_async(self._inputs(message), sampling_params=sampling, streaming=False)
        except Exception as error:
            if self._is_loss(error):
                self._lose(error)

    def _forget_unanswered(self) -> None:
        self._unanswered.clear()

    async def _read_statistics(self) -> None:
        """Read iteration statistics, which also prove that a busy engine is alive while nothing is generated."""
        idle = True
        try:
            while True:
                await asyncio.sleep(_STATISTICS_SECONDS)
                if not (self._requests or self._unanswered):
                    idle = True
                    continue
                # Without a timeout of its own: 1.3 waits for it on the event loop, and before a timeout that has passed
                # ends the statistics until the next request.
                with contextlib.suppress(asyncio.QueueEmpty):
                    async for iteration in self._llm.get_stats_async(timeout=0):
                        self._statistics.take(iteration)
                        self._heartbeat.iterations += not idle  # else it may be of earlier requests
                idle = False
        except Exception:
            print("TensorRT-LLM's iteration statistics cannot be read; the server goes on without them:", flush=True)
            traceback.print_exc()


def class_of(owner: str, version: str, name: str | None = None) -> Any:
    return getattr(import_module(module_of(owner, version)), name or owner)


_PROMPT_TOKENS = 8
_NEW_TOKENS = 3
"""The first request runs one iteration that reads the prompt, and some that read a token."""
_IMAGES: frozenset[str] = frozenset({"images"})


def first_requests_of(limits: Limits, features: frozenset[str], token_id: int = 1) -> list[FirstRequest]:
    """See `first_requests`. Their prompts are one token several times; where all requests have beams, so have they."""
    prompt = [token_id] * max(1, min(_PROMPT_TOKENS, limits.max_prompt_len or _PROMPT_TOKENS, limits.max_seq_len // 2))
    tokens = max(1, min(_NEW_TOKENS, limits.max_seq_len - len(prompt)))
    if not limits.beams:
        return first_requests(features, prompt, tokens)
    beams = Sampling(tokens, beam_width=limits.beams)
    requests = [FirstRequest("a request with beams", Submit(0, prompt, beams))]
    if Feature.BEAM_LOGPROBS in features:
        submit = Submit(0, prompt, beams, logprobs=True)
        requests.append(FirstRequest("a request with log-probabilities of beams", submit, features & LOGPROBS))
    return requests


def guide_problem(package: str, tokenizer_dir: str, *, trust_remote_code: bool) -> str | None:
    """Return why TensorRT-LLM cannot prepare `package` for the model's guides, which would end the load; else None.

    It makes a table of the tokenizer (`_xgrammar_tokenizer_info` in `llmapi/tokenizer.py`, about 1.2) for every model
    with a guided decoding backend, also where no request has a guide.
    """
    if _is_ordinary(Path(tokenizer_dir)):
        return None
    from transformers import AutoTokenizer  # takes seconds where TensorRT-LLM has not imported it yet

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_dir, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception:
        return None  # the load finds out and says more
    name = type(tokenizer).__name__
    if tokenizer.eos_token_id is None:
        return f"the tokenizer ({name}) has no end token"
    files = tokenizer.vocab_files_names.get("vocab_file", "")
    if tokenizer.is_fast or (package == "xgrammar" and "tiktoken" in files):
        return None
    return f"{package} reads tokenizers with a tokenizer.json, and this one is a {name} in Python"


def _is_ordinary(tokenizer_dir: Path) -> bool:
    """Return whether the files alone show a fast tokenizer with an end token, as those of most models do."""
    try:
        config = json.loads((tokenizer_dir / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    has_end = isinstance(config, dict) and bool(config.get("eos_token")) and "auto_map" not in config
    return has_end and (tokenizer_dir / "tokenizer.json").is_file()


# -- models that score -------------------------------------------------------------------------------------------------


class TensorRtLlmPoolingExecutor(PoolingExecutor):
    """See `PoolingExecutor`. `arguments` are those of LLM as plain data (see `build_arguments`).

    `LLM.encode` runs in this process, on one GPU, without ranks, KV cache and scheduler
    (`_torch/pyexecutor/encoder_executor.py` of about 1.4). A batch that is too large is a ValueError. What a model
    takes beside its ids, such as the places of pairs' second texts, has to be on the GPU, and is refused with CUDA
    graphs.
    """

    def __init__(
        self,
        *,
        model: str,
        tokenizer: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        **limits: Any,
    ) -> None:
        os.environ.update(environment)
        prepare_mpi()
        version: str = import_module("tensorrt_llm").__version__
        if not arguments.get("trust_remote_code"):
            model = str(without_code(Path(model)))
        llm = class_of("LLM.pytorch", version, "LLM")
        self._llm = llm(model=model, tokenizer=tokenizer, **build_arguments(arguments))
        super().__init__(**limits)
        self.details = {"TensorRT-LLM": version, "backend": "pytorch", "GPUs": 1}

    def compute(self, batch: Sequence[Submit]) -> Vectors:
        import torch

        kinds = torch.tensor([kind for request in batch for kind in _kinds(request)], dtype=torch.int32, device="cuda")
        outputs = self._llm.encode([list(request.prompt_ids) for request in batch], token_type_ids=kinds)
        return np.array([output.logits.tolist() for output in outputs], np.float32).reshape(len(batch), 1)


def _kinds(request: Submit) -> list[int]:
    """A number for each token of a pair: 1 for the tokens of the second text, 0 for the others."""
    length, second = len(request.prompt_ids), 0 if request.pooling is None else request.pooling.second
    return [0] * (second or length) + [1] * (length - (second or length))
