"""The OpenVINO compiler: `python -m djl_trtllm.backends.openvino.compile SPEC.json`.

Runs in a process of its own, so that torch never enters the server and its memory is free when the engine is done.
Nothing else imports this module. Checkpoint in, engine directory out: model IR, OpenVINO tokenizer and detokenizer, and
byte-identical copies of the checkpoint's configuration and tokenizer files. The manifest is the parent's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from djl_trtllm.backends.openvino.compiler import OpenVinoSpec
from djl_trtllm.backends.openvino.engine_files import MODEL_XML, NoAttentionError, require_attention
from djl_trtllm.backends.openvino.loading_report import IncompleteCheckpointError, complete_weights
from djl_trtllm.backends.openvino.stored_formats import StoredFormatError, require_loader
from djl_trtllm.engines.identity import copy_identity_files
from djl_trtllm.engines.parent_watchdog import die_with_parent
from djl_trtllm.engines.spec import report_phase

_TASK = "text-generation-with-past"
_GROUP_SIZE = 128


def main(argv: list[str]) -> int:
    """Compile what the spec file says; 0 when the engine directory is complete."""
    die_with_parent()
    try:
        compile_engine(OpenVinoSpec.load(Path(argv[1])))
    except (IncompleteCheckpointError, NoAttentionError, StoredFormatError) as error:
        print(error, flush=True)  # without a traceback: the program is not wrong
        return 1
    return 0


def compile_engine(spec: OpenVinoSpec) -> None:
    """Write the whole engine directory, except its manifest."""
    out = Path(spec.out)
    require_loader(Path(spec.checkpoint))
    export(spec, out)
    require_attention(out / MODEL_XML)
    if spec.quantize != "none":
        report_phase("compress")
        compress(out / MODEL_XML, spec.quantize)
    report_phase("tokenizer")
    convert_tokenizer(spec, out)
    report_phase("save")
    copy_identity_files(Path(spec.checkpoint), Path(spec.tokenizer_dir), out)


def export(spec: OpenVinoSpec, out: Path) -> None:
    """Checkpoint to stateful IR, weights in `spec.dtype`, nothing quantized."""
    report_phase("load")
    import torch
    from optimum.exporters.openvino import convert, main_export
    from optimum.intel import OVConfig

    # main_export loads and converts in one call, and looks this function up when loading is done.
    original = convert.export_from_model

    def announced(*args: Any, **kwargs: Any) -> Any:
        report_phase("convert")
        return original(*args, **kwargs)

    convert.export_from_model = announced
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[spec.dtype]
    try:
        with complete_weights():
            main_export(
                spec.checkpoint,
                out,
                task=_TASK,
                stateful=True,
                library_name="transformers",
                trust_remote_code=spec.trust_remote_code,
                local_files_only=True,
                model_loading_kwargs={"torch_dtype": dtype},
                # Without a configuration, optimum quantizes models of a billion parameters and more to int8 unasked.
                # fp32 saves the graph as it was traced: the weights in `dtype`, as they were loaded. With fp16 every
                # other constant is rounded as well, rotary frequencies among them, and attention drifts with the
                # position.
                ov_config=OVConfig(dtype="fp32"),
            )
    finally:
        convert.export_from_model = original


def compress(xml: Path, quantize: str) -> None:
    """Compress an IR's weights in place: int8 (per channel), int4 or awq (groups of 128, embeddings and head int8)."""
    import nncf
    import openvino

    options: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT8_ASYM}
    if quantize in ("int4", "awq"):
        options = {
            "mode": nncf.CompressWeightsMode.INT4_ASYM,
            "group_size": _GROUP_SIZE,
            "ratio": 1.0,
            # Without a dataset NNCF's AWQ scales by the weights' magnitudes instead of activations.
            "awq": quantize == "awq",
            # Small models have channels that 128 does not divide.
            "advanced_parameters": nncf.AdvancedCompressionParameters(
                group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST
            ),
        }
    model = nncf.compress_weights(openvino.Core().read_model(xml), **options)
    compressed = xml.with_name(f"compressed_{xml.name}")
    openvino.save_model(model, compressed, compress_to_fp16=False)
    # The IR's weights are memory-mapped until the model is gone.
    del model
    compressed.with_suffix(".bin").replace(xml.with_suffix(".bin"))
    compressed.replace(xml)


def convert_tokenizer(spec: OpenVinoSpec, out: Path) -> None:
    """Write `openvino_tokenizer` and `openvino_detokenizer`; a tokenizer that cannot be converted is a warning."""
    from optimum.exporters.openvino.convert import export_tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        spec.tokenizer_dir, trust_remote_code=spec.trust_remote_code, local_files_only=True
    )
    tokenizer.save_pretrained(out)
    export_tokenizer(tokenizer, out, task=_TASK)
    if not (out / "openvino_tokenizer.xml").exists():
        print(
            f"warning: {type(tokenizer).__name__} has no OpenVINO counterpart: the engine generates, structured output "
            "is not available with it",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
