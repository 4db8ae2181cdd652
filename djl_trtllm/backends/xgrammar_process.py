"""Tries guides with xgrammar: `python -m djl_trtllm.backends.xgrammar_process FD TOKENIZER_DIR`.

As in TensorRT-LLM's `_torch/pyexecutor/grammar_matcher.py` (about 1.2), with the same package. Without a tokenizer.json
a guide is parsed and not compiled.
"""

import json
import sys
import time
from functools import partial
from typing import Any

import xgrammar

from djl_trtllm.backends.json_grammar import SchemaError, as_grammar
from djl_trtllm.executor.guides import (
    Verdict,
    keywords_left_out,
    reason_of,
    serve_trials,
    too_large,
    trial_with_tokenizer,
)
from djl_trtllm.request import Guide, GuideKind

_READERS = {
    GuideKind.REGEX: xgrammar.Grammar.from_regex,
    GuideKind.GRAMMAR: xgrammar.Grammar.from_ebnf,
    GuideKind.STRUCTURAL_TAG: xgrammar.Grammar.from_structural_tag,
}


class XgrammarTrial:
    """`tokenizer` is the text of a tokenizer.json."""

    def __init__(self, tokenizer: str | None) -> None:
        self._compiler = None if tokenizer is None else _compiler(tokenizer)

    def __call__(self, guide: Guide) -> Verdict:
        began = time.process_time()
        try:
            guide, not_followed = as_grammar(guide)
            if guide.kind is GuideKind.STRUCTURAL_TAG and self._compiler is not None:
                self._compiler.compile_structural_tag(guide.value)  # it may have tokens, which a grammar has not
            else:
                grammar = _READERS[guide.kind](guide.value)
                if self._compiler is not None:
                    self._compiler.compile_grammar(grammar)
        except SchemaError as error:
            return Verdict(str(error))
        except (RuntimeError, ValueError) as error:
            return Verdict(reason_of(str(error)))
        if problem := too_large(began):
            return Verdict(problem)
        return keywords_left_out(not_followed, strict=guide.strict)


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
    serve_trials(partial(trial_with_tokenizer, XgrammarTrial), sys.argv)
