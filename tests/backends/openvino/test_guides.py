"""Guides on OpenVINO: how they are compiled and tried, schemas as grammars, and what the bundled engine generates."""

from __future__ import annotations

import datetime
import json
import random
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
from openvino_genai import Tokenizer as EngineTokenizer

from djl_trtllm.backends.json_grammar import as_grammar
from djl_trtllm.backends.openvino import guides
from djl_trtllm.backends.openvino.executor import FEATURES, GUIDES, OpenVinoExecutor
from djl_trtllm.backends.openvino.guides import (
    CompiledGuides,
    GuideCompiler,
    read_vocabulary,
    structured_output,
    try_guide,
)
from djl_trtllm.executor.guides import GuideGate
from djl_trtllm.executor.protocol import Refusal, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, Guide, GuideKind, Sampling
from tests.backends.openvino import executor_options
from tests.support.steps import Delta, deltas_of
from tests.support.tables import table

SLOW = Guide(GuideKind.REGEX, "(" + "|".join(f"word{number}.*x" for number in range(600)) + ")")


@pytest.fixture(scope="module")
def compiler(tiny_stories: Path) -> GuideCompiler:
    engine = tiny_stories / "engine"
    vocabulary = read_vocabulary(engine)
    assert vocabulary == 2048
    return GuideCompiler(EngineTokenizer(str(engine)), vocabulary)


@pytest.mark.parametrize(
    ("guide", "argument"),
    [
        (Guide(GuideKind.REGEX, "a"), "regex"),
        (Guide(GuideKind.GRAMMAR, 'root ::= "a"'), "grammar"),
        (Guide(GuideKind.JSON_OBJECT), "grammar"),
        (Guide(GuideKind.JSON_SCHEMA, '{"type":"integer"}'), "grammar"),
    ],
)
def test_a_guide_is_one_argument(guide: Guide, argument: str) -> None:
    config = structured_output(guide)
    given = {name for name in ("json_schema", "regex", "grammar") if getattr(config, name) is not None}
    assert given == {argument}


class Played:
    """A compiler that fails on "broken", and waits before each guide for leave."""

    def __init__(self) -> None:
        self.made = 0
        self.compiled: list[str] = []
        self.forgotten = 0
        self.may = threading.Event()
        self.may.set()
        self.prepare = CompiledGuides(self._made)  # type: ignore[arg-type]

    def _made(self) -> Played:
        self.made += 1
        return self

    def compile(self, guide: Guide) -> None:
        self.may.wait(20)
        self.compiled.append(guide.value)
        if guide.value == "broken":
            raise RuntimeError("cannot be compiled")

    def forget(self) -> None:
        self.forgotten += 1

    def ask(self, text: str) -> str | None:
        return self.prepare(text.encode(), Guide(GuideKind.REGEX, text))

    def answer(self, text: str) -> str:
        deadline = time.monotonic() + 20
        while (found := self.ask(text)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return found


@pytest.fixture
def played() -> Iterator[Played]:
    played = Played()
    yield played
    played.may.set()


def test_guides_are_compiled_once_and_one_at_a_time_while_others_are_ready(played: Played) -> None:
    broken = "cannot be compiled"
    answers = [played.answer(text) for text in ("a", "broken", "b", "a", "broken")]
    assert answers == ["", broken, "", "", broken]
    played.may.clear()
    assert [played.ask(text) for text in ("slow", "later", "a", "slow")] == [None, None, "", None]
    played.may.set()
    assert [played.answer(text) for text in ("later", "slow")] == ["", ""]
    assert (played.compiled, played.made) == (["a", "broken", "b", "slow", "later"], 1)


def test_compiled_guides_are_forgotten_before_they_take_much_memory(played: Played) -> None:
    for number in range(257):
        played.answer(str(number))
        assert played.forgotten == (number == 256)
    played.answer("0")
    assert played.compiled[-1] == "0"


class Timed:
    """A compiler that takes CPU seconds: for a guide the first time, for each later time, and for a token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: float, again: float, token: float) -> None:
        self.seconds = 0.0
        self.first, self.again, self.token = first, again, token
        monkeypatch.setattr(time, "process_time", lambda: self.seconds)

    def compile(self, guide: Guide, tokens: int = 1) -> None:
        self.seconds += self.first if not self.seconds else self.again + (tokens * self.token if tokens > 1 else 0)


@pytest.mark.parametrize(
    ("first", "again", "token", "problem"),
    [
        (9.0, 0.25, 0.09, None),
        (1e-300, 0.0, 0.1, None),
        (9.0, 0.26, 0.09, "0.26 seconds"),
        (9.0, 0.24, 0.11, "0.11 seconds"),
    ],
)
def test_what_would_stop_other_requests_is_refused(
    monkeypatch: pytest.MonkeyPatch, first: float, again: float, token: float, problem: str | None
) -> None:
    found = try_guide(Timed(monkeypatch, first, again, token), SLOW)  # type: ignore[arg-type]
    assert found.problem.endswith(problem or "") and bool(found.problem) == (problem is not None)


def test_the_program_tries_guides(tiny_stories: Path) -> None:
    cases = table(__file__, "guides_of_the_program")
    found: dict[int, str] = {}
    gate = GuideGate(
        guides.__name__,
        str(tiny_stories / "engine"),
        lambda request: found.update({request.request_id: ""}),
        lambda request, refusal: found.update({request.request_id: refusal.message.partition(": ")[2]}),
    )
    for number, (kind, text, _) in enumerate(cases):
        gate.hold(Submit(number, [5], Sampling(9), guide=Guide(GuideKind(kind), text)))
    while gate:
        gate.advance(1.0)
    gate.close()
    for number, (_, _, problem) in enumerate(cases):
        assert found[number].startswith(problem) and bool(found[number]) == bool(problem)


# -- what is generated -------------------------------------------------------------------------------------------------

PROMPT = "Once upon a time there was a little wolf"
END_ID = 2
TEXT = {"type": "string", "maxLength": 20}


def load(engine: Path) -> OpenVinoExecutor:
    return OpenVinoExecutor(**executor_options(engine, num_kv_blocks=200))


@pytest.fixture(scope="module")
def executor(tiny_stories: Path) -> Iterator[OpenVinoExecutor]:
    executor = load(tiny_stories / "engine")
    yield executor
    executor.close()


class Run:
    """Requests run together: their tokens and terminal deltas by number."""

    def __init__(self, executor: OpenVinoExecutor, tokenizer: Tokenizer) -> None:
        self.executor, self.tokenizer = executor, tokenizer
        self.prompt = tokenizer.encode(PROMPT)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Delta] = {}

    def submit(self, number: int, guide: Guide | None, tokens: int = 300, **sampling: Any) -> None:
        stops = [] if sampling.get("ignore_eos") else [END_ID]
        logprobs = sampling.pop("logprobs", False)
        self.executor.submit(
            Submit(number, self.prompt, Sampling(tokens, **sampling), stops, guide=guide, logprobs=logprobs)
        )

    def step(self) -> None:
        for delta in deltas_of(self.executor.step()):
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish:
                assert delta.request_id not in self.ends
                self.ends[delta.request_id] = delta

    def finish(self, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while self.executor.busy:
            assert time.monotonic() < deadline, "still busy"
            self.step()

    def text(self, number: int) -> str:
        return self.tokenizer.decode(self.tokens[number])


@pytest.fixture
def run(executor: OpenVinoExecutor, tokenizer: Tokenizer) -> Run:
    return Run(executor, tokenizer)


def schema(**described: Any) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(described))


def properties(required: list[str], **described: Any) -> Guide:
    return schema(type="object", properties=described, required=required)


class Order(pydantic.BaseModel):
    """What agents' frameworks send: bounds, patterns and formats."""

    class Item(pydantic.BaseModel):
        sku: str = pydantic.Field(pattern=r"^[A-Z]{2}-\d{3}$")
        count: int = pydantic.Field(ge=1, le=1000)

    id: uuid.UUID
    day: datetime.date
    price: float = pydantic.Field(gt=0, lt=99.5)
    items: list[Item] = pydantic.Field(min_length=1, max_length=2)
    rating: int | None = pydantic.Field(default=None, ge=-5, le=5)

    @classmethod
    def fits(cls, value: Any) -> bool:
        return bool(cls.model_validate(value))


ZOD = table(__file__, "zod")
"""The JSON schema that zod 4 makes of an object with integers, an email address, a date and a regular expression."""


def valid(schema: Any, value: Any) -> bool:
    jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    return True


SCHEMAS: dict[str, tuple[Guide, Callable[[Any], bool]]] = {
    "properties": (
        properties(["name", "age"], name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 99}),
        lambda value: list(value) == ["name", "age"] and len(value["name"]) <= 20 and 0 <= value["age"] <= 99,
    ),
    "optional": (
        properties(["b"], a={"type": "boolean"}, b={"type": "null"}, c={"type": "number"}),
        lambda value: "b" in value and value.keys() <= {"a", "b", "c"},
    ),
    "enum": (schema(enum=["wolf", 3, {"a": [1]}]), lambda value: value in ("wolf", 3, {"a": [1]})),
    "array": (
        schema(type="array", items={"enum": [1, 2]}, minItems=2, maxItems=4),
        lambda value: 2 <= len(value) <= 4 and set(value) <= {1, 2},
    ),
    "reference": (
        schema(**{"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"type": "null"}, {"const": "y"}]}}}),
        lambda value: value in (None, "y"),
    ),
    "pydantic": (Guide(GuideKind.JSON_SCHEMA, json.dumps(Order.model_json_schema()), strict=True), Order.fits),
    "zod": (Guide(GuideKind.JSON_SCHEMA, json.dumps(ZOD), strict=True), lambda value: valid(ZOD, value)),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_generated_is_json_of_the_schema(run: Run, name: str) -> None:
    guide, fits = SCHEMAS[name]
    run.submit(0, guide)
    run.submit(1, guide, logprobs=True)
    for seed in range(2, 8):
        run.submit(seed, guide, do_sample=True, seed=seed, temperature=1.5, logprobs=seed > 4)
    run.finish()
    assert {end.finish for end in run.ends.values()} == {FinishReason.STOP}
    assert all(fits(json.loads(run.text(number))) for number in range(8))
    assert run.tokens[0] == run.tokens[1], "log-probabilities change nothing"


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        (GuideKind.REGEX, "(yes|no|a{3,5})", "(yes|no|a{3,5})"),
        (GuideKind.GRAMMAR, 'root ::= "[" (root | "x") "]"', r"\[+x\]+"),
    ],
)
def test_what_is_generated_follows_an_expression_or_a_grammar(
    run: Run, kind: GuideKind, value: str, pattern: str
) -> None:
    for seed in range(6):
        run.submit(seed, Guide(kind, value), do_sample=seed > 0, seed=seed, tokens=100)
    run.finish()
    assert all(re.fullmatch(pattern, run.text(number)) for number in range(6)), run.tokens


def test_others_generate_the_same_beside_guides_good_and_bad(run: Run, executor: OpenVinoExecutor) -> None:
    alone = Run(executor, run.tokenizer)
    alone.submit(0, None, 60)
    alone.finish()
    run.submit(0, None, 60)
    for number, text in enumerate(("(", "(a|b){5}", "[z-a]", "beside.{3}"), 1):
        run.submit(number, Guide(GuideKind.REGEX, text))
    run.finish()
    assert run.tokens[0] == alone.tokens[0]
    assert sorted(number for number, end in run.ends.items() if isinstance(end.error, Refusal)) == [1, 3]


def test_a_large_schema_does_not_stop_the_others_while_it_compiles(run: Run) -> None:
    names = [f"property{number}" for number in range(400)]
    guide = properties(names, **{key: {"type": "string", "maxLength": 50, "minLength": 1} for key in names})
    run.submit(0, None, 500, ignore_eos=True)
    run.step()
    run.submit(1, guide, 5)
    while not run.tokens.get(1):
        assert run.executor.busy
        before = len(run.tokens.get(0, ()))
        run.step()
        assert 0 in run.ends or len(run.tokens.get(0, ())) > before, "every step gives the other one a token"
    run.finish()


def test_a_token_takes_as_long_whatever_the_longest_text_is(compiler: GuideCompiler) -> None:
    """It was 40 times as long where xgrammar keeps count, and all sequences wait for it."""

    def token_seconds(most: int) -> float:
        guide, _ = as_grammar(schema(type="string", maxLength=most))
        compiler.compile(guide)
        began = time.process_time()
        compiler.compile(guide, 32)
        return time.process_time() - began

    assert min(token_seconds(1000 + each) / token_seconds(100 + each) for each in range(3)) < 6


def test_a_guided_request_is_cancelled_before_and_after_it_runs(run: Run) -> None:
    guide = Guide(GuideKind.REGEX, "c{200}")
    run.submit(0, guide)
    run.executor.cancel(0)
    run.finish()
    run.submit(1, guide)
    while not run.tokens.get(1):
        run.step()
    run.executor.cancel(1)
    run.finish()
    assert [run.ends[number].finish for number in (0, 1)] == 2 * [FinishReason.CANCELLED]
    assert (run.tokens[0], run.ends[0].error) == ([], None)


@pytest.mark.slow
def test_no_wild_guide_ends_the_engine(run: Run, executor: OpenVinoExecutor) -> None:
    wild = table(__file__, "wild")
    for number, (kind, text) in enumerate(wild):
        run.submit(number, Guide(GuideKind(kind), text), 12, do_sample=number % 2 == 1, seed=number)
    run.finish()
    assert run.ends.keys() == set(range(len(wild)))
    after = Run(executor, run.tokenizer)
    after.submit(0, None, 5)
    after.submit(1, Guide(GuideKind.REGEX, "yes"), 5)
    after.finish()
    assert (after.ends[0].finish, after.text(1)) == (FinishReason.LENGTH, "yes")


@pytest.mark.slow
def test_no_random_guide_ends_the_engine(run: Run, executor: OpenVinoExecutor) -> None:
    """Pieces of the three languages in any order: most are invalid, some are not."""
    chance = random.Random(14)
    pieces = table(__file__, "pieces")
    kinds = [GuideKind.REGEX, GuideKind.GRAMMAR, GuideKind.JSON_SCHEMA]
    for number in range(150):
        kind = chance.choice(kinds)
        text = "".join(chance.choices(pieces, k=chance.randint(1, 12)))
        if kind is GuideKind.GRAMMAR and chance.random() < 0.7:
            text = "root ::= " + text
        run.submit(number, Guide(kind, text), 8, do_sample=chance.random() < 0.5, seed=number)
        if number % 8 == 7:
            run.finish()
    run.finish()
    assert run.ends.keys() == set(range(150))
    refused = [end for end in run.ends.values() if isinstance(end.error, Refusal)]
    assert 0 < len(refused) < 150
    assert all(end.error is None or isinstance(end.error, Refusal) for end in run.ends.values())


def test_an_engine_without_openvinos_tokenizer_has_no_guides(tiny_stories: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(tiny_stories / "engine", engine)
    assert load(engine).features == FEATURES | GUIDES
    for name in ("openvino_tokenizer", "openvino_detokenizer"):
        (engine / f"{name}.xml").rename(tmp_path / name)
        assert load(engine).features == FEATURES
        (tmp_path / name).rename(engine / f"{name}.xml")
