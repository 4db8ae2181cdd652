"""The part of DJL's `djl_python` that formatters in a `model.py` import.

`djl_python` is installed with DJL Serving and is on no package index. If it is absent, `install` adds modules with the
same names and members, so that a formatter written for DJL runs unchanged; if it is present, `install` changes nothing
and formatters get DJL's own. Names, attributes and results follow DJL's documents
(`lmi/user_guides/input_formatter_schema.md`, `output_formatter_schema.md`) and its releases 0.27 to 0.36.
"""

import csv
import importlib.util
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _decorator(name: str) -> Callable[[_Function], _Function]:
    """A decorator that marks a function with `is_NAME`. The two handlers are not called, which the log says at load."""

    def mark(function: _Function) -> _Function:
        setattr(function, f"is_{name}", True)
        return function

    mark.__name__ = name
    return mark


input_formatter = _decorator("input_formatter")
output_formatter = _decorator("output_formatter")
prediction_handler = _decorator("prediction_handler")
init_handler = _decorator("init_handler")


class Input:
    """A request as a formatter gets it: properties (headers, custom attributes) and one content, `data`."""

    def __init__(self) -> None:
        self.function_name = "handle"
        self.properties: dict[str, str] = {}
        self.content: dict[str, bytes] = {}

    def get_function_name(self) -> str:
        return self.function_name

    def get_properties(self) -> dict[str, str]:
        return self.properties

    def get_property(self, key: str) -> str | None:
        """A property by its name in any case, None if absent."""
        return next((value for name, value in self.properties.items() if name.lower() == key.lower()), None)

    def contains_key(self, key: str) -> bool:
        return key in self.content

    def is_batch(self) -> bool:
        """Never: requests are formatted one by one."""
        return False

    def get_batch_size(self) -> int:
        return 1

    def get_batches(self) -> "list[Input]":
        return [self]

    def is_empty(self) -> bool:
        return not self.content

    def get_as_bytes(self, key: str | None = None) -> bytes | None:
        """A content; without a key `data`, else the first, else None."""
        if key is not None:
            return self.content[key]
        return self.content.get("data", next(iter(self.content.values()), None))

    def get_as_string(self, key: str | None = None) -> str:
        """A content, decoded as UTF-8."""
        return (self.get_as_bytes(key) or b"").decode()

    def get_as_json(self, key: str | None = None) -> Any:
        return json.loads(self.get_as_bytes(key) or b"")

    def get_as_csv(self, key: str | None = None) -> list[dict[str, str]]:
        """A content, read as CSV with a header."""
        return list(csv.DictReader(io.StringIO(self.get_as_string(key))))


class Output:
    """A class that handlers in a `model.py` import. Nothing here calls a handler, so it has no content."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def add(self, *_: Any, **__: Any) -> "Output":
        """Return itself, as DJL's does."""
        return self

    add_property = add


def decode(inputs: Input, content_type: str | None, key: str | None = None) -> Any:
    if not content_type:
        return inputs.get_as_json(key) if inputs.get_as_bytes(key) else {"inputs": ""}
    if "application/json" in content_type:
        return inputs.get_as_json(key)
    if "text/csv" in content_type:
        return {"inputs": inputs.get_as_csv(key)}
    if "text/plain" in content_type:
        return {"inputs": [inputs.get_as_string(key)]}
    if content_type == "application/x-www-form-urlencoded":
        return {"inputs": inputs.get_as_string(key)}
    return {"inputs": inputs.get_as_bytes(key)}


@dataclass(eq=False)
class Token:
    id: int
    text: str
    log_prob: float | None = None
    special_token: bool | None = None
    error_msg: str | None = None
    request_id: int | None = field(default=None, init=False)

    def as_dict(self) -> dict[str, Any]:
        shown = {"id": self.id, "text": self.text, "log_prob": self.log_prob}
        return shown | self._marks("special_token") | ({"error_msg": self.error_msg} if self.error_msg else {})

    def as_tgi_dict(self) -> dict[str, Any]:
        return {"id": self.id, "text": self.text, "logprob": self.log_prob} | self._marks("special")

    def _marks(self, name: str) -> dict[str, Any]:
        return {name: True} if self.special_token else {}


@dataclass
class Sequence:
    """A sequence of tokens that is read one by one while it grows."""

    tokens: list[Token] = field(default_factory=list)
    top_tokens: list[list[Token]] = field(default_factory=list)
    cumulative_log_prob: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | None = None
    _last_token_index: int | None = None
    _next: int = 0

    def set_next_token(self, token: Token, is_last_token: bool = False) -> None:
        self.tokens.append(token)
        if is_last_token:
            self._last_token_index = len(self.tokens) - 1

    def has_next_token(self) -> bool:
        return self._next < len(self.tokens)

    def get_next_token(self) -> tuple[Token | None, int, bool, bool]:
        """The next token, its index, whether it is the first, and whether it is the last of the sequence."""
        if not self.has_next_token():
            return None, 0, False, False
        index = self._next
        self._next += 1
        return self.tokens[index], index, index == 0, index == self._last_token_index

    def get_last_token(self) -> Token | None:
        """The last token once it is known to be the last."""
        return None if self._last_token_index is None else self.tokens[self._last_token_index]


class ThreeValueSequence(Sequence):
    """`get_next_token` without the index: as before 0.32, and as DJL's document still has it."""

    def get_next_token(self) -> tuple[Token | None, bool, bool]:  # type: ignore[override]  # one value less
        """The next token, whether it is the first, and whether it is the last of the sequence."""
        token, _, first, last = super().get_next_token()
        return token, first, last


@dataclass
class RequestInput:
    """The request that an input formatter returns, and that an output formatter finds as `request_output.input`."""

    request_id: int | None = None
    client_request_id: str | None = None
    output_formatter: Callable[..., Any] | str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    server_parameters: dict[str, Any] = field(default_factory=dict)
    tgi_compat: bool = False


@dataclass
class TextInput(RequestInput):
    """The input of text generation."""

    input_text: str | list[str] | None = None
    adapters: Any = None
    tokenizer: Any = None


@dataclass
class RequestOutput:
    """The argument of an output formatter."""

    request_id: int
    input: RequestInput
    finished: bool = False


@dataclass
class TextGenerationOutput(RequestOutput):
    """The output of text generation: sequences by index."""

    sequences: dict[int, Sequence] = field(default_factory=dict)
    best_sequence_index: int = 0
    prompt_tokens_details: list[Token] = field(default_factory=list)
    other_sequences_indices: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sequences[self.best_sequence_index] = Sequence()

    def set_next_token(
        self,
        token: Token,
        sequence_index: int = 0,
        is_last_token: bool = False,
        finish_reason: str | None = None,
    ) -> None:
        sequence = self.sequences.setdefault(sequence_index, Sequence())
        sequence.set_next_token(token, is_last_token)
        if finish_reason:
            sequence.finish_reason = finish_reason

    def get_tokens_as_dict(self, sequence_index: int = 0) -> list[dict[str, Any]]:
        return [self._shown(token) for token in self.sequences[sequence_index].tokens]

    def get_prompt_tokens_as_dict(self) -> list[dict[str, Any]]:
        return [self._shown(token) for token in self.prompt_tokens_details]

    def _shown(self, token: Token) -> dict[str, Any]:
        return token.as_tgi_dict() if self.input.tgi_compat else token.as_dict()


_MODULES: dict[str, tuple[Any, ...]] = {
    "djl_python": (Input, Output),
    "djl_python.inputs": (Input,),
    "djl_python.outputs": (Output,),
    "djl_python.encode_decode": (decode,),
    "djl_python.input_parser": (input_formatter, prediction_handler, init_handler, Input, RequestInput, TextInput),
    "djl_python.output_formatter": (output_formatter, RequestOutput, TextGenerationOutput),
    "djl_python.request_io": (Token, Sequence, RequestInput, TextInput, RequestOutput, TextGenerationOutput),
}


def install() -> bool:
    """Make `djl_python` importable. Returns True if the shim is used."""
    if "djl_python" in sys.modules or importlib.util.find_spec("djl_python") is not None:
        return getattr(sys.modules.get("djl_python"), "__djl_trtllm_shim__", False)
    for name, members in _MODULES.items():
        module = ModuleType(name, f"Replaces DJL Serving's {name}.")
        module.__path__ = []
        module.__djl_trtllm_shim__ = True  # type: ignore[attr-defined]  # our mark
        for member in members:
            setattr(module, member.__name__, member)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return True
