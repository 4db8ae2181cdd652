"""TensorRT-LLM's configuration classes of speculation, with the fields that a `Speculation` becomes."""

import re
from typing import Any

import msgspec

from djl_trtllm.config import Backend
from djl_trtllm.config.speculation import Method, Speculation

_CLASSES = {
    Method.DRAFT: "DraftTargetDecodingConfig",
    Method.NGRAM: "NGramDecodingConfig",
    Method.EAGLE3: "EagleDecodingConfig",
    Method.EAGLE: "EagleDecodingConfig",
    Method.MTP: "MTPDecodingConfig",
    Method.MEDUSA: "MedusaDecodingConfig",
    Method.LOOKAHEAD: "LookaheadDecodingConfig",
}
SPECULATES = {
    Backend.TENSORRT: (Method.MEDUSA, Method.EAGLE, Method.LOOKAHEAD),
    Backend.PYTORCH: (Method.DRAFT, Method.NGRAM, Method.EAGLE3, Method.EAGLE, Method.MTP),
    Backend.AUTODEPLOY: (),
}
"""The methods of each backend (`supports_backend` of the classes, 1.0 to 1.3)."""
_MATCHED_NGRAM = 3


def speculative_object(asked: Speculation, draft: str | None, problems: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the class of the method and its fields; adds to `problems`. `draft` is the draft model's directory."""
    method = asked.method if isinstance(asked.method, Method) else Method.DRAFT
    ngrams = method is Method.NGRAM
    values = {
        "num_nextn_predict_layers" if method is Method.MTP else "max_draft_len": asked.tokens,
        "speculative_model_dir": draft,
        "max_matching_ngram_size" if ngrams else "max_ngram_size": asked.ngram or (_MATCHED_NGRAM if ngrams else None),
        "max_window_size": asked.window,
        "max_verification_set_size": asked.verification,
        f"{method}_choices": _tree(asked.tree, asked.setting, problems),
        **asked.extra,
    }
    if method is Method.LOOKAHEAD:
        del values["max_draft_len"]  # it follows from the others
    return _CLASSES[method], {name: value for name, value in values.items() if value is not None}


def _tree(tree: Any, setting: str, problems: list[str]) -> list[list[int]] | None:
    """Read the choices of a tree, as Triton's text `{0}, {0,0}` or as lists."""
    if tree is None:
        return None
    text = re.sub(r"\s", "", str(tree)).replace("{", "[").replace("}", "]")
    try:
        return msgspec.json.decode(text if text.startswith("[[") else f"[{text}]", type=list[list[int]])
    except msgspec.DecodeError:
        problems.append(f"{setting}: expected paths of a tree such as {{0}}, {{0,0}}, not {tree!r}")
        return None
