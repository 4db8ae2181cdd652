"""Quantised checkpoints that transformers loads only with a further package: refused before it fails inside that.

Found in transformers 5.0's `quantizers/quantizer_*.py` (`validate_environment`). Without gptqmodel, GPTQ ends in a
NameError of optimum before that check.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from djl_trtllm.errors import LayoutError
from djl_trtllm.model.json_file import read_object
from djl_trtllm.model.quantization import hugging_face_quantization

MARK = "the weights are quantised with "
"""How the line starts that the compiler prints and its parent recognises."""

_PACKAGES = {
    "awq": "gptqmodel",
    "gptq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
}


class StoredFormatError(Exception):
    """The weights have a format that cannot be loaded here."""


def require_loader(checkpoint: Path) -> None:
    """Raise StoredFormatError if the package that loads the checkpoint's weights is not installed."""
    config = read_object(checkpoint / "config.json", LayoutError) or {}
    method = str(hugging_face_quantization(checkpoint, config).get("quant_method"))
    package = _PACKAGES.get(method)
    if package is not None and find_spec(package) is None:
        raise StoredFormatError(
            f"{MARK}{method} (quantization_config in {checkpoint / 'config.json'}): transformers loads them with "
            f"{package}, which is not installed here"
        )
