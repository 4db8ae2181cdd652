"""Guides, of which the decoder makes matchers in the iteration that computes a request's prompt."""

from __future__ import annotations

from typing import Any

import xgrammar
from llguidance import LLMatcher


def problem_of(params: Any, package: str) -> str | None:
    """Why no matcher can be made of a request's guide (grammar_matcher.py); None if one can, or without a guide."""
    kind, text = (params.guided_decoding and params.guided_decoding._kind()) or ("", "")
    if package == "llguidance":
        problem = _problem_for_llguidance(kind, text)
        return f"LLGuidance matcher error: {problem}" if problem else None
    try:
        match kind:
            case "JSON_SCHEMA":
                xgrammar.Grammar.from_json_schema(text)
            case "REGEX":
                xgrammar.Grammar.from_regex(text)
            case "EBNF_GRAMMAR":
                xgrammar.Grammar.from_ebnf(text)
    except RuntimeError as error:
        return str(error)
    return None


def _problem_for_llguidance(kind: str, text: str) -> str:
    """The package itself, without the model's tokens. EBNF_GRAMMAR is one of Lark."""
    match kind:
        case "JSON_SCHEMA":
            grammar = LLMatcher.grammar_from_json_schema(text)
        case "REGEX":
            grammar = LLMatcher.grammar_from_regex(text)
        case "EBNF_GRAMMAR":
            grammar = LLMatcher.grammar_from_lark(text)
        case _:
            return ""
    return str(LLMatcher.validate_grammar(grammar))
