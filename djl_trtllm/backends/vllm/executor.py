"""vLLM's engine core as an executor: its scheduler and its model run in the engine process, whose loop runs them."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from djl_trtllm.backends.json_grammar import GUIDE_PROGRAM, guide_arguments
from djl_trtllm.backends.vllm.names import arguments_of
from djl_trtllm.config.options.choices import GuidedDecoding
from djl_trtllm.executor import images, protocol
from djl_trtllm.executor.gated import WAIT_SECONDS, GatedExecutor
from djl_trtllm.executor.pooling import PoolingExecutor, Vectors
from djl_trtllm.executor.ranks import Ranks
from djl_trtllm.request import Adapter, FinishReason

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from vllm import SamplingParams

RANKS = "vLLM", r"VllmWorker-(\d+)"
"""The ranks of vLLM's `MultiprocExecutor` (vllm/v1/executor/multiproc_executor.py), one for each of several GPUs."""
_EMPTY_SECONDS = 0.001
"""The pause after iterations without output: vLLM's own loop makes it too."""
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_SEEDS = 2**63
"""The bound of seeds: vLLM keeps them in arrays of signed 64-bit numbers, and ours are unsigned."""
_MOST_SPELLINGS, _MOST_SPELT, _MOST_STOPS = 128, 1024, 128
"""The most spellings of bad words (two for each word), their tokens, and stop tokens beside `min_new_tokens`.

vLLM's newer runner raises for more while it runs a batch, which would end the process (vllm/v1/worker/gpu/sample).
"""

_ARGUMENTS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Fields of `Sampling` and their arguments of vLLM's SamplingParams."""
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
"""Fields that only sampled sequences pass, under the same names; greedy ones have temperature 0 in vLLM."""
SAMPLING = frozenset({"do_sample", "seed", *_SAMPLED})

FEATURES: frozenset[str] = frozenset(
    {
        *_ARGUMENTS,
        *SAMPLING,
        "stop_token_ids",
        "bad",
        "top_logprobs",
        "prompt_logprobs",
        "logit_bias",
        "cache_salt",
        protocol.Feature.LOGPROBS,
    }
)
"""The features that vLLM honours, see `Ready.features`."""


def checks_sampled_drafts() -> bool:
    """Whether vLLM on a CPU checks the drafts of a sampled sequence with the parameters of its request.

    vLLM 0.32 without Triton writes the parameters of each drafted token into a copy and reads other memory: tokens are
    wrong, and a `top_k` ends the engine process. Greedy drafts need no parameters.
    """
    from torch import int32, tensor
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    expanded = expand_batch_to_tokens(tensor([0.5, 0.25]), tensor([1, 3], dtype=int32), 3)
    return bool(expanded.tolist() == [0.5, 0.25, 0.25])


def sampling_arguments(request: protocol.Submit) -> dict[str, Any]:
    """Return the keyword arguments of SamplingParams, without the guide. Stop strings are the server's."""
    sampling = request.sampling
    arguments: dict[str, Any] = {argument: getattr(sampling, name) for name, argument in _ARGUMENTS.items()}
    if sampling.do_sample:
        arguments |= {name: getattr(sampling, name) for name in _SAMPLED}
        arguments["seed"] = None if sampling.seed is None else sampling.seed % _SEEDS
    else:
        arguments["temperature"] = 0.0
    if request.logprobs:
        arguments["logprobs"] = request.top_logprobs
    if request.stop_token_ids:
        arguments["stop_token_ids"] = list(request.stop_token_ids)
    if request.bad:
        arguments["bad_words"] = list(request.bad)
    if request.logit_bias:
        arguments["logit_bias"] = dict(request.logit_bias)
    if request.prompt_logprobs is not None:  # vLLM computes such a prompt, whatever its prefix cache has of it
        arguments["prompt_logprobs"] = request.prompt_logprobs
    return arguments


def token_prompt(request: protocol.Submit) -> dict[str, Any]:
    """The prompt of a request without images as vLLM's input processor takes it."""
    prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
    return prompt | ({"cache_salt": request.cache_salt} if request.cache_salt else {})


def load_engine(arguments: dict[str, Any], environment: Mapping[str, str]) -> tuple[Any, Callable[[], None]]:
    """vLLM's LLMEngine with its core in this process, and a check, which raises RankError if a rank has ended.

    vLLM itself notices an ended rank late. `environment` are variables that it gets unless they are set. Without a
    `seed` among the arguments, the random numbers of requests without one begin elsewhere in each engine process:
    vLLM's own default is 0, so that every worker, and every start, would give the same answers. Raises RankError, and
    what vLLM raises.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    import vllm
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = {"seed": secrets.randbits(31), **arguments}  # as many bits as NumPy and PyTorch take
    ranks = Ranks(*RANKS)
    with ranks.loading():
        engine = LLMEngine.from_engine_args(
            EngineArgs(**_with_objects(arguments, arguments_of(vllm.__version__))),
            # Of defaults that depend on what vLLM is used for, those of a server.
            usage_context=UsageContext.OPENAI_API_SERVER,
        )
    return engine, ranks.check


def described(engine: Any) -> dict[str, Any]:
    """Facts about the engine and its device, for `Ready.details`."""
    import vllm

    return {
        "vLLM": vllm.__version__,
        "device": str(engine.vllm_config.device_config.device_type),
        "precision": str(engine.vllm_config.model_config.dtype).removeprefix("torch."),
    }


class ImagePrompts(images.ImagePrompts):
    """Prompts with images: vLLM takes ids with one placeholder for each image, and pixels. `engine` is its LLMEngine.

    vLLM keeps processed images, in a cache of `mm_processor_cache_gb`, and what its encoder makes of them, by the names
    that they get here: those of a file's content and of the prompt's salt, as in the prefix cache.
    """

    def __init__(self, directory: Path, engine: Any) -> None:
        super().__init__(directory)
        self._renderer = engine.input_processor.renderer
        self._empty = engine.reset_mm_cache

    def prompt(self, request: protocol.Submit, pictures: Sequence[Picture]) -> dict[str, Any]:
        """The prompt as vLLM's input processor takes it. Raises ValueError, and what vLLM raises."""
        given: dict[str, Any] = {
            "prompt_token_ids": self.collapsed(request),
            "multi_modal_data": {"image": pictures},
            "multi_modal_uuids": {"image": self.names(request)},
        }
        if request.cache_salt:
            given["cache_salt"] = request.cache_salt
        rendered: dict[str, Any]
        try:
            (rendered,) = self._renderer.render_cmpl([given])
        except Exception:
            self._empty()  # it is not known how far vLLM came
            raise
        if rendered["prompt_token_ids"] != list(request.prompt_ids):
            self.forget(rendered)
            raise ValueError("vLLM's processor makes other tokens of its images than the server has counted")
        return rendered

    def forget(self, prompt: Mapping[str, Any]) -> None:
        """Take the images of a prompt out of vLLM's cache: its request ended between `prompt` and `add_request`.

        vLLM has a cache on each side (input processor and core), and both have to see the same images. A version that
        cannot remove one image removes all.
        """
        invalidate = getattr(getattr(self._renderer, "mm_processor_cache", None), "invalidate", None)
        if invalidate is None:
            self._empty()
        else:
            for name in prompt.get("mm_hashes", {}).get("image", ()):
                invalidate(name)


class VllmExecutor(GatedExecutor):
    """The `GatedExecutor` of vLLM. `arguments` are those of EngineArgs, as plain data.

    Found in vLLM's sources (0.26 to 0.33). With VLLM_ENABLE_V1_MULTIPROCESSING=0 `LLMEngine.engine_core` is a client
    whose `get_output` runs one iteration: it schedules, executes, and returns what came of the batch (with asynchronous
    scheduling of the batch before, so that the first iteration has no output). `LLMEngine.step` would make text and
    objects of it for each request; nothing here needs them. A prompt that has a `type` is taken as it is, others go
    through a renderer. `abort_requests` gives back the KV cache at once, and nothing is heard of the request any more.
    A request whose guide is being compiled waits in the scheduler, whose iterations are empty meanwhile.
    """

    def __init__(
        self,
        *,
        arguments: dict[str, Any],
        environment: Mapping[str, str],
        tokenizer_dir: str,
        guides: str,
        max_sequences: int,
        lookahead: int,
        images: bool = False,
    ) -> None:
        super().__init__()
        engine, self.check = load_engine(arguments, environment)
        from vllm import SamplingParams, exceptions as vllm_exceptions
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.engine.exceptions import EngineDeadError

        self._sampling_params, self._structured_outputs = SamplingParams, StructuredOutputsParams
        self._lora_request = LoRARequest
        self._losses = (EngineDeadError,)
        self._wrong = (ValueError, TypeError, getattr(vllm_exceptions, "VLLMClientError", ValueError))
        self._core, self._input_processor = engine.engine_core, engine.input_processor
        self._prompts = ImagePrompts(Path(arguments["model"]), engine) if images else None
        if self._prompts is not None:
            self.open_images(self._prompts.pictures)
        self.open_guides(GUIDE_PROGRAM.format(guides), tokenizer_dir)
        configuration = engine.vllm_config
        self._vocabulary: int = configuration.model_config.get_vocab_size()
        self._kv_blocks: int = configuration.cache_config.num_gpu_blocks or 0
        self._sequences: dict[str, protocol.Submit] = {}
        """Requests by their names in vLLM, without prompts."""
        self._names = map(str, itertools.count())
        """New names of requests in vLLM: a cancelled request's id is free again while vLLM may still have it."""
        self._library = guides
        self._iterations, self._empty = 0, 0
        self._seconds: float | None = None
        self._scheduler: Any
        """The statistics of vLLM's last iteration; the first come from a request before any client's."""
        self._speculates = configuration.speculative_config is not None
        self._begin_to_count()
        self.limits = protocol.Limits(
            max_sequences=max_sequences,
            kv_blocks=0,
            block_size=configuration.cache_config.block_size,
            max_seq_len=configuration.model_config.max_model_len,
            lookahead=lookahead,
            tries_guides=True,
            draws_seeds=False,  # each is a generator of its own, whose row vLLM samples alone
            draft_tokens=getattr(configuration.speculative_config, "num_speculative_tokens", 0),
        )
        lost = frozenset[str]() if guides == GuidedDecoding.XGRAMMAR else frozenset({protocol.Feature.STRUCTURAL_TAG})
        if self._speculates and str(configuration.device_config.device_type) == "cpu" and not checks_sampled_drafts():
            lost |= SAMPLING
            print("sampled requests are refused: this vLLM checks their drafts with wrong parameters", flush=True)
        self.features = (FEATURES | protocol.GUIDES | (protocol.IMAGES if images else set())) - lost
        # vLLM compiles some kernels at their first use, and speculation, for example, has no min_p.
        image = None if self._prompts is None else self._prompts.first()
        self.features -= self.warm_up(protocol.first_requests(self.features, [1, 1], 2, image, draws_seeds=False))
        self._begin_to_count()
        if configuration.lora_config is not None:
            # Where an adapter runs, vLLM gives the rows of a prompt the adapters of the batch: the sizes do not fit.
            self.features = self.features - {"prompt_logprobs"} | {protocol.Feature.ADAPTERS}
        self.details = {
            **described(engine),
            "KV cache": f"{self._kv_blocks} blocks of {self.limits.block_size} tokens",
        }

    def close(self) -> None:
        self.close_gates()
        self._core.shutdown()

    @property
    def busy(self) -> bool:
        return bool(self._sequences or self.news.has_news or self.holds)

    def cancel(self, request_id: int) -> None:
        name = next((name for name, each in self._sequences.items() if each.request_id == request_id), None)
        if name is not None:
            del self._sequences[name]
            self._core.abort_requests([name])
            self.end(request_id, FinishReason.CANCELLED)
        else:
            self.cancel_held(request_id)

    def step(self) -> protocol.Step:
        self.advance(0.0 if self._sequences else WAIT_SECONDS)
        if self._sequences:
            began = time.monotonic()
            outputs = self._core.get_output()
            self._iterations += 1
            self._seconds = time.monotonic() - began
            if outputs.scheduler_stats is not None:
                self._count(outputs.scheduler_stats)
            self._take(outputs.outputs)
            self._empty = 0 if outputs.outputs else self._empty + 1
            if self._empty > 1:
                time.sleep(_EMPTY_SECONDS)
        step, self.news = self.news, protocol.Step()
        return step

    def stats(self) -> protocol.Stats:
        scheduler, running = self._scheduler, len(self._sequences)
        waiting = min(running, scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs)
        usage = scheduler.kv_cache_usage if running else 0.0
        return self.count_in(
            protocol.Stats(
                running,
                usage,
                queued=waiting,
                iterations=self._iterations,
                iteration_seconds=self._seconds,
                kv_blocks=self._kv_blocks,
                kv_blocks_used=round(usage * self._kv_blocks),
                kv_hit_rate=self._hits / self._queried if self._queried else None,
                draft_tokens=self._draft_tokens if self._speculates else None,
                drafts=self._drafts if self._speculates else None,
            )
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def start(self, request: protocol.Submit, images: Any = None) -> None:
        name, adapter = next(self._names), request.adapter
        prompt: Mapping[str, Any] = token_prompt(request)
        try:
            parameters = self._parameters(request)
            if images is not None and self._prompts is not None:
                prompt = self._prompts.prompt(request, images)
            processed = self._input_processor.process_inputs(
                name,
                prompt,
                parameters,
                ("generate",),
                lora_request=None if adapter is None else self._lora(adapter),
            )
            _check_bounds(processed.sampling_params, self._vocabulary)
            processed.external_req_id = name
            self._core.add_request(processed)
        except self._losses:
            raise
        except Exception as error:
            if images is not None and self._prompts is not None:
                self._prompts.forget(prompt)
            self.fail(request, error)
        else:
            self._sequences[name] = replace(request, prompt_ids=(), images=())  # vLLM has them, and they may be large

    def fail(self, request: protocol.Submit, error: Exception) -> None:
        if isinstance(error, self._wrong):
            self.refuse(request, protocol.Refusal(str(error)))
        else:
            traceback.print_exception(error)
            self.refuse(request, f"{type(error).__name__}: {error}")

    def _lora(self, adapter: Adapter) -> Any:
        """An adapter as vLLM takes it, by its id: for vLLM, adapters of one name are one adapter."""
        return self._lora_request(f"{adapter.name}-{adapter.id}", adapter.id, adapter.path)

    def _parameters(self, request: protocol.Submit) -> SamplingParams:
        arguments = sampling_arguments(request)
        if stops := arguments.get("stop_token_ids"):  # the model generates no others
            arguments["stop_token_ids"] = [each for each in stops if each < self._vocabulary]
        if request.guide is not None:
            arguments["structured_outputs"] = self._structured_outputs(**guide_arguments(request.guide, self._library))
        return self._sampling_params(**arguments, detokenize=False, skip_clone=True)

    def _take(self, outputs: list[Any]) -> None:
        sequences, news = self._sequences, self.news
        for output in outputs:
            request = sequences.get(output.request_id)
            if request is None:
                continue
            number = request.request_id
            if (scores := output.new_prompt_logprobs_tensors) is not None:
                news.prompts[number] = [None, *_logprobs(scores, request.prompt_logprobs or 0)]
            wanted = request.logprobs and output.new_logprobs is not None
            if output.new_token_ids:
                logprobs = _logprobs(output.new_logprobs, request.top_logprobs) if wanted else None
                try:
                    news.add(number, output.new_token_ids, logprobs)
                except ValueError as problem:
                    del sequences[output.request_id]
                    self._core.abort_requests([output.request_id])
                    news.end(number, FinishReason.ERROR, str(problem))
                    continue
                if self._speculates:
                    news.accepted[number] = len(output.new_token_ids) - 1
            if output.prefill_stats is not None and output.prefill_stats.num_cached_tokens:
                news.cached[number] = output.prefill_stats.num_cached_tokens
            if output.finish_reason is not None:
                reason = str(output.finish_reason)
                finish = _FINISH.get(reason, FinishReason.ERROR)
                error = f"vLLM ended the request with {reason!r}" if finish is FinishReason.ERROR else None
                drafts = getattr(output, "spec_decode_metrics", None)  # since 0.29
                news.end(number, finish, error, None if drafts is None else drafts.num_draft_tokens)
                del sequences[output.request_id]

    def _begin_to_count(self) -> None:
        self._queried = self._hits = self._draft_tokens = self._drafts = 0

    def _count(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        if scheduler.prefix_cache_stats is not None:
            self._queried += scheduler.prefix_cache_stats.queries
            self._hits += scheduler.prefix_cache_stats.hits
        if scheduler.spec_decoding_stats is not None:
            self._draft_tokens += scheduler.spec_decoding_stats.num_draft_tokens
            self._drafts += scheduler.spec_decoding_stats.num_drafts


def _with_objects(arguments: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    """The arguments with objects of vLLM's configuration classes in place of dicts, which not every version takes."""
    import vllm.config

    def made(name: str, value: Any) -> Any:
        names = re.findall(r"\w+Config\b", types.get(name, "")) if isinstance(value, dict) else []
        return next((getattr(vllm.config, each)(**value) for each in names if hasattr(vllm.config, each)), value)

    return {name: made(name, value) for name, value in arguments.items()}


def _check_bounds(parameters: SamplingParams, vocabulary: int) -> None:
    """Raise ValueError for a request beyond the bounds of vLLM's runner, after the input processor has tokenised it.

    Its kernels write to the places of token ids without a look at the end of the vocabulary.
    """
    spellings = parameters.bad_words_token_ids or ()
    for token in itertools.chain(parameters.all_stop_token_ids if parameters.min_tokens else (), *spellings):
        if token >= vocabulary:
            raise ValueError(f"token {token} of bad words or stop tokens: the model's tokens end at {vocabulary - 1}")
    tokens, stops = sum(map(len, spellings)), len(parameters.all_stop_token_ids)
    if len(spellings) > _MOST_SPELLINGS or tokens > _MOST_SPELT:
        raise ValueError(
            f"bad words (with and without a space before each) are {len(spellings)} sequences of {tokens} tokens "
            f"in all: expected at most {_MOST_SPELLINGS} of {_MOST_SPELT}"
        )
    if parameters.min_tokens and stops > _MOST_STOPS:
        raise ValueError(
            f"{stops} stop tokens with 'min_new_tokens': expected at most {_MOST_STOPS}, the model's ends included"
        )


def _logprobs(found: Any, top: int) -> list[protocol.Logprob]:
    """The log-probabilities of tokens. In each row the token's own is the first, and the likeliest follow."""
    if not top:
        return [*found.logprobs[:, 0].tolist()]
    rows = zip(found.logprob_token_ids.tolist(), found.logprobs.tolist(), strict=True)
    return [protocol.Ranked(values[0], ids[1 : top + 1], values[1 : top + 1]) for ids, values in rows]


# -- models that embed or score ----------------------------------------------------------------------------------------


_TASKS = {"embed": "embed", "score": "classify"}


class VllmPoolingExecutor(PoolingExecutor):
    """See `PoolingExecutor`. `arguments` are those of EngineArgs, as plain data.

    vLLM's pooler picks the tokens that count, without its activation, which the server applies.
    """

    def __init__(
        self, *, arguments: dict[str, Any], environment: Mapping[str, str], task: Any, max_seq_len: int, **limits: Any
    ) -> None:
        engine, self.check = load_engine(arguments, environment)
        from vllm import PoolingParams

        self._core, self._input_processor = engine.engine_core, engine.input_processor
        self._parameters = PoolingParams
        self._task = _TASKS[task]
        self._names = map(str, itertools.count())
        longest = min(max_seq_len, engine.vllm_config.model_config.max_model_len)
        super().__init__(task=task, max_seq_len=longest, **limits)
        self.details = described(engine)

    def compute(self, batch: Sequence[protocol.Submit]) -> Vectors:
        names = [self._add(request) for request in batch]
        found: dict[str, Vectors] = {}
        while len(found) < len(names):
            for output in self._core.get_output().outputs:
                if output.pooling_output is None:
                    raise RuntimeError(f"vLLM ended a text with {output.finish_reason!s} and gave no vector")
                found[output.request_id] = output.pooling_output.float().numpy().reshape(-1)
        return np.stack([found[name] for name in names])

    def _add(self, request: protocol.Submit) -> str:
        """Give a request to the core; returns its name there."""
        name, second = next(self._names), 0 if request.pooling is None else request.pooling.second
        kinds = {"compressed_token_type_ids": second} if second else None
        parameters = self._parameters(task=self._task, use_activation=False, extra_kwargs=kinds)
        self._core.add_request(
            self._input_processor.process_inputs(name, token_prompt(request), parameters, (self._task,))
        )
        return name
