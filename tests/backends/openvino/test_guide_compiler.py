from __future__ import annotations

import time
from pathlib import Path

import pytest
from openvino_genai import Tokenizer

from djl_trtllm.backends.openvino.guide_compiler import GuideCompiler, read_vocabulary, structured_output
from djl_trtllm.request import Guide, GuideKind

SLOW = Guide(GuideKind.REGEX, "(" + "|".join(f"word{number}.*x" for number in range(600)) + ")")


@pytest.fixture(scope="module")
def compiler(tiny_stories: Path) -> GuideCompiler:
    engine = tiny_stories / "engine"
    vocabulary = read_vocabulary(engine)
    assert vocabulary == 2048
    return GuideCompiler(Tokenizer(str(engine)), vocabulary)


@pytest.mark.parametrize(
    ("guide", "argument"),
    [
        (Guide(GuideKind.REGEX, "a"), "regex"),
        (Guide(GuideKind.GRAMMAR, 'root ::= "a"'), "grammar"),
        (Guide(GuideKind.JSON_OBJECT), "grammar"),
        (Guide(GuideKind.JSON_SCHEMA, '{"type":"integer"}'), "grammar"),
        (Guide(GuideKind.JSON_SCHEMA, '{"type":"string","format":"date"}'), "json_schema"),
    ],
)
def test_a_guide_is_one_argument(guide: Guide, argument: str) -> None:
    config = structured_output(guide)
    given = {name for name in ("json_schema", "regex", "grammar") if getattr(config, name) is not None}
    assert given == {argument}
    if guide.value and argument != "grammar":
        assert getattr(config, argument) == guide.value


def test_an_invalid_guide_raises_and_the_next_one_compiles(compiler: GuideCompiler) -> None:
    for tokens in (1, 8):
        with pytest.raises(RuntimeError, match="not closed"):
            compiler.compile(Guide(GuideKind.REGEX, "("), tokens)
        compiler.compile(Guide(GuideKind.REGEX, "(a|b)*"), tokens)


def test_a_guide_is_compiled_once_until_it_is_forgotten(compiler: GuideCompiler) -> None:
    def seconds() -> float:
        began = time.process_time()
        compiler.compile(SLOW)
        return time.process_time() - began

    first, second = seconds(), seconds()
    assert second < first / 2
    compiler.forget()
    assert seconds() > 2 * second
