"""The OpenVINO compiler: `python -m djl_trtllm.backends.openvino.compile SPEC.json`.

It runs in a process of its own, so that torch never enters the server and its memory is free when the engine is done.
Checkpoint in, engine directory out: model IR, OpenVINO tokenizer and detokenizer, and byte-identical copies of the
checkpoint's configuration and tokenizer files. The manifest is the parent's. The server takes from here what it starts
the compiler with (`COMPILER`) and how it checks the compiler's output.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from djl_trtllm.config import Task
from djl_trtllm.engines.cache import Manifest, raise_damaged
from djl_trtllm.engines.compiler import (
    DISK,
    HOST_MEMORY,
    Compiler,
    CompileSpec,
    die_with_parent,
    read_causes,
    report_phase,
)
from djl_trtllm.engines.plan import copy_identity_files
from djl_trtllm.errors import LayoutError
from djl_trtllm.model.checkpoint import hugging_face_quantization, read_object
from djl_trtllm.model.pooling import copy_head

MODEL_XML = "openvino_model.xml"
LANGUAGE_MODEL_XML = "openvino_language_model.xml"
"""The file in place of `MODEL_XML` where the model takes images."""
_PARTS = "openvino_*model.xml"
TOKENIZER_XML = "openvino_tokenizer.xml"
DETOKENIZER_XML = "openvino_detokenizer.xml"
_CONSTANT = re.compile(rb'<data [^>]*?\boffset="(\d+)"[^>]*?\bsize="(\d+)"')

NO_ATTENTION = "OpenVINO's continuous batching cannot run this architecture"
"""The beginning of the message about a model without attention layers: only their KV cache can be paged."""
_QUANTISED = "the weights are quantised with "
"""The beginning of the message about a checkpoint whose loader is not installed."""
_LOADERS = {
    "awq": "gptqmodel",
    "gptq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
}
"""Packages that transformers needs for quantised checkpoints. Found in transformers 5.0's `quantizers/quantizer_*.py`
(`validate_environment`). Without gptqmodel, GPTQ ends in a NameError of optimum before that check."""

_WITH_IMAGES = "image-text-to-text"
_EXPORTS = {"generate": "text-generation-with-past", "embed": "feature-extraction", "score": "text-classification"}
"""Optimum's names of tasks."""
_GROUP_SIZE = 128


class OpenVinoSpec(CompileSpec, frozen=True, kw_only=True):
    """`dtype` is fp32, fp16 or bf16, the type of weights that are not quantised; `quantize` none, int8, int4 or awq.

    `images`: whether the model is compiled with the parts that read images. `purpose` is what it is for, see `Task`.
    """

    dtype: str
    quantize: str
    trust_remote_code: bool
    images: bool = False
    purpose: str = Task.GENERATE.value

    @property
    def task(self) -> str:
        """The task by which optimum exports the model."""
        return _WITH_IMAGES if self.images else _EXPORTS[self.purpose]


COMPILER = Compiler(
    module="djl_trtllm.backends.openvino.compile",
    packages=("torch", "openvino", "openvino-tokenizers", "optimum-intel", "nncf"),
    install="pip install 'djl-trtllm[compile]'",
    phases=("load", "convert", "compress", "tokenizer", "save"),
    causes=(HOST_MEMORY, DISK, *read_causes(__package__)),
)

# -- the compiler's output ---------------------------------------------------------------------------------------------


def has_tokenizer(directory: Path) -> bool:
    """Return whether an engine has the tokenizer that guides are compiled for."""
    return all((directory / name).is_file() for name in (TOKENIZER_XML, DETOKENIZER_XML))


def check_engine(directory: Path) -> Manifest | None:
    """Check an engine directory without loading it, and return its manifest, if it has one.

    Compares sizes with the manifest, and the IR with its weights file, so that a truncated engine fails here and not
    inside the runtime. Raises EngineMismatchError naming each bad file.
    """
    manifest = Manifest.read(directory)
    if manifest is not None:
        manifest.require_whole(directory)
    parts = sorted(directory.glob(_PARTS)) or [directory / MODEL_XML]
    raise_damaged(directory, [problem for part in parts for problem in ir_problems(part)])
    return manifest


def takes_images(directory: Path) -> bool:
    """Return whether an engine is compiled with the parts that read images."""
    return (directory / LANGUAGE_MODEL_XML).is_file()


def ir_problems(xml: Path) -> list[str]:
    """The defects of an OpenVINO IR (an `.xml` and the `.bin` beside it), one line each."""
    try:
        content = xml.read_bytes()
    except FileNotFoundError:
        return [f"{xml.name}: missing"]
    except OSError as error:
        return [f"{xml.name}: cannot be read ({error})"]
    if not content.lstrip().startswith(b"<") or not content.rstrip().endswith(b"</net>"):
        return [f"{xml.name}: not a complete OpenVINO model, {len(content)} bytes that do not end in </net>"]
    weights = xml.with_suffix(".bin")
    try:
        size = weights.stat().st_size
    except OSError as error:
        return [f"{weights.name}: missing" if isinstance(error, FileNotFoundError) else f"{weights.name}: {error}"]
    needed = max((int(match[1]) + int(match[2]) for match in _CONSTANT.finditer(content)), default=1)
    if size < needed:
        return [f"{weights.name}: truncated, {size} bytes where {xml.name} refers to {needed}"]
    return []


# -- the compiler's process --------------------------------------------------------------------------------------------


class UnusableCheckpointError(Exception):
    """The checkpoint compiles into nothing that runs here, for a reason that needs no traceback."""


def main(argv: list[str]) -> int:
    """Compile what the spec file says; 0 when the engine directory is complete."""
    die_with_parent()
    try:
        compile_engine(OpenVinoSpec.load(Path(argv[1])))
    except UnusableCheckpointError as error:
        print(error, flush=True)
        return 1
    return 0


def compile_engine(spec: OpenVinoSpec) -> None:
    """Write the whole engine directory, except its manifest."""
    out = Path(spec.out)
    require_loader(Path(spec.checkpoint))
    export(spec, out)
    generates = spec.purpose == Task.GENERATE.value
    model = out / (LANGUAGE_MODEL_XML if spec.images else MODEL_XML)
    if generates:
        require_attention(model)
    if spec.quantize != "none":
        report_phase("compress")
        compress(model, spec.quantize)
    if generates:
        report_phase("tokenizer")
        convert_tokenizer(spec, out)
    report_phase("save")
    copy_identity_files(Path(spec.checkpoint), Path(spec.tokenizer_dir), out)
    copy_head(Path(spec.checkpoint), out)


def require_loader(checkpoint: Path) -> None:
    """Raise UnusableCheckpointError if the package that loads the checkpoint's weights is not installed."""
    config = read_object(checkpoint / "config.json", LayoutError) or {}
    method = str(hugging_face_quantization(checkpoint, config).get("quant_method"))
    package = _LOADERS.get(method)
    if package is not None and find_spec(package) is None:
        raise UnusableCheckpointError(
            f"{_QUANTISED}{method} (quantization_config in {checkpoint / 'config.json'}): transformers loads them with "
            f"{package}, which is not installed here"
        )


def require_attention(xml: Path) -> None:
    """Raise UnusableCheckpointError for a model without attention. Raises OSError."""
    if b'type="ScaledDotProductAttention"' not in xml.read_bytes():
        raise UnusableCheckpointError(
            f"{NO_ATTENTION}: {xml.name} has no attention layer, and the KV cache of attention layers is what it pages"
        )


def export(spec: OpenVinoSpec, out: Path) -> None:
    """Export the checkpoint to IR: stateful where the model generates, weights in `spec.dtype`, nothing quantized."""
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
        main_export(
            spec.checkpoint,
            out,
            task=spec.task,
            stateful=spec.purpose == Task.GENERATE.value,
            library_name="transformers",
            trust_remote_code=spec.trust_remote_code,
            local_files_only=True,
            model_loading_kwargs={"torch_dtype": dtype},
            # Without a configuration, optimum quantizes models of a billion parameters and more to int8 unasked.
            # fp32 saves the graph as it was traced: the weights in `dtype`, as they were loaded. With fp16 every other
            # constant is rounded as well, rotary frequencies among them, and attention drifts with the position.
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
    export_tokenizer(tokenizer, out, task=spec.task)
    if not (out / TOKENIZER_XML).exists():
        print(
            f"warning: {type(tokenizer).__name__} has no OpenVINO counterpart: the engine generates, structured output "
            "is not available with it",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
