"""Guided decoding on the bundled engine: what is generated follows the guide, and no guide harms another request."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.openvino.executor import OpenVinoExecutor
from djl_trtllm.backends.openvino.sampling import FEATURES, GUIDES
from djl_trtllm.executor.protocol import Delta, Refusal, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, Guide, GuideKind, Sampling

PROMPT = "Once upon a time there was a little wolf"
END_ID = 2
TEXT = {"type": "string", "maxLength": 20}


def load(engine: Path) -> OpenVinoExecutor:
    return OpenVinoExecutor(
        engine_dir=str(engine),
        max_num_batched_tokens=64,
        num_kv_blocks=200,
        enable_prefix_caching=False,
        kv_cache_precision="f16",
        inference_precision="f32",
        max_sequences=8,
        max_seq_len=1024,
    )


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
        for delta in self.executor.step():
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
    # Left to xgrammar.
    "pattern": (schema(type="string", pattern="^[ab]{2,4}$"), lambda value: bool(re.fullmatch("[ab]{2,4}", value))),
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


def test_any_object_is_generated(run: Run) -> None:
    for seed in range(8):
        run.submit(seed, Guide(GuideKind.JSON_OBJECT), do_sample=True, seed=seed, temperature=1.5)
    run.finish()
    complete = [number for number, end in run.ends.items() if end.finish is FinishReason.STOP]
    assert complete
    assert all(type(json.loads(run.text(number))) is dict for number in complete)


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
    assert {number: isinstance(end.error, Refusal) for number, end in run.ends.items()} == {
        0: False,
        1: True,
        2: False,
        3: True,
        4: False,
    }


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


WILD = [
    Guide(GuideKind.REGEX, "(" * 30_000 + "a" + ")" * 30_000),
    Guide(GuideKind.REGEX, "(" * 200 + "a" + ")" * 200),
    Guide(GuideKind.REGEX, "a\0b"),
    Guide(GuideKind.REGEX, "a{1,99999999999}"),
    Guide(GuideKind.GRAMMAR, "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    Guide(GuideKind.GRAMMAR, "root ::= x\nx ::= y\ny ::= x"),
    Guide(GuideKind.GRAMMAR, 'root ::= (""*)*'),
    Guide(GuideKind.GRAMMAR, 'root ::= root root | "a"'),
    Guide(GuideKind.GRAMMAR, 'root ::= "\\xff\\xfe"'),
    Guide(GuideKind.JSON_SCHEMA, '{"$ref":"#"}'),
    Guide(GuideKind.JSON_SCHEMA, '{"$ref":"#/nothing"}'),
    Guide(GuideKind.JSON_SCHEMA, '{"type":"string","maxLength":100000}'),
    Guide(GuideKind.JSON_SCHEMA, "not JSON"),
]


def test_no_wild_guide_ends_the_engine(run: Run, executor: OpenVinoExecutor) -> None:
    for number, guide in enumerate(WILD):
        run.submit(number, guide, 12, do_sample=number % 2 == 1, seed=number)
    run.finish()
    assert run.ends.keys() == set(range(len(WILD)))
    after = Run(executor, run.tokenizer)
    after.submit(0, None, 5)
    after.submit(1, Guide(GuideKind.REGEX, "yes"), 5)
    after.finish()
    assert (after.ends[0].finish, after.text(1)) == (FinishReason.LENGTH, "yes")


def test_no_random_guide_ends_the_engine(run: Run, executor: OpenVinoExecutor) -> None:
    """Pieces of the three languages in any order: most are invalid, some are not."""
    chance = random.Random(14)
    pieces = [
        "root ::= ",
        '"a"',
        "(",
        ")",
        "[a-z]",
        "[^",
        "]",
        "*",
        "+",
        "?",
        "{1,3}",
        "{",
        "}",
        "|",
        "\n",
        "x",
        "::=",
        "\\",
    ]
    pieces += [
        '{"type":',
        '"object"',
        '"properties":{',
        '"$ref":"#"',
        "true",
        "1e999",
        ",",
        ":",
        "é",
        "\x00",
        ".",
        "^",
        "$",
    ]
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
