"""What the compiler of OpenVINO is asked for."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.backends.openvino.compiler import OpenVinoSpec


def spec_of(checkpoint: Path, out: Path) -> OpenVinoSpec:
    """A checkpoint as it is, in FP16."""
    return OpenVinoSpec(
        checkpoint=str(checkpoint),
        tokenizer_dir=str(checkpoint),
        out=str(out),
        dtype="fp16",
        quantize="none",
        trust_remote_code=False,
    )
