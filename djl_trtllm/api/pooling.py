"""Texts, parameters, and responses of vectors and scores, which the APIs of embeddings and reranking share.

A vector becomes JSON when it arrives, so that the last one of a large response costs no more than the others.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import orjson
from msgspec.structs import replace

from djl_trtllm.api import parameters as kinds
from djl_trtllm.api.base import ModelContext, Prompt, ResponseEncoder
from djl_trtllm.api.parameters import IGNORED, Kind, Parameter, Problems
from djl_trtllm.request import GenerationRequest, OutputChunk, Pooling, TaskName

Item: TypeAlias = "str | list[int] | tuple[str, str]"
"""A text, its token ids, or a pair of texts."""

MOST_TEXTS = 2048
"""The most texts of a request, as in OpenAI's API."""
_MOST_DIMENSIONS = 65_536

_TEXT_LIST = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MOST_TEXTS}
TEXTS = Kind(
    f"a text or a list of up to {MOST_TEXTS} texts",
    lambda value: read_texts([value] if type(value) is str else value),
    {"anyOf": [{"type": "string"}, _TEXT_LIST]},
)
TEXT_LIST = Kind(f"a list of up to {MOST_TEXTS} texts", lambda value: read_texts(value), _TEXT_LIST)

COMMON = (
    Parameter(("model",), kinds.TEXT, IGNORED),
    *kinds.ignored("user"),
    Parameter(("truncate_prompt_tokens",), kinds.integer(-1, 2**31 - 1), "truncate"),
    Parameter(("truncation_side",), neutral=("right",), advice="the beginning of a text is kept"),
    Parameter(("add_special_tokens",), neutral=(True,)),
)
"""The parameters of all of vLLM's APIs of this kind."""

OF_HUGGING_FACE = (
    Parameter(("truncate",), kinds.BOOLEAN, "truncates"),
    Parameter(("truncation_direction",), neutral=("right", "Right"), advice="the beginning of a text is kept"),
)
"""The parameters of all of Text Embeddings Inference's APIs."""


def read_texts(value: Any) -> list[str]:
    """A list of texts. Raises ValueError."""
    if type(value) is not list or not 0 < len(value) <= MOST_TEXTS or not all(type(item) is str for item in value):
        raise ValueError("")
    return value


def pooled(
    task: TaskName,
    items: Iterable[Item],
    values: Mapping[str, Any],
    model: ModelContext,
    problems: Problems,
) -> tuple[GenerationRequest, ...]:
    """The requests for the vectors of texts or token ids, or for the scores of pairs of texts. Raises what
    `Problems.raise_any` raises.

    `values` are those of a table: `truncate` or `truncates`, `activate` and `dimensions`.
    """
    truncate = _kept_tokens(values, model, problems)
    problems.raise_any()
    return pooling_requests(Pooling(task, values.get("activate"), values.get("dimensions")), items, truncate)


def pooling_requests(pooling: Pooling, items: Iterable[Item], truncate: int | None) -> tuple[GenerationRequest, ...]:
    """The requests of texts, token ids or pairs, of which the first `truncate` tokens are used."""
    one = GenerationRequest(truncate=truncate, pooling=pooling)
    return tuple(
        replace(one, prompt=item)
        if isinstance(item, str)
        else replace(one, prompt=item[0], pair=item[1])
        if isinstance(item, tuple)
        else replace(one, prompt_ids=item)
        for item in items
    )


def _kept_tokens(values: Mapping[str, Any], model: ModelContext, problems: Problems) -> int | None:
    """The number of tokens of a text that are used; None for all, where a text that is too long is refused."""
    if values.get("truncates"):
        return model.max_seq_len
    asked: int | None = values.get("truncate")
    if asked is None or asked == -1:
        return asked and model.max_seq_len
    if not 0 < asked <= model.max_seq_len:
        problems.invalid.append(
            f"'{problems.sent['truncate']}' is {asked}: expected -1, or 1 to {model.max_seq_len}, the model's longest "
            "text"
        )
    return asked


DIMENSIONS = Parameter(("dimensions",), kinds.integer(1, _MOST_DIMENSIONS), "dimensions")


def vector_json(vector: bytes) -> bytes:
    """A vector as a JSON list, each number with as many digits as float32 has."""
    import numpy as np  # a server whose models generate does without it

    return orjson.dumps(np.frombuffer(vector, np.float32), option=orjson.OPT_SERIALIZE_NUMPY)


def score_of(vector: bytes) -> float:
    """The score in the bytes of a vector, as a number with as many digits as float32 has."""
    import numpy as np  # as above

    return float(str(np.frombuffer(vector, np.float32)[0]))


def joined(head: bytes, vectors: Sequence[bytes], tail: bytes) -> bytes:
    """The members of a list between `head` and `tail`, copied once: all vectors together may be tens of megabytes."""
    members = [*vectors]
    members[0] = head + members[0]
    members[-1] += tail
    return b",".join(members)


class PooledEncoder(ResponseEncoder):
    """The response to a call for vectors or scores: one body, when all results have come.

    `tokens` counts the tokens of the texts. A result is kept as `read` makes it: the JSON of a vector, or a score.
    """

    stream = False
    content_type = "application/json"

    def __init__(self, count: int) -> None:
        self.tokens = 0
        self._results: list[Any] = [None] * count
        self._missing = count

    def begin(self, prompt: Prompt) -> None:
        self.tokens += prompt.length

    def encode(self, chunk: OutputChunk) -> bytes:
        if chunk.finished is None or not chunk.vector:
            return b""
        self._results[chunk.generation] = self.read(chunk.vector, chunk.generation)
        self._missing -= 1
        return b"" if self._missing else self.body(self._results)

    def read(self, vector: bytes, number: int) -> Any:
        """The result of request `number` from its bytes: by default a score."""
        return score_of(vector)

    @abstractmethod
    def body(self, results: Sequence[Any]) -> bytes:
        """The response."""

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's count of tokens."""
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}


class VectorsEncoder(PooledEncoder):
    """A list with the vector of each text; `single`: the only vector, without a list around it."""

    def __init__(self, count: int, *, single: bool = False) -> None:
        super().__init__(count)
        self._single = single

    def read(self, vector: bytes, number: int) -> bytes:
        return vector_json(vector)

    def body(self, results: Sequence[bytes]) -> bytes:
        return results[0] if self._single else joined(b"[", results, b"]")
