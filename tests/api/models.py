"""Played models, model directories with a `model.py`, scripted output, and text that is compared with `golden/`."""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import huggingface_hub
import orjson

from djl_trtllm.api.base import Call, Dialect, Operation, Prompt, RawRequest, RequestParser, ResponseEncoder
from djl_trtllm.api.dialects.lmi.custom import CustomFormatters, load_custom
from djl_trtllm.api.dialects.lmi.dialect import FORMATTERS
from djl_trtllm.api.kept import Kept
from djl_trtllm.api.parameters import IGNORED, Parameter, Problems, Table
from djl_trtllm.api.registry import LMI
from djl_trtllm.api.sampling import ADAPTER, NOT_HONOURED, SAMPLING
from djl_trtllm.api.texts import Presentation
from djl_trtllm.config import Options
from djl_trtllm.errors import GenerationError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token


def load(directory: Path, source: str, **attributes: Any) -> CustomFormatters:
    (directory / "model.py").write_text(textwrap.dedent(source))
    loaded = load_custom(directory, LMI.read, attributes)
    assert loaded is not None
    return loaded


def parse(formatters: CustomFormatters, payload: Any, **options: Any) -> Call:
    return parse_bytes(formatters, json.dumps(payload).encode(), {"x-team": "blue"}, **options)


def parse_bytes(
    formatters: CustomFormatters,
    body: bytes,
    headers: Mapping[str, str] = MappingProxyType({}),
    content_type: str | None = "application/json",
    **options: Any,
) -> Call:
    named = {} if content_type is None else {"content-type": content_type}
    return formatters.parse(RawRequest(body, {**headers, **named}), PlayedModel(Options(**options)))


WHOLE = {"inputs": "The wolf"}
STREAM = {"inputs": "The wolf", "stream": True}

HEAD = """
    from djl_python import Input
    from djl_python.input_parser import input_formatter
    from djl_python.request_io import RequestInput, TextInput

    @input_formatter
"""
"""The beginning of a `model.py` with an input formatter."""


@dataclass
class PlayedTokenizer:
    """As much of a tokenizer as dialects read. `template` is the source of its chat template."""

    template: str = ""
    end_ids = frozenset({2, 7})
    vocab_size = 100

    def chat_source(self, tools: bool) -> str:
        return self.template


@dataclass
class PlayedModel:
    """A `ModelContext`."""

    options: Options = field(default_factory=Options)
    name: str = "story"
    tokenizer: Any = field(default_factory=PlayedTokenizer)
    custom: RequestParser | None = None
    max_seq_len: int = 64
    kept: Kept = field(default_factory=lambda: Kept(Options()))


GOLDEN = Path(__file__).parent / "golden"

PROMPT = Prompt(
    "The wolf",
    3,
    (Token(1, "", None, True), Token(450, "The", None, False), Token(281, " wolf", None, False)),
)

TOKENS = [
    Token(304, ' said: "', -0.0524, False),
    Token(11157, "", -1.2865, False),
    Token(278, "é🦊\n", -0.0075, False),
    Token(29901, "\\ \t", None, False),
]
END = Token(2, "", -0.5, True)
TEXT = ' said: "é🦊\n\\ \t'

EOS = [
    OutputChunk(0, TOKENS[:1], None),
    OutputChunk(0, TOKENS[1:3], None),
    OutputChunk(0, TOKENS[3:], None),
    OutputChunk(0, [END], SequenceResult(FinishReason.END_TOKEN, 5, -1.8464, 7)),
]
"""Ends with its end token, two tokens merged on the way."""

STOP = [
    OutputChunk(0, TOKENS[:1], None),
    OutputChunk(0, TOKENS[1:], None),
    OutputChunk(0, [], SequenceResult(FinishReason.STOP, 5, -1.8464, 7, stop_sequence="###")),
]
"""Ends without a token: the stop string took the text."""

FAILURE = GenerationError('the engine "died"')
FAILED = [
    OutputChunk(0, TOKENS[:1], None),
    OutputChunk(0, TOKENS[1:2], SequenceResult(FinishReason.ERROR, 2, None, None, error=FAILURE)),
]


def seconds(work: Callable[[], object]) -> float:
    """The processor time of the fastest of three."""

    def once() -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    return min(once() for _ in range(3))


def several(n: int, generation: int = 0) -> list[OutputChunk]:
    """`n` sequences, interleaved; sequence i says "i0 i1" and ends by length."""
    updates = [
        OutputChunk(index, [Token(index, f"{index}0", -0.1 * (index + 1), False)], None, generation)
        for index in range(n)
    ]
    updates += [
        OutputChunk(
            index,
            [Token(index + 10, f" {index}1", -0.1, False)],
            SequenceResult(FinishReason.LENGTH, 2, -0.1 * (index + 2), index),
            generation,
        )
        for index in range(n)
    ]
    return updates


def answer(encoder: ResponseEncoder, updates: list[OutputChunk]) -> bytes:
    """The answer's whole body."""
    encoder.begin(PROMPT)
    return b"".join([encoder.encode(update) for update in updates])


def make(name: str, **view: Any) -> ResponseEncoder:
    """An encoder by the name of its formatter."""
    return FORMATTERS[name](Presentation(inputs=PROMPT.text, **view))


def check_golden(name: str, body: bytes) -> None:
    """Compares with the stored answer; UPDATE_GOLDEN=1 stores it."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_bytes(body)
    assert body.decode() == path.read_bytes().decode()


def parse_lines(body: bytes) -> list[dict[str, Any]]:
    """The objects of a stream, its lines cut as httpx does it: at every character that Unicode calls a line end."""
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines()]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


def client_lines(body: bytes) -> list[str] | list[bytes]:
    """The lines of a stream as the Hugging Face client gets them: text since 1.0."""
    return body.split(b"\n") if huggingface_hub.__version__.startswith("0.") else body.decode().split("\n")


SHARED = frozenset(map(id, (*SAMPLING, *ADAPTER, *NOT_HONOURED)))
MISPLACED = ("details", "do_sample", "inputs", "max_new_tokens", "messages", "parameters", "prompt", "stream")
"""Names that belong into another dialect's bodies, or beside an object and not in it."""


def dumped(value: Any) -> str:
    return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS).decode()


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "keys") else list(value)


def lines_of(row: Parameter) -> Iterator[str]:
    """A row: its names and where its value goes, what is expected, and the JSON schema."""
    target = "refused" if row.target is None else "ignored" if row.target == IGNORED else row.target
    yield f"{', '.join(row.names)} -> {target}{' (joined)' if row.union else ''}"
    if row.target is None:
        yield f"  unless {dumped(row.neutral)}; {row.advice}"
    elif row.kind is not None:
        yield from (f"  {row.kind.expected}", f"  {dumped(row.kind.schema)}")


def check_rows(name: str, rows: Iterable[Parameter]) -> None:
    """Compare rows with `golden/parameters-NAME.txt`; UPDATE_GOLDEN=1 stores them."""
    check_golden(f"parameters-{name}", "".join(f"{line}\n" for row in rows for line in lines_of(row)).encode())


def check_tables(name: str, **tables: Table) -> None:
    """Compare tables with `golden/parameters-NAME.txt`, which has only the names of rows that all dialects share."""
    lines: list[str] = []
    for title, table in tables.items():
        problems = Problems()
        misplaced = [each for each in MISPLACED if each not in table.rows]
        table.read(dict.fromkeys(misplaced, 1), problems, "name")
        lines += [title, f"required: {table.schema().get('required', [])}", *problems.invalid]
        rows = {id(row): row for row in table.rows.values()}
        lines.append("shared: " + ", ".join(row.names[0] for at, row in rows.items() if at in SHARED))
        lines += [line for at, row in rows.items() if at not in SHARED for line in lines_of(row)]
        lines.append("")
    check_golden(f"parameters-{name}", "\n".join(lines).encode())


def check_descriptions(dialect: Dialect) -> None:
    """Compare what a dialect says of its paths with `golden/description-DIALECT.txt`."""
    keys = [*dialect.paths, *dialect.actions, *(f"GET {path}" for path in dialect.pages)]
    keys += [f"DELETE {path}" for path in dialect.removals]
    assert dialect.descriptions.keys() <= {*keys} and dialect.tables.keys() <= {*keys}
    lines = [f"aliases: {sorted(dialect.aliases)}, names_model: {dialect.names_model}, sagemaker: {dialect.sagemaker}"]
    groups: dict[str, list[str]] = {}
    for key in keys:
        described = dialect.descriptions.get(key, Operation())._asdict()
        said = [f"  {name}: {dumped(value)}" for name, value in described.items() if value]
        said += [f"  table: {', '.join(table.schema()['properties'])}" for table in dialect.tables.get(key, ())]
        groups.setdefault("\n".join(said), []).append(key)
    lines += [f"{', '.join(paths)}\n{text}" for text, paths in groups.items()]
    check_golden(f"description-{type(dialect).__name__}", ("\n".join(lines) + "\n").encode())
