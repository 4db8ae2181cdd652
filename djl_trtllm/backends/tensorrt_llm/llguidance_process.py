"""Tries guides with llguidance: `python -m djl_trtllm.backends.tensorrt_llm.llguidance_process FD TOKENIZER_DIR`.

As in TensorRT-LLM's `_torch/pyexecutor/grammar_matcher.py` (about 1.2), with the same package, but without the model's
own end token. Much of a guide is compiled only as far as the output has come: tokens that it allows are tried, which is
a sample. Without a tokenizer.json a guide is only parsed. A grammar is one of Lark.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from djl_trtllm.backends.tensorrt_llm.guide_trial import make_judge
from djl_trtllm.executor.guide_process import serve_judge
from djl_trtllm.request import Guide, GuideKind

_TOKENS = 256
"""Of each output that is tried."""
_TOKENS_SECONDS = 2.0
"""Processor time for them; with a vocabulary of 126,000 common ones take up to 1.3 ms each."""

Choice = Callable[[int, int], int]
"""Chooses the next token: of a number with a bit for each that is allowed, and the one before (-1 at first)."""


class LlguidanceTrial:
    """`tokenizer` is the text of a tokenizer.json."""

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = None if tokenizer is None else LLTokenizer(tokenizer)

    def __call__(self, guide: Guide) -> str | None:
        grammar = _grammar(guide)
        if self._tokenizer is None:
            problem = _reason(LLMatcher.validate_grammar(grammar))
        else:
            chance = random.Random(1)  # noqa: S311  # the same for each guide
            problem = _problem_of_output(self._tokenizer, grammar, _repeated)
            problem = problem or _problem_of_output(self._tokenizer, grammar, _at_random(chance))
        if problem is not None and guide.kind is GuideKind.GRAMMAR:
            return f"{problem} (llguidance has Lark's grammars)"
        return problem


def _problem_of_output(tokenizer: Any, grammar: Any, choose: Choice) -> str | None:
    """What is wrong with the output that these choices make; None if nothing is."""
    matcher = LLMatcher(tokenizer, grammar)
    token, began = -1, time.process_time()
    for number in range(_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ~(1 << tokenizer.eos_token)
        if matcher.is_error() or not allowed:
            break
        token = choose(allowed, token)
        matcher.consume_token(token)
        if time.process_time() - began > _TOKENS_SECONDS:
            return f"it is too ambiguous: {number + 1} tokens of its output take more than {_TOKENS_SECONDS:g} s"
    return _reason(matcher.get_error())


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _repeated(allowed: int, before: int) -> int:
    """The same token again, as long as it is allowed."""
    return before if before >= 0 and allowed >> before & 1 else _lowest(allowed)


def _at_random(chance: random.Random) -> Choice:
    def choose(allowed: int, _: int) -> int:
        skipped = chance.randrange(allowed.bit_length())
        return skipped + _lowest(allowed >> skipped)

    return choose


def _grammar(guide: Guide) -> Any:
    match guide.kind:
        case GuideKind.REGEX:
            return LLMatcher.grammar_from_regex(guide.value)
        case GuideKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(guide.value)
        case GuideKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        case _:
            return LLMatcher.grammar_from_json_schema(guide.value)


def _reason(error: str) -> str | None:
    """What the package says, without its state or stack; None if it says nothing."""
    if not error:
        return None
    if error.startswith("NoExtensionBias"):
        return "no text matches it, or none from a certain point on"
    if error.startswith("panic: "):
        return f"it is too large for llguidance ({error.splitlines()[0]})"
    lines = error.partition("\n<state>\n")[0].split("\n")
    return lines[-1].removeprefix("error: ").strip() or error


if __name__ == "__main__":
    serve_judge(partial(make_judge, LlguidanceTrial), sys.argv)
