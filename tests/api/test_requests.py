"""What requests of every dialect become, or why they are refused: the table is `requests.json`.

A row has a request (`path`, `body` or `raw`, `headers`, the model's `options` and chat `template`) and what is made of
it: the fields of each `GenerationRequest` that are not neutral, the head of the response, and with `respond` its bytes
for scripted output. UPDATE_GOLDEN=1 writes what is made of each row; a new one needs its request only.
"""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given as draws, strategies as st

from djl_trtllm.api.base import Call, Dialect, RawRequest, ResponseEncoder
from djl_trtllm.api.dialects.lmi.dialect import INPUTS_PARAMETERS
from djl_trtllm.api.dialects.lmi.responses import LinesEncoder
from djl_trtllm.api.dialects.tgi import PARAMETERS
from djl_trtllm.api.output_parsers import OutputParser
from djl_trtllm.api.parameters import Table
from djl_trtllm.api.registry import DIALECTS, LMI
from djl_trtllm.api.sampling import read_schema
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.request import GenerationRequest, Guide, ImageSource, OutputChunk, Pooling, Sampling, ThinkingBudget
from tests.api.models import EOS, FAILURE, PROMPT, PlayedModel, PlayedTokenizer, seconds, several
from tests.support.tables import by_rows, options_of

TABLE = Path(__file__).with_name("requests.json")
ROWS: dict[str, list[dict[str, Any]]] = json.loads(TABLE.read_text())
MADE = ("refused", "head", "requests", "response")
"""The members that are made of the others."""
CHANGING = re.compile(
    r'[0-9a-f]{32}|(?<="fp_)[0-9a-f]{10}|(?<="call_)[0-9a-f]{24}|(?<="created":)\d+|(?<="created_at":)\d+'
)


def given(struct: GenerationRequest | Sampling | Pooling) -> dict[str, Any]:
    """The fields that ask for something."""
    neutral = type(struct)()
    fields = {name: getattr(struct, name) for name in type(struct).__struct_fields__}
    return {name: plain(value) for name, value in fields.items() if value != getattr(neutral, name)}


def plain(value: Any) -> Any:
    if isinstance(value, (GenerationRequest, Pooling, Sampling)):
        return given(value)
    if isinstance(value, Guide):
        return [value.kind.name, value.value, *["strict"] * value.strict]
    if isinstance(value, ImageSource):
        return [value.url, value.place]
    if isinstance(value, ThinkingBudget):
        return msgspec.to_builtins(value)
    return list(map(plain, value)) if isinstance(value, tuple) else value


def respond(call: Call) -> str:
    """The whole response to scripted output, without what is another one every time."""
    for _ in call.requests:
        call.encoder.begin(PROMPT)
    n, alone = call.requests[0].sampling.n, call.sequences == 1
    chunks = EOS if alone else [chunk for number in range(len(call.requests)) for chunk in several(n, number)]
    body = b"".join([call.encoder.encode(chunk) for chunk in chunks])
    return CHANGING.sub("", body.decode("utf-8", "backslashreplace"))


def made_of(row: dict[str, Any]) -> dict[str, Any]:
    (dialect,) = (each for each in DIALECTS if row["path"] in each.paths)
    body = row["raw"].encode("latin-1") if "raw" in row else json.dumps(row["body"]).encode()
    model = PlayedModel(options_of(row.get("options", {})), tokenizer=PlayedTokenizer(row.get("template", "")))
    request = RawRequest(body, row.get("headers", {}), row["path"], {"model": "ensemble", "endpoint": "story"})
    try:
        call = dialect.parse(request, model)
    except InvalidRequestError as error:
        # Versions of orjson disagree about the place of a surrogate.
        return {
            "refused": [type(error).__name__, re.sub(r"(surrogate in string): .*? \(char \d+\)", r"\1", str(error))]
        }
    encoder = call.encoder
    head = [encoder.content_type, *["stream"] * encoder.stream, *["prompt tokens"] * encoder.wants_prompt_tokens]
    made = {"head": [*head, *map(list, call.headers)], "requests": [given(each) for each in call.requests]}
    if row.get("respond"):
        made["response"] = [respond(call), *(list(each) for each in call.late_headers() if "time" not in each[0])]
    return made


@by_rows("rule", ROWS)
def test_what_requests_become_is_in_the_table(rule: str) -> None:
    for row in ROWS[rule]:
        asked = {name: value for name, value in row.items() if name not in MADE}
        made = asked | json.loads(json.dumps(made_of(asked)))
        if os.environ.get("UPDATE_GOLDEN"):
            row.clear()
            row.update(made)
        assert made == row, rule
    if os.environ.get("UPDATE_GOLDEN"):
        TABLE.write_text(written())


def written() -> str:
    """The table, a line for each row."""
    lines = [
        f"{json.dumps(rule)}: [\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]" for rule, rows in ROWS.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


NESTED = {"Lmi": INPUTS_PARAMETERS, "Tgi": PARAMETERS}
"""The parameters in the member `parameters` of a body."""


def names_in(value: Any) -> set[str]:
    """Every name of a member or a tensor in a body."""
    if isinstance(value, list):
        return set().union(*map(names_in, value))
    if not isinstance(value, dict):
        return set()
    tensor = {value["name"]} if isinstance(value.get("name"), str) else set()
    return {*value, *tensor}.union(*map(names_in, value.values()))


@by_rows("dialect", DIALECTS)
def test_every_parameter_of_a_dialect_has_a_row(dialect: Dialect) -> None:
    tables = [table for path in dialect.paths for table in dialect.tables.get(path, ())]
    # A path may take bodies of other dialects, which have their rows.
    others = (path for each in DIALECTS for path in each.paths if set(tables) & set(each.tables.get(path, ())))
    paths = {*dialect.paths, *others}
    rows = [row for rows in ROWS.values() for row in rows if row["path"] in paths]
    named = set[str]().union(*(names_in(row.get("body")) for row in rows))
    known = {name for table in tables for name in table.schema()["properties"]}
    if "parameters" in known:
        known |= NESTED.get(type(dialect).__name__, Table()).rows.keys()
    assert known - named == set()


def refusal(body: dict[str, Any], path: str = "/invocations") -> str:
    return str(made_of({"path": path, "body": body})["refused"][1])


def test_messages_are_bounded() -> None:
    assert len(refusal({"inputs": ["a" * 100_000], "b" * 100_000: 1})) < 1000
    assert "and 158 more" in refusal({"inputs": "a", "parameters": {f"x{i}x": 1 for i in range(200)}})


@pytest.mark.parametrize(("path", "member"), [("/v1/responses", "input"), ("/v1/messages", "messages")])
def test_the_cost_grows_with_the_messages_and_no_faster(path: str, member: str) -> None:
    def asked(count: int) -> dict[str, Any]:
        body = {member: [{"role": "user", "content": "x" * 1000}] * count}
        return {"path": path, "body": body if member == "input" else body | {"max_tokens": 1}}

    short, long = (seconds(partial(made_of, asked(count))) for count in (256, 4096))
    assert long < 80 * short  # 16 times as long; 256 if each message cost as much as all before it


BODIES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["inputs", "parameters", "messages", "stream", "role", "content", "temperature", "stop"]),
            inner,
            max_size=4,
        )
    ),
)


@draws(BODIES)
def test_any_payload_is_parsed_or_refused(payload: Any) -> None:
    for path in ("/invocations", "/generate", "/predict", "/v1/chat/completions", "/v1/completions"):
        assert len(str(made_of({"path": path, "body": payload}).get("refused", ""))) < 4000
    compat = {"tgi_compat": True}
    assert made_of({"path": "/invocations", "body": payload, "options": compat})


@draws(st.binary(max_size=40), st.sampled_from([{}, {"content-type": "text/plain"}]))
def test_any_body_is_parsed_or_refused(body: bytes, headers: dict[str, str]) -> None:
    assert made_of({"path": "/invocations", "raw": body.decode("latin-1"), "headers": headers})


def test_an_unknown_formatter_of_the_option_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        made_of({"path": "/invocations", "body": {"inputs": "a"}, "options": {"output_formatter": "jsonline"}})
    (line,) = caplog.messages
    assert "option.output_formatter" in line and "jsonline" in line


def test_an_error_before_the_prompt_was_tokenised_shows_the_inputs() -> None:
    body = b'{"inputs": "The wolf", "stream": true, "parameters": {"details": true}}'
    call = LMI.parse(RawRequest(body, {}), PlayedModel())
    assert json.loads(call.encoder.error(FAILURE))["details"]["inputs"] == "The wolf"


TOOL_TEMPLATE = "{# <tool_call> #}{{ tools }}{{ messages }}"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
CHAT = {**ASKED, "tools": [{"type": "function", "function": FUNCTION}]}


@pytest.fixture
def new_objects() -> Iterator[Callable[[], list[Any]]]:
    """The objects that came during the test. The garbage of other tests is collected before: it may be processes."""
    gc.collect()
    gc.freeze()
    gc.disable()  # the server's seldom collects what has lived as long as a stream
    yield gc.get_objects
    gc.enable()
    gc.unfreeze()


@pytest.mark.parametrize("stream", [False, True])
@by_rows(
    ("path", "body", "options"),
    [
        *(("/invocations", {"inputs": "a"}, {"tgi_compat": tgi_compat}) for tgi_compat in (False, True)),
        ("/invocations", {"inputs": "a", "parameters": {"output_formatter": "none"}}, {}),
        ("/", {"inputs": "a"}, {}),
        ("/predict", {"prompt": "a", "max_tokens": 8}, {}),
        *((path, CHAT, {}) for path in ("/invocations", "/v1/chat/completions")),
        ("/v1/completions", {"prompt": "a"}, {}),
        ("/v1/messages", {**ASKED, "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]}, {}),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", **FUNCTION}]}, {}),
    ],
)
def test_the_memory_of_a_response_is_free_at_its_end(
    path: str, body: dict[str, Any], options: dict[str, Any], stream: bool, new_objects: Callable[[], list[Any]]
) -> None:
    row = {"path": path, "body": {**body, "stream": stream}, "options": options, "template": TOOL_TEMPLATE}
    assert made_of({**row, "respond": True})["response"]
    assert [each for each in new_objects() if isinstance(each, (ResponseEncoder, OutputParser))] == []


def nested(levels: int) -> dict[str, Any]:
    """A schema of this number of levels of objects and lists."""
    schema: dict[str, Any] = {"x": "y"}
    for level in range(levels - 1):
        schema = {"items": schema} if level % 2 else {"anyOf": schema}
    return schema


def test_guides_are_bounded_in_length_and_levels() -> None:
    for guide in (
        {"guided_json": nested(64)},
        {"guided_json": {"anyOf": [{}] * 1000}},
        {"guided_regex": "(" * 64 + "a" + ")" * 64},
        {"guided_regex": "(a)" * 1000},
        {"guided_regex": "a" * 65_536},
        # What does not nest: escapes, classes, strings.
        *({"guided_regex": part * 1000} for part in (r"\(", "[(]", r"[\](]")),
        *({"guided_regex": text} for text in ("[" + "(" * 1000, "[" * 65_536)),
        {"guided_choice": ["(" * 100]},
        {"guided_choice": ["a"] * 64},
        *({"guided_grammar": text} for text in ('root ::= "(((" [(] ' * 1000, r'"\"("' * 100, '"' + "(" * 1000)),
    ):
        assert made_of({"path": "/invocations", "body": {"inputs": "a", "parameters": guide}})["requests"]
    for guide in (
        {"guided_json": nested(65)},
        {"guided_json": '{"a":' * 120 + "1" + "}" * 120},
        {"guided_regex": "(" * 65 + "a" + ")" * 65},
        {"guided_regex": ")" + "(" * 66},
        {"guided_regex": '"' + "(" * 65 + '"'},
        {"guided_grammar": "root ::= " + "(" * 65 + '"a"' + ")" * 65},
    ):
        assert "nested deeper than" in refusal({"inputs": "a", "parameters": guide})
    for guide, length in (
        ({"guided_regex": "a" * 65_537}, 65_537),
        ({"guided_json": {"description": "x" * 65_536}}, 65_554),
        ({"structural_tag": {"format": {"type": "x" * 65_536}}}, 65_582),
        ({"structural_tag": "x" * 65_537}, 65_537),
        ({"guided_choice": ["(" * 40_000]}, 80_002),
    ):
        told = f"(it has {length} characters, at most 65536 are accepted)"
        assert told in refusal({"inputs": "a", "parameters": guide})
    assert "a list of up to 64 strings" in refusal({"inputs": "a", "parameters": {"guided_choice": ["a"] * 65}})


def test_a_schema_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        read_schema(nested(300))


DJL = json.loads((Path(__file__).parent / "golden" / "djl_bodies.json").read_text())
"""What the handlers of djl_python make of bodies and of events (`tools/djl_bodies.py`)."""
FIRST_OF_ID = {"chatcmpl": "chat", "cmpl": "completions"}


@by_rows("version", DJL["answers"])
def test_bodies_are_what_djls_own_handlers_take_them_for(version: str) -> None:
    for body, theirs in zip(DJL["bodies"], DJL["answers"][version]["apis"], strict=True):
        made = made_of({"path": "/invocations", "body": body, "respond": True})
        if "refused" in made:
            assert theirs.startswith("refused")
        else:
            kind = re.search(r'"id":"(\w+)-"', made["response"][0])
            assert (FIRST_OF_ID[kind[1]] if kind else "lmi") == theirs
            assert made["head"][0] == ("application/jsonlines" if body.get("stream") else "application/json")


class Played(ResponseEncoder):
    """Events of an engine, one at a time."""

    stream = True
    content_type = "text/event-stream"

    def encode(self, chunk: OutputChunk) -> bytes:
        event: str = DJL["events"][chunk.index]
        return event.encode()


@by_rows("version", DJL["answers"])
def test_streams_are_the_lines_that_djls_own_handlers_send(version: str) -> None:
    theirs, lines = DJL["answers"][version]["stream"], LinesEncoder(Played())
    sent = b"".join(lines.encode(OutputChunk(number, [], None)) for number in range(len(DJL["events"])))
    # An empty line is all that DJL makes of [DONE].
    assert (lines.content_type, sent.decode() + "\n") == (theirs["content_type"], theirs["body"])
