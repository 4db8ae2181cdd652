"""Tries guides with llguidance: `python -m djl_trtllm.backends.tensorrt_llm.llguidance_process FD TOKENIZER_DIR`.

As in TensorRT-LLM's `_torch/pyexecutor/grammar_matcher.py` (about 1.2), with the same package: a guide is compiled, and
the tokens that it begins with are computed. Without a tokenizer.json it is only parsed. A grammar is one of Lark.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from djl_trtllm.backends.tensorrt_llm.guide_trial import make_judge
from djl_trtllm.executor.guide_process import serve_judge
from djl_trtllm.request import Guide, GuideKind


class LlguidanceTrial:
    """`tokenizer` is the text of a tokenizer.json."""

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = None if tokenizer is None else LLTokenizer(tokenizer)

    def __call__(self, guide: Guide) -> str | None:
        problem = _reason(self._error(_grammar(guide)))
        if problem is not None and guide.kind is GuideKind.GRAMMAR:
            return f"{problem} (llguidance has Lark's grammars)"
        return problem

    def _error(self, grammar: Any) -> str:
        if self._tokenizer is None:
            return str(LLMatcher.validate_grammar(grammar))
        matcher = LLMatcher(self._tokenizer, grammar)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return str(matcher.get_error())


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
    """The error's last line; what it shows of the matcher's state and the grammar is left out."""
    lines = error.partition("<state>")[0].splitlines()
    return lines[-1].removeprefix("error: ") if lines else None


if __name__ == "__main__":
    serve_judge(partial(make_judge, LlguidanceTrial), sys.argv)
