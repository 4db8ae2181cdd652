"""Guides, of which the decoder makes matchers in the iteration that computes a request's prompt."""

from __future__ import annotations

from typing import Any

import xgrammar


def problem_of(params: Any) -> str | None:
    """Why no matcher can be made of a request's guide (grammar_matcher.py); None if one can, or without a guide."""
    kind, text = (params.guided_decoding and params.guided_decoding._kind()) or ("", "")
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
