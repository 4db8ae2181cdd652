"""Requests and their output, the same for every dialect and every backend.

A dialect parses bytes into a `GenerationRequest`. The rolling batch answers with a stream of `OutputChunk`s, one per
iteration that produced something. Each chunk has the new `Token`s of one sequence; the last one has its
`SequenceResult`. The texts of all tokens of a sequence join to its output text.

Defaults are neutral: they ask for nothing. Each field is declared with its `Trait`: who honours it, what it is part of,
and whether a sequence with it can go on in another engine process. A field without one is an error at import. Refusals,
resuming and the choice between greedy and sampled output derive from the traits, so that a new field is never dropped
silently.
"""

import enum
import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_type_hints

import msgspec

from djl_trtllm.errors import RequestError

_ids = random.Random()  # noqa: S311  # no secrets; its own, because a model's code may seed that of the module
os.register_at_fork(after_in_child=_ids.seed)


_RANDOM = ~(0xF000_C000_0000_0000_0000)
_VERSION_4 = 0x4000_8000_0000_0000_0000
"""The bits that mark a random UUID as one (RFC 9562, version 4); `_RANDOM` has all other bits."""


def new_hex_id() -> str:
    """A random UUID in hexadecimal digits that need not be secret: without the system call of `uuid.uuid4`."""
    return f"{_ids.getrandbits(128) & _RANDOM | _VERSION_4:032x}"


def new_id() -> str:
    """A random UUID as `new_hex_id` makes it, with hyphens."""
    digits = new_hex_id()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


class FinishReason(enum.IntEnum):
    """The reasons why a sequence ends; worse ones are larger."""

    END_TOKEN = 1
    """The model's own end token."""
    STOP = 2
    """A stop string, or one of the request's stop token ids."""
    LENGTH = 3
    """`max_new_tokens` were generated."""
    CANCELLED = 4
    ERROR = 5


FINISH_WORDS: dict[FinishReason, str] = {
    FinishReason.END_TOKEN: "eos_token",
    FinishReason.STOP: "stop_sequence",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.ERROR: "error",
}
"""The finish reasons in LMI's and TGI's responses, in metrics, logs and the offline API."""


class GuideKind(str, enum.Enum):
    """The kinds of guides."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


class Guide(msgspec.Struct, frozen=True, array_like=True):
    """Constrains the output to a JSON schema (as text), a regular expression, a grammar (EBNF or Lark), or a structural
    tag of xgrammar (as JSON): free text with parts that each have a guide."""

    kind: GuideKind
    value: str = ""
    strict: bool = False
    """Whether a JSON schema with a keyword that the engine's grammar does not follow is refused."""


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: its name, an id that is unique while the engine process lives, and its directory."""

    name: str
    id: int
    path: str


class Resume(enum.Enum):
    """The treatment of a field when a sequence goes on in another engine process.

    Its prompt and its tokens are the new prompt there. That is the same sequence for a model, whose next token depends
    on nothing but the tokens before it.
    """

    UNCHANGED = enum.auto()
    """The field applies to each next token by itself."""
    ADJUSTED = enum.auto()
    """`resumed` in `batching/rolling_batch.py` computes the field anew, such as the number of tokens that are left."""
    IMPOSSIBLE = enum.auto()
    """A sequence with this field cannot go on elsewhere: the engine remembers more of the sequence than its tokens, or
    treats generated tokens and prompt tokens differently."""


class PartOf(NamedTuple):
    """The field without which another one has no effect, as `temperature` has none without `do_sample`.

    `implied`: a request that sets the other field, and does not mention this one, asks for this one too.
    """

    name: str
    implied: bool


@dataclass(frozen=True, kw_only=True)
class Trait:
    """The decisions about a field of a request.

    Either the server honours the field for every engine, or an engine honours it whose `Ready.features` have `feature`
    (by default the field's name). A refusal calls the field `shown`, and adds `advice`.
    """

    honoured_by: Literal["server", "engine"]
    part_of: PartOf | None
    resume: Resume
    feature: str = ""
    shown: str = ""
    advice: str = ""


_SERVER = Trait(honoured_by="server", part_of=None, resume=Resume.UNCHANGED)
_TOKENWISE = Trait(honoured_by="engine", part_of=None, resume=Resume.UNCHANGED)
_LENGTH = Trait(honoured_by="engine", part_of=None, resume=Resume.ADJUSTED)
_SAMPLING = replace(
    _TOKENWISE,
    advice="this engine is greedy only as it is set up, see its log; send 'do_sample': false or 'temperature': 0 "
    "(chat requests sample by default)",
)
_SAMPLED = Trait(honoured_by="engine", part_of=PartOf("do_sample", implied=True), resume=Resume.UNCHANGED)
_SEED = Trait(
    honoured_by="engine",
    part_of=PartOf("do_sample", implied=False),
    resume=Resume.ADJUSTED,
    advice="this engine's sampler ignores it; leave it out, or set option.ignored_seed=warn to have such requests "
    "answered with a warning; on TensorRT-LLM before 1.4 option.sampler_type=TRTLLMSampler takes seeds",
)
_HISTORY = Trait(honoured_by="engine", part_of=None, resume=Resume.IMPOSSIBLE)
_PENALTY = replace(
    _HISTORY,
    advice="this engine's sampler does not take it; before TensorRT-LLM 1.4 set option.sampler_type=TRTLLMSampler, and "
    "later beside speculation enable_penalty (docs/tensorrt-llm.md)",
)
_BEAMS = replace(
    _HISTORY,
    shown="'num_beams' ('beam_width')",
    advice="this engine has no beam search; use 'n' and 'best_of' with sampling, or TensorRT-LLM with "
    "option.max_beam_width",
)
_OF_BEAMS = replace(
    _HISTORY,
    part_of=PartOf("beam_width", implied=False),
    advice="this engine's sampler does not have it; leave it out",
)
_LOGPROBS = replace(
    _TOKENWISE,
    feature="logprobs",
    shown="'logprobs' or 'best_of'",
    advice="this engine has no log-probabilities; on a compiled TensorRT engine set "
    "option.gather_generation_logits=true",
)
_TOP_LOGPROBS = replace(
    _TOKENWISE,
    shown="'top_logprobs' (in completions 'logprobs' above 1)",
    advice="this engine has the chosen token's log-probability only; with beams no engine has more",
)
_PROMPT_LOGPROBS = replace(
    _LENGTH,
    shown="'prompt_logprobs' ('echo' with 'logprobs')",
    advice="this engine has no log-probabilities of prompts; OpenVINO has them where the weights fit into memory "
    "twice, vLLM without option.enable_lora, TensorRT-LLM with option.backend=pytorch from 1.3.0rc11 on",
)
_BIAS = replace(_TOKENWISE, advice="this engine cannot weight tokens; TensorRT-LLM and vLLM can")
_SALT = replace(
    _TOKENWISE,
    advice="this engine cannot keep prompts apart in its prefix cache; leave it out, or set "
    "option.enable_kv_cache_reuse=false",
)
_BAD = replace(_HISTORY, shown="'bad_words' ('bad_sequences')", advice="this engine cannot exclude words")
_ADAPTER = replace(
    _TOKENWISE,
    feature="adapters",
    shown="'adapters'",
    advice="this model is served without LoRA adapters; on TensorRT-LLM and vLLM set option.enable_lora=true",
)


_IMAGES = replace(
    _TOKENWISE,
    shown="a content part with an image",
    advice="this model takes text only; docs/images.md says which models and engines take images",
)


class ImageSource(msgspec.Struct, frozen=True, array_like=True):
    """An image as a client sent it: a `data:` URL or the address of one, and the name of its content part."""

    url: str
    place: str


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image that was checked: a file, which decodes to `width` x `height` pixels.

    Among the ids of the prompt it is `tokens` placeholders (`model/vision.py`).
    """

    data: bytes
    width: int
    height: int
    tokens: int


GREEDY_BELOW = 1e-5
"""Temperatures below take the most likely token, as in vLLM: dividing by them overflows a 32-bit number."""


TaskName: TypeAlias = Literal["generate", "embed", "score"]
"""Tasks of models: the values of `option.task` except `auto`."""


class Pooling(msgspec.Struct, frozen=True, array_like=True):
    """A request's wish for the vector of a text, or the score of a pair of texts, instead of generated text.

    `activate`: normalise the vector to length 1, put the score through a sigmoid; None: what the model's own files say.
    `dimensions`: return this number of the vector's numbers, from the first on. `second`: where the tokens of the
    pair's second text begin, 0 where the model does not distinguish them.
    """

    task: TaskName = "embed"
    activate: bool | None = None
    dimensions: int | None = None
    second: int = 0


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """The sampling of sequences. The dialect fills it in, and the engine process receives the same struct.

    Greedy if and only if `do_sample` is False. `max_new_tokens` 0 means that the client gives no number.
    `seed` None draws a new seed for each request; sequence i of a request uses `seed` + i.
    `best_of` None: `n` sequences, in the order of their index, as their tokens arrive. Otherwise `best_of` sequences
    are generated and ranked by cumulative log-probability; the best `n` are delivered at the end as 0 to n - 1. With a
    `beam_width` above 1, the best `n` beams are delivered, ranked by the engine; the fields after it belong to beam
    search.

    The engine gets one sequence, or all beams: there `max_new_tokens` is final, and `seed` is the sequence's own.
    """

    max_new_tokens: Annotated[int, _LENGTH] = 0
    min_new_tokens: Annotated[int, _LENGTH] = 0
    do_sample: Annotated[bool, _SAMPLING] = False
    temperature: Annotated[float, _SAMPLED] = 1.0
    top_k: Annotated[int, _SAMPLED] = 0
    """0 means the whole vocabulary."""
    top_p: Annotated[float, _SAMPLED] = 1.0
    repetition_penalty: Annotated[float, _PENALTY] = 1.0
    presence_penalty: Annotated[float, _PENALTY] = 0.0
    frequency_penalty: Annotated[float, _PENALTY] = 0.0
    seed: Annotated[int | None, _SEED] = None
    ignore_eos: Annotated[bool, _TOKENWISE] = False
    n: Annotated[int, _SERVER] = 1
    best_of: Annotated[int | None, _SERVER] = None
    min_p: Annotated[float, replace(_SAMPLED, advice="use 'top_p'")] = 0.0
    no_repeat_ngram_size: Annotated[int, replace(_HISTORY, advice="use 'repetition_penalty'")] = 0
    """0 turns it off."""
    beam_width: Annotated[int, _BEAMS] = 1
    length_penalty: Annotated[float, _OF_BEAMS] = 1.0
    early_stopping: Annotated[bool, _OF_BEAMS] = False
    beam_search_diversity_rate: Annotated[float, _OF_BEAMS] = 0.0

    @property
    def sequences(self) -> int:
        """The number of sequences that are generated."""
        return self.beam_width if self.beam_width > 1 else self.best_of or self.n


def begins_with_reasoning(prompt: str, opener: str, closer: str, *, starts: bool) -> bool:
    """Whether a model's text after this prompt is reasoning. `starts`: unless the prompt has closed it."""
    end = prompt.rstrip()
    return end.endswith(opener) or (starts and not end.endswith(closer))


class ThinkingBudget(msgspec.Struct, frozen=True):
    """After `tokens` of reasoning, it is ended by the first of `closers`, and the answer begins.

    `opener` and `closers` are the texts around reasoning. `starts`: the output begins with reasoning, even without the
    opener. `anywhere`: reasoning may begin in the middle of the output. `optional`: the request runs without the budget
    where a sequence could not go on behind the end of its reasoning.
    """

    tokens: int
    opener: str
    closers: tuple[str, ...]
    starts: bool = False
    anywhere: bool = False
    optional: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, before tokenising.

    Exactly one of `prompt`, `prompt_ids` and `messages` (chat, for the tokenizer's chat template) is set.
    `stop` strings end a sequence and are not part of its text. `logprobs`: return the chosen token's log-probability
    with each token, if the engine has it. `asks_logprobs`: the client asked for it, not only the answer's format.
    `needs_logprobs`: refuse the request if the engine does not have it. `top_logprobs`: how many of the most likely
    tokens come with each token (`RankedToken`). `truncate` keeps the last N prompt tokens.
    `bad` strings are not generated, `guide` constrains the output, `adapter` is the name of a LoRA adapter.
    `default_new_tokens` are generated if `sampling.max_new_tokens` is 0, or fewer where a limit is lower; 0: as many as
    the limits allow.
    `template` has the keywords of the chat template beside the messages (`tools`, `add_generation_prompt`, ...).
    `shown_tokens` are special tokens whose text is part of the output, such as the markers of tool calls.
    `guide_from` is the parameter that asks for the guide, where that is not a guide by its name.
    `prompt_logprobs`: return the log-probabilities of the prompt's tokens, each with as many of the most likely ones;
    None for none of it. `prompt_only`: generate nothing. `logit_bias` has tokens and what is added to their logits.
    `cache_salt` names the group of requests with which this one shares the prefix cache; "": `RequestOrigin.salt` does.
    A request with `priority` -1 goes behind those with the priority of its origin.
    `pooling`: no text is generated; `pair` is then the second text, of a score. `truncate` keeps the first N tokens
    there, special ones included.
    `images` are those of the `messages`, in their order; each is a part `{"type": "image"}` there.
    `thinking` bounds the reasoning of each sequence.
    """

    prompt: Annotated[str | None, _SERVER] = None
    prompt_ids: Annotated[list[int] | None, _SERVER] = None
    messages: Annotated[list[dict[str, Any]] | None, _SERVER] = None
    template: Annotated[dict[str, Any] | None, _SERVER] = None
    sampling: Annotated[Sampling, _SERVER] = Sampling()
    stop: Annotated[tuple[str, ...], _SERVER] = ()
    stop_token_ids: Annotated[tuple[int, ...], _TOKENWISE] = ()
    logprobs: Annotated[bool, _SERVER] = False
    asks_logprobs: Annotated[bool, _SERVER] = False
    needs_logprobs: Annotated[bool, _LOGPROBS] = False
    top_logprobs: Annotated[int, _TOP_LOGPROBS] = 0
    truncate: Annotated[int | None, _SERVER] = None
    bad: Annotated[tuple[str, ...], _BAD] = ()
    guide: Annotated[Guide | None, _HISTORY] = None
    adapter: Annotated[str | None, _ADAPTER] = None
    default_new_tokens: Annotated[int, _SERVER] = 0
    shown_tokens: Annotated[tuple[str, ...], _SERVER] = ()
    guide_from: Annotated[str | None, _SERVER] = None
    prompt_logprobs: Annotated[int | None, _PROMPT_LOGPROBS] = None
    prompt_only: Annotated[bool, _SERVER] = False
    logit_bias: Annotated[tuple[tuple[int, float], ...], _BIAS] = ()
    cache_salt: Annotated[str, _SALT] = ""
    priority: Annotated[Literal[-1, 0], _SERVER] = 0
    pooling: Annotated[Pooling | None, _SERVER] = None
    pair: Annotated[str | None, _SERVER] = None
    images: Annotated[tuple[ImageSource, ...], _IMAGES] = ()
    thinking: Annotated[ThinkingBudget | None, _SERVER] = None

    @property
    def task(self) -> TaskName:
        """The task that the model has to have."""
        return "generate" if self.pooling is None else self.pooling.task


class RequestField:
    """A field of `GenerationRequest`, or of its `sampling`, with its trait.

    It reads the field from a request, and from the engine's message, which has the fields that the engine honours
    under the same names.
    """

    def __init__(self, name: str, path: str, neutral: object, trait: Trait) -> None:
        self.name = name
        self.trait = trait
        self.neutral = neutral
        self.path = path
        self.read = attrgetter(path)

    def is_set(self, request: object) -> bool:
        """Whether a request has another value than the neutral one, of this field and of what it is part of."""
        if self.read(request) == self.neutral:
            return False
        whole = self.trait.part_of
        return whole is None or FIELDS[whole.name].is_set(request)


def read_traits(struct: type[msgspec.Struct], prefix: str = "") -> dict[str, RequestField]:
    """The fields of a struct by name. Raises TypeError for one whose trait is not decided."""
    neutral, hints, found = struct(), get_type_hints(struct, include_extras=True), {}
    for name in struct.__struct_fields__:
        traits = [each for each in getattr(hints[name], "__metadata__", ()) if isinstance(each, Trait)]
        if len(traits) != 1:
            raise TypeError(
                f"{struct.__name__}.{name} has {len(traits)} traits, expected one: declare it as "
                f"Annotated[TYPE, Trait(honoured_by=..., part_of=..., resume=...)]"
            )
        found[name] = RequestField(name, prefix + name, getattr(neutral, name), traits[0])
    return found


FIELDS: Mapping[str, RequestField] = MappingProxyType(
    read_traits(Sampling, "sampling.") | read_traits(GenerationRequest)
)


class RequestOrigin(msgspec.Struct, frozen=True):
    """The origin of a request: the id by which its client knows it, and its dialect.

    Requests with one `client` share what a client gets of the batch; "" is a client too. Those with a higher `priority`
    go first: 1, 0 or -1. `client_label` is what logs and pages call the client. Requests with one `salt` share the
    prefix cache; "" is a salt too.
    """

    request_id: str = ""
    dialect: str = ""
    client: str = ""
    priority: int = 0
    client_label: str = ""
    salt: str = ""


class Token(msgspec.Struct, frozen=True, gc=False):
    """One generated token. `text` is what it adds to the output: "" for special tokens and unfinished characters.

    Special tokens that the request wants to see (`shown_tokens`) have their text.
    """

    id: int
    text: str
    logprob: float | None
    special: bool


class Alternative(NamedTuple):
    """One of the most likely tokens at a position."""

    id: int
    text: str
    logprob: float


class RankedToken(Token, frozen=True, gc=False):
    """A token of a request that has `top_logprobs`. `top` may lack the token itself, and is empty if unknown."""

    top: list[Alternative]


class SequenceResult(msgspec.Struct, frozen=True):
    """The end of one sequence. `generated_tokens` counts the end token; `seed` is None for greedy sequences.

    `queue_seconds` is how long its request waited before it ran, `cached_tokens` what it had of its prompt from the
    prefix cache, as far as the engine says. `reseeded`: the request has a seed and went on in another engine process,
    so another run with that seed has other tokens. `accepted_tokens` of the generated ones were proposed by a draft;
    None without speculation. It proposed `drafted_tokens` in all; None where the engine does not say so.
    """

    reason: FinishReason
    generated_tokens: int
    cumulative_logprob: float | None
    seed: int | None
    stop_sequence: str | None = None
    error: RequestError | None = None
    queue_seconds: float = 0.0
    reseeded: bool = False
    accepted_tokens: int | None = None
    cached_tokens: int = 0
    drafted_tokens: int | None = None


def total(counts: Iterable[int | None]) -> int | None:
    """The sum of counts, None where one is not known."""
    known = list(counts)
    return None if None in known else sum(filter(None, known))


class OutputChunk(msgspec.Struct, frozen=True, gc=False):
    """The new output of one sequence since the last chunk.

    `index` is the sequence (0 to n - 1) of its request, `generation` the request among those of one call. `prompt` has
    the prompt's tokens with their log-probabilities, in one chunk of a request with `prompt_logprobs`; the first token
    has none. `vector` is what a request with `pooling` wants, as float32 in the machine's byte order: a vector, or the
    one number of a score.
    """

    index: int
    tokens: list[Token]
    finished: SequenceResult | None
    generation: int = 0
    prompt: list[RankedToken] | None = None
    vector: bytes = b""


def joined(chunks: Iterable[OutputChunk]) -> list[OutputChunk]:
    """The chunks, with all chunks of one sequence joined to one."""
    found: dict[tuple[int, int], list[OutputChunk]] = {}
    for chunk in chunks:
        found.setdefault((chunk.generation, chunk.index), []).append(chunk)
    return [
        msgspec.structs.replace(each[-1], tokens=[token for chunk in each for token in chunk.tokens])
        for each in found.values()
    ]


Consumer = Callable[[OutputChunk], None]
"""Receives the chunks of one request, in order. Called by the rolling batch; must neither block nor raise."""
