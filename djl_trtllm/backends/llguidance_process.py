"""Tries guides with llguidance: `python -m djl_trtllm.backends.llguidance_process FD TOKENIZER_DIR`.

As in TensorRT-LLM's `_torch/pyexecutor/grammar_matcher.py` (about 1.2), with the same package, but the end token is the
tokenizer's, not the model's. llguidance compiles much of a guide only while output is produced, so two sample outputs
are produced here. Without a tokenizer.json a guide is only parsed. A grammar is one of Lark.
"""

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from djl_trtllm.backends.json_grammar import with_options
from djl_trtllm.executor.guides import Verdict, keywords_left_out, serve_trials, too_large, trial_with_tokenizer
from djl_trtllm.request import Guide, GuideKind

_TOKENS = 256
"""The most tokens of a sample output."""
_TOKENS_SECONDS = 2.0
"""Processor time in seconds for these tokens: some times as much as common guides take with a vocabulary of 126,000."""

Choice = Callable[[int, int], int]
"""Chooses the next token from a bit set of those allowed, given the one before (-1 at first)."""


class LlguidanceTrial:
    """`tokenizer` is the text of a tokenizer.json."""

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = None if tokenizer is None else LLTokenizer(tokenizer)

    def __call__(self, guide: Guide) -> Verdict:
        grammar = _grammar(with_options(guide))
        problem = self._problem(grammar)
        if problem is None:
            _, warnings = LLMatcher.validate_grammar_with_warnings(grammar)
            return keywords_left_out(warnings, strict=guide.strict)
        return Verdict(f"{problem} (llguidance has Lark's grammars)" if guide.kind is GuideKind.GRAMMAR else problem)

    def _problem(self, grammar: Any) -> str | None:
        if self._tokenizer is None:
            return _reason(LLMatcher.validate_grammar(grammar))
        began = time.process_time()
        matcher = LLMatcher(self._tokenizer, grammar)
        problem = _reason(matcher.get_error()) or too_large(began)
        for choose in (_repeat, _choose_at_random):
            matcher.reset()
            problem = problem or _problem_of_output(matcher, self._tokenizer.eos_token, choose)
        return problem


def _problem_of_output(matcher: Any, end: int, choose: Choice) -> str | None:
    """Why the guide fails on the output that `choose` makes; None if it does not."""
    token, began = -1, time.process_time()
    for number in range(_TOKENS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ~(1 << end)
        if matcher.is_error() or not allowed:
            break
        token = choose(allowed, token)
        matcher.consume_token(token)
        if time.process_time() - began > _TOKENS_SECONDS:
            return f"it is too slow: the first {number + 1} tokens of an output take more than {_TOKENS_SECONDS:g} s"
        if matcher.is_error() or matcher.is_stopped():
            break
    return _reason(matcher.get_error())


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _repeat(allowed: int, before: int) -> int:
    """Choose the token before again, as long as it is allowed."""
    return before if before >= 0 and allowed >> before & 1 else _lowest(allowed)


def _choose_at_random(allowed: int, before: int) -> int:
    """Choose another token after each token before; the choices are the same in each trial of a guide."""
    skipped = random.Random(before).randrange(allowed.bit_length())  # noqa: S311  no secret
    return skipped + _lowest(allowed >> skipped)


def _grammar(guide: Guide) -> Any:
    match guide.kind:
        case GuideKind.REGEX:
            return LLMatcher.grammar_from_regex(guide.value)
        case GuideKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(guide.value)
        case _:
            return LLMatcher.grammar_from_json_schema(guide.value)


def _reason(error: str) -> str | None:
    """Return the package's error without the matcher's state and the stack of a panic; None if there is none."""
    if not error:
        return None
    if error.startswith("NoExtensionBias"):
        return "no text matches it, or none from a certain point on"
    if error.startswith("panic: "):
        return f"it is too large for llguidance ({error.splitlines()[0]})"
    lines = error.partition("\n<state>\n")[0].split("\n")
    return lines[-1].removeprefix("error: ").strip() or error


if __name__ == "__main__":
    serve_trials(partial(trial_with_tokenizer, LlguidanceTrial), sys.argv)
