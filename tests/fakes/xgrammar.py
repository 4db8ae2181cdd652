"""As much of xgrammar as TensorRT-LLM and this server use, with its texts (0.1.25 was run)."""

from __future__ import annotations

import json
import re
from typing import Any


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
