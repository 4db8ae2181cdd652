"""Dialogues of a client and the server as data, and outputs of models in every format of tool calls.

`dialogues.json` beside a test has them by rule. A dialogue is what there is at its beginning (`served`) and exchanges:
a request (`ask`, with `body` or `raw`, and `headers`) and the response (`status`, `said` or `text`, and as `told` the
headers that clients act on). UPDATE_GOLDEN=1 writes the responses; a new dialogue needs its requests only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from djl_trtllm.api import output_parsers as parsers
from djl_trtllm.executor.protocol import Feature
from djl_trtllm.model import Tokenizer
from djl_trtllm.service.clients import Sessions
from djl_trtllm.service.lifecycle import ServedModel
from djl_trtllm.version import __version__
from tests.server.application import Application
from tests.support.asgi import JSON
from tests.support.in_process import Hosts
from tests.support.models import scripted_model

_REQUEST = ("ask", "body", "raw", "headers")
_TOLD = ("allow", "connection", "retry-after", "warning", "x-amzn-errortype", "x-amzn-sagemaker-custom-attributes")
"""Headers that clients act on."""
_CHANGING = re.compile(r'[0-9a-f]{32}|(?<="created": )\d+|(?<=fp_)[0-9a-f]{10}')


class Dialogues:
    """The dialogues of a folder."""

    def __init__(self, module: str) -> None:
        self._file = Path(module).with_name("dialogues.json")
        self.rules: dict[str, Any] = json.loads(self._file.read_text())

    async def check(self, rule: str, hosts: Hosts, tokenizer: Tokenizer, folder: Path) -> None:
        """Let a client say what it says in a dialogue. AssertionError: the server answers otherwise."""
        dialogue = self.rules[rule]
        hosts.alone = True
        served = await _served(dialogue.get("served", {}), hosts, tokenizer, folder)
        try:
            for exchange in dialogue["exchanges"]:
                asked = {name: exchange[name] for name in _REQUEST if name in exchange}
                answered = asked | await _answer(served, asked, folder)
                if os.environ.get("UPDATE_GOLDEN"):
                    exchange.clear()
                    exchange.update(answered)
                assert answered == exchange
        finally:
            await served.close()
        if os.environ.get("UPDATE_GOLDEN"):
            self._file.write_text(self._written())

    def _written(self) -> str:
        """The dialogues, a line for each exchange."""
        parts = []
        for rule, dialogue in self.rules.items():
            served = f'"served": {json.dumps(dialogue["served"])},\n' if "served" in dialogue else ""
            lines = ",\n".join(map(json.dumps, dialogue["exchanges"]))
            parts.append(f'{json.dumps(rule)}: {{{served}"exchanges": [\n{lines}\n]}}')
        return "{\n" + ",\n".join(parts) + "\n}\n"


async def _served(setting: Mapping[str, Any], hosts: Hosts, tokenizer: Tokenizer, folder: Path) -> Application:
    """An application with `models` and their options, by default a story, those that are `loading`, and a store."""
    options = dict(setting.get("application", {}))
    if setting.get("sessions"):
        options["sessions"] = Sessions(folder, 60, 5)
    if setting.get("store"):
        scripted_model(folder / "store" / "red")
        scripted_model(folder / "outside")
        (folder / "store" / "loop").symlink_to("loop")
        options["store"] = folder / "store"
    given: dict[str, Any] = {}
    if setting.get("adapters"):
        hosts.features |= {Feature.ADAPTERS}
        given["directory"] = folder
        for name in ("dutch", "french", "more/greek"):
            (folder / "adapters" / name).mkdir(parents=True)
            (folder / "adapters" / name / "adapter_config.json").write_text("{}")
    served = Application(**options)
    for name, of_model in setting.get("models", {"story": {}}).items():
        await served.load(tokenizer, name, **given, **of_model)
    for name in setting.get("loading", ()):
        served.registry.add(ServedModel(name, f"/{name}"))
    return served


async def _answer(served: Application, asked: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What the server answers, without what is another one every time."""
    method, _, target = asked["ask"].partition(" ")
    path, _, query = target.partition("?")
    body = json.dumps(asked["body"]) if "body" in asked else asked.get("raw", "")
    headers = asked.get("headers", JSON if body else {})
    response = await served.client.begin(method, path, body.encode("latin-1"), headers, query).end()
    text = response.body.decode().replace(str(folder), "{folder}").replace(__version__, "{version}")
    found: dict[str, Any] = {"status": response.status}
    if told := {name: response.headers[name] for name in _TOLD if name in response.headers}:
        found["told"] = told
    if response.headers.get("content-type") == "application/json":
        return found | {"said": json.loads(_CHANGING.sub("0", json.dumps(json.loads(text))))}
    return found | {"type": response.headers.get("content-type", ""), "text": text}


_DATA = json.loads(Path(__file__).with_name("tool_calls.json").read_bytes())
FUNCTIONS: dict[str, Any] = _DATA["functions"]
CASES: list[Any] = _DATA["cases"]
WRITERS = tuple(_DATA["writers"])
"""A format, or a variant of it whose name goes on after a blank."""


@cache
def _template(writer: str) -> jinja2.Template:
    environment = jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined)
    environment.filters |= {"json": lambda value: json.dumps(value, ensure_ascii=False), "python": repr}
    return environment.from_string(_DATA["writers"][writer].replace("{% XML %}", _DATA["xml"]))


def write(writer: str, before: str, calls: Iterable[tuple[str, Any]], after: str) -> str:
    """The output of a model with these calls."""
    named = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return _template(writer).render(before=before, calls=named, after=after)


class Answer(NamedTuple):
    """What was found in an output."""

    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""

    @classmethod
    def of(cls, content: str, calls: list[list[str]], reasoning: str) -> Answer:
        """An answer of a table."""
        return cls(content, tuple((name, arguments) for name, arguments in calls), reasoning)

    def values(self) -> list[list[Any]]:
        """The calls with their arguments as values. Raises ValueError if some are no JSON."""
        return [[name, json.loads(arguments)] for name, arguments in self.calls]


def parser(name: str, tools: Any = None, reasoning: str = "none", prompt: str = "") -> parsers.OutputParser:
    """A parser of the format (of the writer) `name`."""
    own = parsers.tool_format(name.split()[0], "")
    assert own is not None
    calls = parsers.call_parser(own, FUNCTIONS if tools is None else tools)
    return parsers.with_reasoning(reasoning, calls, prompt)


def parse(parser: parsers.OutputParser, *pieces: str) -> Answer:
    """What a parser finds in the pieces of an output."""
    found: dict[type, list[str]] = {parsers.Content: [], parsers.Reasoning: []}
    calls: list[tuple[str, list[str]]] = []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        match event:
            case parsers.CallStart(name):
                calls.append((name, []))
            case parsers.CallArguments(text):
                calls[-1][1].append(text)
            case parsers.Content(text) | parsers.Reasoning(text):
                assert text
                found[type(event)].append(text)
    content, reasoning = ("".join(texts) for texts in found.values())
    return Answer(content, tuple((name, "".join(arguments)) for name, arguments in calls), reasoning)
