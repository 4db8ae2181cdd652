"""As much of xgrammar as TensorRT-LLM and this server use, with its texts (0.1.25 was run)."""

from __future__ import annotations

import json
import re
from typing import Any

_INVALID_TAG = "Invalid structural tag error"


class Grammar:
    @staticmethod
    def from_regex(regex: str) -> Grammar:
        try:
            re.compile(regex)
        except re.error as error:
            text = f"Regex parsing error at position {error.pos}: {error.msg}"
            raise RuntimeError(f"[00:00:00] /project/cpp/regex_converter.cc:75: {text}\n") from error
        return Grammar()

    @staticmethod
    def from_ebnf(ebnf: str) -> Grammar:
        if not re.search(r"^\s*root\s*::=", ebnf, re.MULTILINE):
            text = 'EBNF parser error at line 1, column 1: The root rule with name "root" is not found'
            raise RuntimeError(f"[00:00:00] /project/cpp/grammar_parser.cc:550: {text}\n")
        return Grammar()

    @staticmethod
    def from_structural_tag(structural_tag: str) -> Grammar:
        if "format" not in json.loads(structural_tag):
            raise RuntimeError(f"{_INVALID_TAG}: Structural tag must have a format field")
        return Grammar()


class TokenizerInfo:
    def __init__(self, encoded_vocab: list[str], *, vocab_type: Any, add_prefix_space: bool) -> None:
        assert all(isinstance(token, str) for token in encoded_vocab)

    @staticmethod
    def _detect_metadata_from_hf(backend_str: str) -> dict[str, Any]:
        json.loads(backend_str)
        return {"vocab_type": 2, "add_prefix_space": False}


class GrammarCompiler:
    def __init__(self, tokenizer_info: TokenizerInfo, *, max_threads: int, cache_enabled: bool) -> None:
        assert isinstance(tokenizer_info, TokenizerInfo)

    def compile_grammar(self, grammar: Grammar) -> object:
        assert isinstance(grammar, Grammar)
        return object()

    def compile_structural_tag(self, structural_tag: str) -> object:
        try:
            return self.compile_grammar(Grammar.from_structural_tag(structural_tag))
        except RuntimeError as error:
            failed = "Check failed: (std::holds_alternative<Grammar>(result)) is false"
            raise RuntimeError(f"[00:00:00] /project/cpp/grammar_compiler.cc:829: {failed}: {error}\n") from error
