"""Tries guides with xgrammar: `python -m djl_trtllm.backends.tensorrt_llm.xgrammar_process FD TOKENIZER_DIR`.

As in TensorRT-LLM's `_torch/pyexecutor/grammar_matcher.py` (about 1.2), with the same package. Without a tokenizer.json
a guide is parsed and not compiled.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import xgrammar

from djl_trtllm.backends.tensorrt_llm.guide_trial import make_judge, too_large
from djl_trtllm.executor.guide_process import reason_of, serve_judge
from djl_trtllm.request import Guide, GuideKind


class XgrammarTrial:
    """`tokenizer` is the text of a tokenizer.json."""

    def __init__(self, tokenizer: str | None) -> None:
        self._compiler = None if tokenizer is None else _compiler(tokenizer)

    def __call__(self, guide: Guide) -> str | None:
        began = time.process_time()
        try:
            grammar = _grammar(guide)
            if self._compiler is not None:
                self._compiler.compile_grammar(grammar)
        except (RuntimeError, ValueError) as error:
            return reason_of(str(error))
        return too_large(began)


def _grammar(guide: Guide) -> Any:
    match guide.kind:
        case GuideKind.REGEX:
            return xgrammar.Grammar.from_regex(guide.value)
        case GuideKind.GRAMMAR:
            return xgrammar.Grammar.from_ebnf(guide.value)
        case GuideKind.JSON_OBJECT:
            return xgrammar.Grammar.builtin_json_grammar()
        case _:
            return xgrammar.Grammar.from_json_schema(guide.value)


def _compiler(tokenizer: str) -> Any:
    vocabulary = _vocabulary(json.loads(tokenizer))
    metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer)
    info = xgrammar.TokenizerInfo(
        vocabulary, vocab_type=metadata["vocab_type"], add_prefix_space=metadata["add_prefix_space"]
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _vocabulary(tokenizer: dict[str, Any]) -> list[str]:
    """The tokens by their ids; unused ids are empty. Unigram models list their tokens, the others map them to ids."""
    vocabulary = tokenizer["model"]["vocab"]
    tokens = {id_: token for id_, (token, _) in enumerate(vocabulary)} if isinstance(vocabulary, list) else {}
    tokens |= {id_: token for token, id_ in vocabulary.items()} if isinstance(vocabulary, dict) else {}
    tokens |= {added["id"]: added["content"] for added in tokenizer.get("added_tokens") or ()}
    return [tokens.get(id_, "") for id_ in range(max(tokens) + 1)]


if __name__ == "__main__":
    serve_judge(partial(make_judge, XgrammarTrial), sys.argv)
