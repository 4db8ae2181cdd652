"""OpenVINO GenAI's `ContinuousBatchingPipeline` as an executor: in-flight batching with a paged KV cache on the CPU."""

import secrets
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from msgspec import structs
from openvino_genai import GenerationConfig, GenerationFinishReason, GenerationStatus, SchedulerConfig, draft_model
from openvino_genai.py_openvino_genai import ContinuousBatchingPipeline, GenerationHandle

from djl_trtllm.backends.openvino.compile import NO_ATTENTION, has_tokenizer, takes_images
from djl_trtllm.backends.openvino.guides import CompiledGuides, GuideCompiler, read_vocabulary, structured_output
from djl_trtllm.backends.openvino.kv_cache import BLOCK_TOKENS, PrefixCacheMirror, PromptSalts
from djl_trtllm.backends.openvino.prompt_scorer import PromptScorer
from djl_trtllm.executor import images
from djl_trtllm.executor.gated import WAIT_SECONDS, GatedExecutor
from djl_trtllm.executor.protocol import Feature, Limits, Refusal, Stats, Step, Submit
from djl_trtllm.request import FinishReason, Sampling

_MARK = "<ov_genai_"
"""The beginning of OpenVINO GenAI's own marks of images and videos, which it replaces in any text."""


def refusal(error: Exception) -> str | Refusal:
    """The reason why a prompt could not be started.

    OpenVINO's processor refuses prompts that the server takes.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, MemoryError):
        return f"the engine's memory is not enough for the prompt: {lines[-1]}"
    return Refusal(f"the prompt is refused: {lines[-1]}")


class ImagePrompts(images.ImagePrompts):
    """The `executor.images.ImagePrompts` of OpenVINO. `tokenizer` is the pipeline's.

    OpenVINO GenAI takes prompts with images as text, which it tokenises, and pixels, which its processor reads. The ids
    of the server become the text that gives the same ids again. After a prompt the engine takes no tokens, so that a
    sequence that goes on in another process begins anew there (`Limits.repeats`).
    """

    def __init__(self, engine_dir: Path, tokenizer: Any) -> None:
        super().__init__(engine_dir)
        self._tokenizer = tokenizer

    def tensors(self, request: Submit) -> list[ov.Tensor]:
        """The images as `add_request` takes them; any one thread may call it. Raises ValueError."""
        # In the order rows, columns, colours.
        return [ov.Tensor(np.array(each)[np.newaxis]) for each in self.pictures(request)]

    def text(self, request: Submit) -> str:
        """The text of a prompt, as `add_request` takes it. Raises ValueError."""
        given = self.collapsed(request)
        text: str = self._tokenizer.decode(given, skip_special_tokens=False)
        if _MARK in text:
            raise ValueError(f"leave '{_MARK}' out of texts: OpenVINO GenAI's own marks of images begin with it")
        # `add_request` adds special tokens, too.
        if self._tokenizer.encode(text).input_ids.data[0].tolist() != given:
            raise ValueError("its tokens are not those of a text, and this engine takes texts only")
        return text


_GUIDE_PROGRAM = "djl_trtllm.backends.openvino.guides"

# A pybind11 enum compares through a Python call; identities of its values do not.
_LENGTH = GenerationFinishReason.LENGTH

_ARGUMENTS = (
    "max_new_tokens",
    "min_new_tokens",
    "do_sample",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Fields of `Sampling` that GenerationConfig has under the same names."""

_SAMPLED = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "seed": "rng_seed"}
"""The fields of `Sampling` that only sequences with random choices have, with GenerationConfig's names."""

FEATURES: frozenset[str] = frozenset(
    {*_ARGUMENTS, *_SAMPLED, "ignore_eos", "stop_token_ids", "cache_salt", Feature.LOGPROBS, Feature.FREE_LOGPROBS}
)
"""The features that OpenVINO honours, see `Ready.features`."""

GUIDES: frozenset[str] = frozenset({Feature.JSON, Feature.REGEX, Feature.GRAMMAR})
"""Features that OpenVINO honours beside `FEATURES` where the engine has a tokenizer of OpenVINO's own format."""

SCORES: frozenset[str] = frozenset({"prompt_logprobs"})
"""Features that OpenVINO honours beside `FEATURES` where the weights fit into memory twice."""

IMAGES: frozenset[str] = frozenset({"images"})
OF_TEXTS: frozenset[str] = frozenset({"repetition_penalty"})
"""Features that OpenVINO lacks where the engine has the parts that read images.

OpenVINO GenAI computes the penalty without the tokens of a prompt that it gets as a text.
"""

_MIRRORED = 4
"""The blocks of prompts that are remembered, as a multiple of the KV cache's: prompts that two API keys may share."""
_SAME = 1e-3
"""The most that two log-probabilities of one model may differ by."""


def generation_config(request: Submit) -> GenerationConfig:
    """Return the request as OpenVINO GenAI's configuration."""
    sampling = request.sampling
    config = GenerationConfig()
    for name in _ARGUMENTS:
        setattr(config, name, getattr(sampling, name))
    if sampling.do_sample:
        for name, argument in _SAMPLED.items():
            setattr(config, argument, getattr(sampling, name))
    # ignore_eos would disable stop_token_ids as well; it is not needed when there are no end ids among them.
    config.ignore_eos = sampling.ignore_eos and not request.stop_token_ids
    config.apply_chat_template = False
    config.logprobs = 1 if request.logprobs else 0
    if request.stop_token_ids:
        config.set_eos_token_id(request.stop_token_ids[0])
        config.stop_token_ids = set(request.stop_token_ids)
    if request.guide is not None:
        config.structured_output_config = structured_output(request.guide)
    return config


class _Sequence:
    __slots__ = ("cached_tokens", "cancelled", "following", "handle", "logprobs", "repeated", "token_ids")

    def __init__(self, handle: GenerationHandle, request: Submit, ids: list[int], cached_tokens: int) -> None:
        self.handle = handle
        self.following: tuple[Submit, list[int], int] | None = None
        """The request that this one is read before, see `OpenVinoExecutor._start_penalised`."""
        self.logprobs = request.logprobs
        self.cached_tokens = cached_tokens
        self.token_ids = ids
        self.cancelled = False
        self.repeated = request.repeated_ids
        """The tokens that the sequence has to make again before new ones."""


def _load(engine_dir: str, scheduler: SchedulerConfig, properties: dict[str, Any]) -> ContinuousBatchingPipeline:
    try:
        return ContinuousBatchingPipeline(engine_dir, scheduler, "CPU", properties, {})
    except RuntimeError as error:
        if "sdpa_to_paged_attention" not in str(error):
            raise
        raise RuntimeError(
            f"{NO_ATTENTION}: the model in {engine_dir} has no attention layers whose KV cache could be paged"
        ) from error


def _new(
    sequence: _Sequence, token_ids: list[int], logprobs: list[float] | None
) -> tuple[list[int], list[float] | None]:
    """The tokens after those that a sequence makes again. Raises ValueError if it makes other ones."""
    count = min(len(sequence.repeated), len(token_ids))
    if token_ids[:count] != sequence.repeated[:count]:
        raise ValueError("the request could not go on: it had other tokens before the engine process was lost")
    sequence.repeated = sequence.repeated[count:]
    return token_ids[count:], None if logprobs is None else logprobs[count:]


class OpenVinoExecutor(GatedExecutor):
    """The `GatedExecutor` of OpenVINO GenAI.

    Beyond the protocol, the caller must never submit more requests than their KV cache blocks (prompt and whole output,
    plus one block each) fit into `Limits.kv_blocks`. An iteration that can schedule nothing loses every live request
    (`IGNORED`); the rolling batch's admission prevents that.
    """

    def __init__(
        self,
        *,
        engine_dir: str,
        max_num_batched_tokens: int,
        num_kv_blocks: int,
        enable_prefix_caching: bool,
        keeps_keys_apart: bool,
        kv_cache_precision: str,
        inference_precision: str,
        max_sequences: int,
        max_seq_len: int,
        num_threads: int | None = None,
        scores_prompts: bool = False,
        draft_tokens: int = 0,
        draft_dir: str | None = None,
        lookup_ngram: int = 0,
    ) -> None:
        super().__init__()
        scheduler = SchedulerConfig()
        scheduler.max_num_batched_tokens = max_num_batched_tokens
        scheduler.num_kv_blocks = num_kv_blocks
        scheduler.enable_prefix_caching = enable_prefix_caching
        # Without split fuse, a prompt longer than max_num_batched_tokens raises inside step(), and over-committed runs
        # were seen to segfault. With it, max_num_seqs has no effect: the rolling batch holds the batch size.
        scheduler.dynamic_split_fuse = True
        # The plugin's default KV cache precision is u8, which changes greedy output.
        properties: dict[str, Any] = {
            "KV_CACHE_PRECISION": kv_cache_precision,
            "INFERENCE_PRECISION_HINT": inference_precision,
        }
        if num_threads is not None:
            properties["INFERENCE_NUM_THREADS"] = num_threads
        speculating: dict[str, Any] = {}
        if draft_dir is not None:
            speculating["draft_model"] = draft_model(draft_dir, "CPU", **properties)
        elif draft_tokens:
            speculating["prompt_lookup"] = True
        self._draft_tokens, self._lookup_ngram = draft_tokens, lookup_ngram
        # With a draft model, a prompt that is read in parts gets wrong output (2026.4): prompts wait for a step that
        # has room for all of one.
        self._whole_prompts = 0 if draft_dir is None else max_num_batched_tokens
        self._held: deque[Submit] = deque()
        self._unread: dict[int, int] = {}
        """Prompt tokens, by request, of the prompts that are in the pipeline and have no output yet."""
        self._pipeline = _load(engine_dir, scheduler, properties | speculating)
        self._image_prompts: ImagePrompts | None = None
        self._read: dict[int, list[ov.Tensor]] = {}
        """The images of requests that are not started."""
        if takes_images(Path(engine_dir)):
            self._image_prompts = ImagePrompts(Path(engine_dir), self._pipeline.get_tokenizer())
            self.open_images(self._image_prompts.tensors)
        vocabulary = read_vocabulary(Path(engine_dir))
        self._salts = PromptSalts(vocabulary)
        takes_salts = not enable_prefix_caching or self._salts_change_nothing(vocabulary)
        if not takes_salts:
            lost = "the prefix cache is off" if keeps_keys_apart else "requests with cache_salt are refused"
            print(f"{lost}: this model's prompts cannot be kept apart in the prefix cache", flush=True)
            scheduler.enable_prefix_caching = enable_prefix_caching = not keeps_keys_apart
            self._pipeline = _load(engine_dir, scheduler, properties | speculating)
        self._scorer = PromptScorer(Path(engine_dir), properties, vocabulary) if scores_prompts else None
        self._sequences: dict[int, _Sequence] = {}
        self._prefixes = (
            PrefixCacheMirror(capacity=num_kv_blocks, block_size=BLOCK_TOKENS) if enable_prefix_caching else None
        )
        self.limits = Limits(
            max_sequences=max_sequences,
            kv_blocks=num_kv_blocks,
            block_size=BLOCK_TOKENS,
            max_seq_len=max_seq_len,
            draft_tokens=draft_tokens,
            seeded=draft_dir is None,
            repeats=self._image_prompts is not None,
        )
        self._penalised = PrefixCacheMirror(capacity=_MIRRORED * num_kv_blocks, block_size=BLOCK_TOKENS)
        """Prompts as `_start_penalised` reads them, each as it is and with its salt."""
        # OpenVINO GenAI compiles guides for the tokenizer beside the model; nothing else here needs its tokenizer.
        if has_tokenizer(Path(engine_dir)):
            tokenizer = self._pipeline.get_tokenizer()
            self._compiled = CompiledGuides(lambda: GuideCompiler(tokenizer, vocabulary))
            self.open_guides(_GUIDE_PROGRAM, engine_dir, self._compiled)
            self.limits = structs.replace(self.limits, tries_guides=True)
        self.features = FEATURES if self.guides is None else FEATURES | GUIDES
        self.features -= {"cache_salt"} if enable_prefix_caching and not takes_salts else set()
        self.features |= SCORES if self._scorer is not None else set()
        if self._image_prompts is not None:
            self.features = (self.features | IMAGES) - OF_TEXTS
        self.details = {
            "OpenVINO": ov.get_version(),
            "KV cache": kv_cache_precision,
            "inference": inference_precision,
        }
        if draft_tokens:
            self.details["speculation"] = f"{draft_tokens} tokens of {draft_dir or 'earlier text'}"

    def close(self) -> None:
        self.close_gates()

    @property
    def busy(self) -> bool:
        # A cancelled request's blocks are given back at the end of the next step.
        return bool(
            self._sequences
            or self._held
            or self.news.has_news
            or self.holds
            or self._scorer
            or self._pipeline.has_non_finished_requests()
        )

    def _salts_change_nothing(self, vocabulary: int) -> bool:
        """Return whether the model takes negative token ids as equal to the ids that they stand for."""
        ids = [at % vocabulary for at in range(2 * BLOCK_TOKENS)]
        outputs = []
        for given in (ids, [id_ - vocabulary for id_ in ids]):
            config = self._configuration(Submit(0, [], Sampling(2), logprobs=True))
            handle = self._pipeline.add_request(0, ov.Tensor(np.array([given], dtype=np.int64)), config)
            try:
                while self._pipeline.has_non_finished_requests():
                    self._pipeline.step()
            except RuntimeError as error:
                print(error, flush=True)
                return False
            found = [output for _ in iter(handle.can_read, False) for output in handle.read().values()]
            tokens = [id_ for output in found for id_ in output.generated_ids]
            outputs.append((tokens, [value for output in found for value in output.generated_log_probs]))
        (plain, chances), (negative, others) = outputs
        return plain == negative and np.allclose(chances, others, atol=_SAME)

    def _configuration(self, request: Submit) -> GenerationConfig:
        config = generation_config(request)
        if self._draft_tokens:
            config.num_assistant_tokens = self._draft_tokens
            config.max_ngram_size = self._lookup_ngram
        return config

    def start(self, request: Submit, images: list[ov.Tensor] | None = None) -> None:
        if images is not None:
            self._read[request.request_id] = images
        if request.prompt_logprobs is not None and self._scorer is not None:
            self._scorer.hold(request)
        elif self._whole_prompts:
            self._held.append(request)
        else:
            self._start(request)

    def fail(self, request: Submit, error: Exception) -> None:
        self.refuse(request, str(error) if self._image_prompts is None else refusal(error))

    def _score(self, scorer: PromptScorer, patience: float) -> None:
        try:
            scored = scorer.advance(patience)
        except Exception as error:
            self.refuse(scorer.give_up(), f"the log-probabilities of the prompt could not be computed: {error}")
            return
        if scored is not None:
            request, scores = scored
            self.news.prompts[request.request_id] = scores
            self.start(structs.replace(request, prompt_logprobs=None))

    def _start_held(self) -> None:
        """Start the requests whose whole prompts the next step can read, beside what it verifies."""
        while self._held:
            prompt = len(self._held[0].prompt_ids)
            verified = (len(self._sequences) + 1) * (1 + self._draft_tokens)
            if self._sequences and sum(self._unread.values()) + prompt + verified > self._whole_prompts:
                return
            request = self._held.popleft()
            self._start(request)
            if request.request_id in self._sequences:
                self._unread[request.request_id] = prompt

    def _start(self, request: Submit) -> None:
        ids, cached = list(request.prompt_ids), 0
        if self._prefixes:
            if request.sampling.repetition_penalty == 1:
                ids = self._salts.apply(ids, request.cache_salt)
            elif request.cache_salt and len(ids) > BLOCK_TOKENS:
                return self._start_penalised(request, ids, self._prefixes)
            cached = self._prefixes.reused_tokens(ids)
        return self._submit(request, ids, cached)

    def _start_penalised(self, request: Submit, ids: list[int], prefixes: PrefixCacheMirror) -> None:
        """Start a request whose prompt cannot be salted: OpenVINO computes the penalty for no negative ids.

        It may find blocks of others in the prefix cache. So that its client does not see that, as many tokens as they
        have are read before it, and always a block: as much is computed for the first token, whatever others have sent.
        """
        salted = self._salts.apply(ids, request.cache_salt)
        own = self._penalised.reused_tokens(salted)
        known = max(own, self._penalised.reused_tokens(ids), prefixes.reused_tokens(ids))
        self._penalised.remember(ids)
        self._penalised.remember(salted)
        before = ids[own : known + BLOCK_TOKENS]
        unknown = self._salts.apply(before, secrets.token_hex(16))
        self._submit(Submit(request.request_id, before, Sampling(1)), unknown, 0, (request, ids, own))

    def _submit(
        self, request: Submit, ids: list[int], cached: int, following: tuple[Submit, list[int], int] | None = None
    ) -> None:
        images = self._read.pop(request.request_id, [])
        try:
            config = self._configuration(request)
            prompt: tuple[Any, ...] = (ov.Tensor(np.array([ids], dtype=np.int64)),)
            if self._image_prompts is not None:
                prompt = self._image_prompts.text(request), images
            handle = self._pipeline.add_request(request.request_id, *prompt, config)
        except (RuntimeError, TypeError, ValueError, LookupError, MemoryError) as error:
            self.fail(request, error)
            return
        sequence = self._sequences[request.request_id] = _Sequence(handle, request, ids, cached)
        sequence.following = following

    def cancel(self, request_id: int) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.cancelled = True
            sequence.handle.cancel()
        elif held := [each for each in self._held if each.request_id == request_id]:
            self._held.remove(held[0])
            self._read.pop(request_id, None)
            self.news.end(request_id, FinishReason.CANCELLED)
        elif self._scorer is not None and self._scorer.cancel(request_id):
            self._read.pop(request_id, None)
            self.news.end(request_id, FinishReason.CANCELLED)
        else:
            self.cancel_held(request_id)

    def step(self) -> Step:
        patience = 0.0 if self._pipeline.has_non_finished_requests() else WAIT_SECONDS
        self.advance(patience)
        if self._scorer:
            self._score(self._scorer, patience)
        self._start_held()
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        step, self.news = self.news, Step()
        for request_id, sequence in list(self._sequences.items()):
            self._collect(request_id, sequence, step)
        return step

    def stats(self) -> Stats:
        # The pipeline's figures are those of its last schedule, stale when it has nothing to run.
        usage = self._pipeline.get_metrics().cache_usage / 100 if self._sequences else 0.0
        blocks = self.limits.kv_blocks
        stats = Stats(len(self._sequences), usage, kv_blocks=blocks, kv_blocks_used=round(usage * blocks))
        return self.count_in(stats)

    def _collect(self, request_id: int, sequence: _Sequence, step: Step) -> None:
        if sequence.cancelled:
            return self._end(request_id, step, FinishReason.CANCELLED)
        handle = sequence.handle
        # read() with nothing queued blocks for ever, with the GIL held.
        if not handle.can_read():
            if handle.get_status() == GenerationStatus.IGNORED:
                error = "the engine dropped the request: its KV cache is over-committed"
                self._end(request_id, step, FinishReason.ERROR, error)
            return None
        (output,) = handle.read().values()
        if sequence.following is not None:  # it generates one token
            del self._sequences[request_id]
            return self._submit(*sequence.following)
        token_ids, logprobs = output.generated_ids, output.generated_log_probs if sequence.logprobs else None
        try:
            if sequence.repeated:
                token_ids, logprobs = _new(sequence, token_ids, logprobs)
            if token_ids:
                step.add(request_id, token_ids, logprobs)
        except ValueError as error:
            handle.cancel()
            return self._end(request_id, step, FinishReason.ERROR, str(error))
        self._unread.pop(request_id, None)
        if self._draft_tokens:
            # An iteration brings one token of the model's own; OpenVINO GenAI reports no figures of drafts.
            step.accepted[request_id] = max(0, len(token_ids) - 1)
        if sequence.cached_tokens:
            step.cached[request_id], sequence.cached_tokens = sequence.cached_tokens, 0
        if self._prefixes:
            sequence.token_ids += token_ids
        reason = output.finish_reason
        if reason != GenerationFinishReason.NONE:
            self._end(request_id, step, FinishReason.LENGTH if reason == _LENGTH else FinishReason.STOP)
        return None

    def _end(self, request_id: int, step: Step, finish: FinishReason, error: str | None = None) -> None:
        sequence = self._sequences.pop(request_id)
        self._unread.pop(request_id, None)
        step.end(request_id, finish, error)
        if self._prefixes and sequence.token_ids:
            # The KV cache of the last token is never computed.
            self._prefixes.remember(sequence.token_ids[:-1])
