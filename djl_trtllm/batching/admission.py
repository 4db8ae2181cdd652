"""The admission of requests to a rolling batch, and their translation to the messages of an executor.

An executor names what it honours (`Ready.features`). Everything else must have its neutral default in a request, so
that a field which an engine does not name is refused, never dropped.
"""

import functools
import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from djl_trtllm.batching.sequence import (
    OutputSequence,
    PooledSequence,
    RankedSequence,
    ThinkingMeter,
    UnwrittenSequence,
)
from djl_trtllm.errors import (
    GenerationError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
    UnsupportedParameterError,
    UnsupportedTaskError,
)
from djl_trtllm.executor.protocol import End, Feature, Limits, Logprob, Ranked, Refusal, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import (
    FIELDS,
    Adapter,
    Alternative,
    FinishReason,
    GenerationRequest,
    Guide,
    GuideKind,
    Image,
    RankedToken,
    RequestField,
    RequestOrigin,
    Resume,
    Sampling,
    ThinkingBudget,
)

logger = logging.getLogger(__name__)

_WITH_A_GUIDE = (
    "a guide with beams: no engine constrains beams; leave out the guide or 'num_beams' ('beam_width') "
    "(the PyTorch backend of TensorRT-LLM runs every request with option.max_beam_width beams)"
)
_NO_GUIDE = (
    "this engine cannot constrain its output; on TensorRT-LLM set option.guided_decoding_backend=xgrammar, on OpenVINO "
    "the engine's folder needs openvino_tokenizer.xml and openvino_detokenizer.xml: compile the model again, with a "
    "tokenizer that OpenVINO can convert (the compiler's log says if it could not)"
)
_GUIDES = {
    GuideKind.JSON_OBJECT: (Feature.JSON, "a JSON guide", _NO_GUIDE),
    GuideKind.JSON_SCHEMA: (Feature.JSON, "a JSON guide", _NO_GUIDE),
    GuideKind.REGEX: (Feature.REGEX, "a regular expression", _NO_GUIDE),
    GuideKind.GRAMMAR: (Feature.GRAMMAR, "a grammar", _NO_GUIDE),
    GuideKind.STRUCTURAL_TAG: (
        Feature.STRUCTURAL_TAG,
        "'structural_tag'",
        "this engine has none; vLLM has, and TensorRT-LLM's PyTorch backend from 1.2 on, with "
        "option.guided_decoding_backend=xgrammar; 'tool_choice' is for calls, 'response_format' for JSON",
    ),
}
"""For each kind of guide: the feature that an engine needs, its name in refusals, and the advice."""
_DOES = {
    "generate": "generates text",
    "embed": "embeds texts",
    "score": "scores pairs of texts",
}
_UNKNOWN = RequestOrigin()
_MAX_CACHED_STOPS = 1024
_CLOSING = 16
"""Tokens of room for the end of reasoning: more than any model's has."""
_PROMPT_END = 64
"""Tokens at the end of a prompt in which the marker of reasoning is looked for."""
_MAX_CACHED_TEXTS = 16_384
_MOST_SCORES = 32_768
"""Log-probabilities of one prompt, those of the most likely tokens included: the event loop makes objects of them."""
_NONE: Mapping[int, Any] = MappingProxyType({})


@dataclass(frozen=True)
class BatchLimits:
    """The limits of a rolling batch: lengths in tokens, the rest in sequences.

    `max_batch_size` sequences run at once (option.max_rolling_batch_size), `max_queue_size` may wait
    (job_queue_size). A prompt has at most `max_input_len` tokens, its output `max_output_len`, and both together
    `max_seq_len`. With `resume`, a request goes on in a new engine process if its own is lost.
    """

    max_batch_size: int
    max_queue_size: int
    max_input_len: int
    max_output_len: int
    max_seq_len: int
    vocab_size: int | None = None
    """The first id that is refused, because the tokenizer has it and the model does not; None if there is no such
    id."""
    resume: bool = True


class SequenceLimits:
    """The limits of a sequence's length: the smaller of the batch's and the engine's."""

    def __init__(self, batch: BatchLimits, engine: Limits) -> None:
        self._batch = batch
        self._engine = engine
        self._max_seq_len = min(batch.max_seq_len, engine.max_seq_len)
        self.longest_prompt = engine.max_prompt_len or engine.max_seq_len
        """The most tokens with which a sequence begins in the engine, or goes on there."""

    def fit(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> tuple[Sequence[int], int]:
        """The prompt (truncated if asked) and the number of tokens to generate.

        A number that the client gives is refused where it is over a limit; a default is lowered to it. Raises
        InvalidRequestError for what can never run.
        """
        if request.truncate is not None and request.pooling is None:
            prompt_ids = prompt_ids[-request.truncate :]
        length, wanted, batch = len(prompt_ids), request.sampling.max_new_tokens, self._batch
        if not length:
            raise InvalidRequestError("the prompt is empty: it has no tokens")
        if batch.vocab_size is not None and (highest := max(prompt_ids)) >= batch.vocab_size:
            raise InvalidRequestError(
                f"the prompt has a token with the id {highest}, which the tokenizer has and the model does not: its "
                f"ids end at {batch.vocab_size - 1}; leave that special token out"
            )
        if (most := request.prompt_logprobs) is not None and length * (most + 1) > _MOST_SCORES:
            raise InvalidRequestError(
                f"'prompt_logprobs' of {length} prompt tokens with {most} likely ones each: expected at most "
                f"{_MOST_SCORES} log-probabilities; shorten the prompt, or ask for fewer"
            )
        if length > batch.max_input_len:
            raise PromptTooLongError(
                f"the prompt has {length} tokens, and max_input_len is {batch.max_input_len}: "
                "shorten it, or raise option.max_input_len"
            )
        if request.pooling is not None:
            if length > self._max_seq_len:
                raise PromptTooLongError(
                    f"the text has {length} tokens, and max_seq_len is {self._max_seq_len}: "
                    "shorten it, or let the request truncate it"
                )
            return prompt_ids, 0
        if wanted > batch.max_output_len:
            raise InvalidRequestError(
                f"the request asks for {wanted} new tokens, and max_output_len is {batch.max_output_len}: "
                "ask for fewer, or raise option.max_output_len"
            )
        room = self._max_seq_len - length
        if room < max(wanted, 1):
            asks = f" and the request asks for {wanted} new ones" if wanted else ""
            raise PromptTooLongError(
                f"the prompt has {length} tokens{asks}, prompt and output may have {self._max_seq_len} together "
                f"(max_seq_len): {max(room, 0)} are left for the output"
            )
        wanted = wanted or min(request.default_new_tokens or room, room, batch.max_output_len)
        if request.sampling.min_new_tokens > wanted:
            raise InvalidRequestError(
                f"the request asks for at least {request.sampling.min_new_tokens} new tokens, and it gets {wanted} at "
                f"most (max_output_len is {batch.max_output_len}, max_seq_len {self._max_seq_len}): ask for fewer"
            )
        self._require_thinking_ends(request.thinking, length, wanted)
        beams, available = request.sampling.beam_width, self._engine.kv_blocks
        if available and (blocks := self.blocks(length, wanted) * beams) > available:
            each = "" if beams == 1 else f" in {beams} beams"
            raise PromptTooLongError(
                f"{length} prompt tokens and {wanted} new tokens{each} need {blocks} KV cache blocks, the engine has "
                f"{available}: shorten the request, or give the KV cache more memory "
                "(option.max_tokens_in_paged_kv_cache, option.kv_cache_free_gpu_mem_fraction)"
            )
        return prompt_ids, wanted

    def _require_thinking_ends(self, budget: ThinkingBudget | None, length: int, wanted: int) -> None:
        if budget is None or budget.optional:
            return
        longest = self.longest_prompt
        if budget.tokens < wanted and length + budget.tokens + _CLOSING > longest:
            raise PromptTooLongError(
                f"the prompt has {length} tokens and a budget of {budget.tokens} for its reasoning: when it is spent, "
                f"the engine gets both as one prompt, of at most {longest} tokens; lower 'thinking_token_budget', or "
                "raise option.max_input_len"
            )

    def blocks(self, prompt_tokens: int, new_tokens: int) -> int:
        """KV cache blocks of a sequence to its end, and one to spare (with it, no request was ever lost)."""
        tokens = prompt_tokens + new_tokens + self._engine.draft_tokens
        return math.ceil(tokens / self._engine.block_size) + 1


def supported(request: GenerationRequest, limits: Limits, features: frozenset[str]) -> GenerationRequest:
    """Return the request as an executor with these limits and features runs it.

    Raises UnsupportedParameterError, naming the parameters that the executor does not honour, and
    UnsupportedTaskError.
    """
    if request.task != limits.task:
        raise UnsupportedTaskError(
            f"this model {_DOES[limits.task]} (option.task is {limits.task}), and the request is for one that "
            f"{_DOES[request.task]}: name another model, or send what this one takes"
        )
    asked = 0 if request.pooling is None else request.pooling.dimensions or 0
    if asked > limits.dimensions:
        raise InvalidRequestError(f"'dimensions' is {asked}: expected at most {limits.dimensions}, those of the model")
    request = _with_beams(request, limits.beams, limits.most_beams)
    _require(request, features)
    if request.thinking is not None:
        request = _with_budget(request, request.thinking, limits)
    if request.logprobs and not _gives_logprobs(request, features):
        return replace(request, logprobs=False)
    return request


MOST_NUMBERS = 2**22
"""Numbers of all vectors in a response: as JSON they are some 46 MB, and memory has two copies for a moment."""


def require_vectors_fit(requests: Sequence[GenerationRequest], limits: Limits) -> None:
    """Raise InvalidRequestError for a call whose vectors have more than `MOST_NUMBERS` numbers together."""
    asked = [limits.dimensions if each.pooling is None else each.pooling.dimensions for each in requests]
    if (numbers := sum(each or limits.dimensions for each in asked)) > MOST_NUMBERS:
        raise InvalidRequestError(
            f"the vectors of {len(requests)} texts have {numbers:,} numbers: expected at most {MOST_NUMBERS:,} in a "
            "response; send fewer texts, or ask for fewer 'dimensions'"
        )


@functools.lru_cache(maxsize=8)
def refusals(limits: Limits, features: frozenset[str]) -> Mapping[str, str]:
    """Why `supported` refuses a request that sets one field, or has a guide of one kind, by the field or the kind.

    A model that does not generate has none: it refuses such requests as a whole.
    """
    if limits.task != "generate":
        return MappingProxyType({})
    beams = limits.beams or 2
    asking: dict[str, GenerationRequest] = {kind: GenerationRequest(guide=Guide(kind)) for kind in GuideKind}
    for name, field in FIELDS.items():
        if name != "guide" and field.trait.honoured_by == "engine":
            whole = (field.trait.part_of.name,) if field.trait.part_of else ()
            asked: dict[str, Any] = dict.fromkeys((name, *whole), beams)  # no neutral value
            sampling = {each: asked.pop(each) for each in (name, *whole) if each in Sampling.__struct_fields__}
            asking[name] = GenerationRequest(sampling=Sampling(**sampling), **asked)
    found = {}
    for name, request in asking.items():
        try:
            supported(request, limits, features)
        except UnsupportedParameterError as error:
            found[name] = str(error)
    return MappingProxyType(found)


def _with_beams(request: GenerationRequest, beams: int, most_beams: int) -> GenerationRequest:
    """Give a request without beams those that the engine runs for every request; the best ones are returned."""
    sampling = request.sampling
    if beams and sampling.beam_width != beams:
        if problems := _problems(request, beams):
            raise UnsupportedParameterError(
                f"this engine runs every request with {beams} beams (option.max_beam_width): {'; '.join(problems)}"
            )
        request = replace(request, sampling=replace(sampling, beam_width=beams, best_of=None))
    if most_beams and request.sampling.beam_width > most_beams:
        raise UnsupportedParameterError(
            f"'num_beams' ('beam_width') is {sampling.beam_width}, expected at most {most_beams}: this engine is "
            "compiled for that many (option.max_beam_width)"
        )
    if request.guide is not None and request.sampling.beam_width > 1:
        raise UnsupportedParameterError(_WITH_A_GUIDE)
    return request


def _problems(request: GenerationRequest, beams: int) -> list[str]:
    """Return why a request cannot run with this number of beams, one line each."""
    sampling = request.sampling
    found = []
    if sampling.beam_width > 1:
        found.append(f"'num_beams' ('beam_width') is {sampling.beam_width}, expected {beams}, or none")
    elif sampling.sequences > beams:
        found.append(f"'n' or 'best_of' is {sampling.sequences}, expected at most {beams}")
    if sampling.do_sample:
        found.append(
            "beams are not sampled, send 'do_sample': false or 'temperature': 0 (chat requests sample by default)"
        )
    return found


def _gives_logprobs(request: GenerationRequest, features: frozenset[str]) -> bool:
    """Whether an executor with these features returns log-probabilities for a request that has a place for them."""
    if request.sampling.beam_width > 1 and Feature.BEAM_LOGPROBS not in features:
        return False
    wanted = request.asks_logprobs or request.needs_logprobs or Feature.FREE_LOGPROBS in features
    return Feature.LOGPROBS in features and wanted


def _require(request: GenerationRequest, features: frozenset[str]) -> None:
    """Raise UnsupportedParameterError, naming the parameters that an executor with these features does not honour."""
    fields, read, neutral = _not_honoured(features)
    missing = [] if read(request) == neutral else [_refusal(field) for field in fields if field.is_set(request)]
    beams = request.sampling.beam_width > 1
    if request.guide is not None:
        feature, shown, advice = _GUIDES[request.guide.kind]
        if feature not in features:
            asked_by = f"'{request.guide_from}', which needs " if request.guide_from is not None else ""
            missing.append(f"{asked_by}{shown}: {advice}")
    if beams and request.needs_logprobs and Feature.BEAM_LOGPROBS not in features:
        missing.append(
            f"'logprobs' with {FIELDS['beam_width'].trait.shown}: this engine has no log-probabilities of beams; leave "
            "out one of them"
        )
    if beams and request.top_logprobs and "top_logprobs" in features:
        missing.append(_refusal(FIELDS["top_logprobs"]))
    if beams and request.prompt_logprobs is not None:
        missing.append(
            f"{FIELDS['prompt_logprobs'].trait.shown} with {FIELDS['beam_width'].trait.shown}: leave out one"
        )
    if missing:
        raise UnsupportedParameterError(f"not supported by this backend: {'; '.join(missing)}")


def _with_budget(request: GenerationRequest, budget: ThinkingBudget, limits: Limits) -> GenerationRequest:
    """The request, without an optional budget of reasoning where something keeps a sequence from going on behind it.

    Raises UnsupportedParameterError for another budget there.
    """
    impossible = (field for field in FIELDS.values() if field.trait.resume is Resume.IMPOSSIBLE)
    problems = [f"{_name(field)} with a budget: leave out one of them" for field in impossible if field.is_set(request)]
    if limits.repeats:
        problems.append("this engine takes no tokens behind prompts that may have images; use 'max_tokens'")
    if request.sampling.min_new_tokens > budget.tokens:
        problems.append(f"at least {request.sampling.min_new_tokens} tokens with a budget of {budget.tokens}")
    if problems and budget.optional:
        return replace(request, thinking=None)
    if problems:
        raise UnsupportedParameterError(f"'thinking_token_budget' bounds the reasoning: {'; '.join(problems)}")
    return request


@functools.lru_cache(maxsize=8)
def _not_honoured(features: frozenset[str]) -> tuple[list[RequestField], Callable[[object], Any], Any]:
    """The fields that a request to an executor with these features must not set, a function that reads all of them at
    once, and their neutral values as it returns them."""
    fields = [
        field
        for field in FIELDS.values()
        if field.trait.honoured_by == "engine"
        and (field.trait.feature or field.name) not in features
        and field.name != "guide"
    ]
    read = attrgetter(*(field.path for field in fields)) if fields else _none
    return fields, read, read(GenerationRequest())


def _none(request: object) -> None:
    """Read no field of a request."""


def _refusal(field: RequestField) -> str:
    shown, advice = _name(field), field.trait.advice
    return f"{shown}: {advice}" if advice else shown


def _name(field: RequestField) -> str:
    return field.trait.shown or f"'{field.name}'"


class Translator:
    """Turns requests into sequences, and into the executor's messages.

    `engine_stops`: whether the executor ends sequences at stop ids and stop strings (see `Limits.stops`).
    `stops_ignored`: whether it does not end those sequences that ignore the end token.

    `seeded`: whether the executor's tokens follow from a seed; without it no sequence has a seed. `draws_seeds`:
    whether sequences have one whose request gives none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        engine_stops: bool = True,
        *,
        stops_ignored: bool = False,
        seeded: bool = True,
        draws_seeds: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._engine_stops = engine_stops
        self._stops_ignored = stops_ignored
        self._seeded = seeded
        self._draws_seeds = draws_seeds
        # Some models end with a token that their tokenizer does not list as special.
        self._special_ids = tokenizer.special_ids | tokenizer.end_ids
        self._text_of = functools.lru_cache(_MAX_CACHED_TEXTS)(self._text_inside)
        self._closing_ids = functools.lru_cache(_MAX_CACHED_STOPS)(self._tokenise_closer)
        self._is_exact_in_tokens = functools.lru_cache(_MAX_CACHED_STOPS)(self._survives_tokenising)

    def sequences(
        self, request: GenerationRequest, prompt_ids: Sequence[int], most_with_thinking: int = 0
    ) -> list[OutputSequence]:
        """The sequences of a request, each with its seed.

        `most_with_thinking`: the most tokens of each one when its reasoning is ended for want of budget.
        """
        sampling = request.sampling
        seed = None
        if sampling.do_sample and self._seeded:
            seed = secrets.randbits(32) if sampling.seed is None and self._draws_seeds else sampling.seed
        shown: Mapping[int, str] = _NONE
        if request.shown_tokens:
            ids = {self._tokenizer.raw.token_to_id(text): text for text in request.shown_tokens}
            shown = {id_: text for id_, text in ids.items() if id_ in self._special_ids}
        stop_ids: Mapping[int, FinishReason] = _NONE
        if not self._is_stopped_by_engine(request):
            end_ids = self._tokenizer.end_ids
            reasons = (FinishReason.STOP, FinishReason.END_TOKEN)
            stop_ids = {stop_id: reasons[stop_id in end_ids] for stop_id in self._stop_ids(request)}
        meter: Callable[[], ThinkingMeter] | None = None
        if (budget := request.thinking) is not None:
            end = self._tokenizer.decode(list(prompt_ids[-_PROMPT_END:]), False)
            closing_ids = self._closing_ids(budget.closers[0])
            meter = functools.partial(ThinkingMeter, budget, end, closing_ids, most_with_thinking)
        kind = functools.partial(RankedSequence, text_of=self._text_of) if request.top_logprobs else OutputSequence
        if request.prompt_only:
            kind = UnwrittenSequence
        if request.pooling is not None:
            kind = PooledSequence
        return [
            kind(
                index=index,
                texts=self._tokenizer.texts,
                special_ids=self._special_ids,
                shown=shown,
                prompt_ids=prompt_ids,
                stop=request.stop,
                stop_ids=stop_ids,
                seed=None if seed is None else (seed + index) % 2**64,
                logprobs=_wants_logprobs(request),
                thinking=None if meter is None else meter(),
            )
            for index in range(sampling.sequences)
        ]

    def ending(self, end: End, last_token: int | None) -> tuple[FinishReason, RequestError | None]:
        """Why the executor has ended a sequence whose last token is `last_token`, None if it has no token.

        The executor does not distinguish the model's end tokens from other stop ids.
        """
        if isinstance(end.error, Refusal):
            message, full = end.error.message, end.error.full
            if full is None:
                return end.finish, InvalidRequestError(message)
            return end.finish, OverloadedError(
                message, queue_depth=full.depth, capacity=full.capacity, retry_after=full.retry_after
            )
        if end.error:
            logger.error("request %d of the engine failed: %s", end.request_id, end.error)
            return end.finish, GenerationError(end.error)
        if end.finish in (FinishReason.STOP, FinishReason.END_TOKEN):
            return FinishReason.END_TOKEN if last_token in self._tokenizer.end_ids else FinishReason.STOP, None
        return end.finish, None

    def message(
        self,
        request_id: int,
        request: GenerationRequest,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        seed: int | None,
        adapter: Adapter | None,
        origin: RequestOrigin = _UNKNOWN,
        images: tuple[Image, ...] = (),
    ) -> Submit:
        """The message that starts one sequence, or all beams, in the executor."""
        sampling = replace(request.sampling, max_new_tokens=max_new_tokens, seed=seed)
        stops = self._is_stopped_by_engine(request)
        return Submit(
            request_id,
            prompt_ids,
            sampling,
            self._stop_ids(request) if stops else [],
            [text for text in request.stop if self._is_exact_in_tokens(text)] if stops else [],
            request.bad,
            request.guide,
            adapter,
            _wants_logprobs(request),
            request.top_logprobs,
            origin.request_id,
            origin.client,
            request.prompt_logprobs,
            request.logit_bias,
            # A group that a request names is never the group of a key.
            f"group {request.cache_salt}" if request.cache_salt else origin.salt,
            images,
            pooling=request.pooling,
        )

    def prompt(self, prompt_ids: Sequence[int], scores: Sequence[Logprob]) -> list[RankedToken]:
        """The tokens of a prompt, each with the engine's log-probabilities."""
        tokens, texts = [], self._tokenizer.texts
        for id_, score in zip(prompt_ids, scores, strict=True):
            top: list[Alternative] = []
            if isinstance(score, Ranked):
                pairs = zip(score.ids, score.logprobs, strict=True)
                top = [Alternative(each, texts[each] or self._text_of(each), logprob) for each, logprob in pairs]
            logprob = score.logprob if isinstance(score, Ranked) else score
            text = texts[id_] or self._text_of(id_)
            tokens.append(RankedToken(id_, text, logprob, id_ in self._special_ids, top))
        return tokens

    def learn_stops(self, request: GenerationRequest) -> None:
        """Tokenise the stop strings of a request; `message` finds the results in the cache."""
        if self._is_stopped_by_engine(request):
            for text in request.stop:
                self._is_exact_in_tokens(text)

    def _is_stopped_by_engine(self, request: GenerationRequest) -> bool:
        # A beam that is cut later would not be the best one.
        stops = self._engine_stops and not (self._stops_ignored and request.sampling.ignore_eos)
        return stops or request.sampling.beam_width > 1

    def _stop_ids(self, request: GenerationRequest) -> list[int]:
        end_ids = () if request.sampling.ignore_eos else self._tokenizer.end_ids
        return [*end_ids, *request.stop_token_ids]

    def _text_inside(self, token_id: int) -> str:
        """A token's text inside a longer text: alone, some tokenizers leave out the space that it begins with."""
        before = self._tokenizer.encode("a", False)[-1:]
        text = self._tokenizer.decode([*before, token_id], False)
        return text[len(self._tokenizer.decode(before, False)) :]

    def _tokenise_closer(self, closer: str) -> list[int]:
        """The tokens that end reasoning: the model's own closing text, on a line by itself."""
        return self._tokenizer.encode(f"\n{closer}\n\n", False)

    def _survives_tokenising(self, text: str) -> bool:
        """Whether a stop string survives tokenising and decoding.

        An engine stops at tokens. If normalising changes the string, the engine would stop at another text.
        """
        return self._tokenizer.decode(self._tokenizer.encode(text, False), False) == text


def _wants_logprobs(request: GenerationRequest) -> bool:
    # Ranking needs the log-probabilities, whether or not the client asked for them.
    return request.logprobs or request.sampling.best_of is not None
