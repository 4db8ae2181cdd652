"""The compiler of TensorRT engines: `python -m djl_trtllm.backends.tensorrt_llm.compile SPEC.json`.

`COMPILER` says how it is started and how its log is read. It runs in a process of its own, so that the GPU's memory is
free when the engine is done; TensorRT-LLM is imported there only.
Checkpoint in, engine directory out, laid out as `LLM.save` does it: config.json, a `rankN.engine` for every GPU, and
the tokenizer. The manifest is the parent's.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from djl_trtllm.backends.tensorrt_llm.mpi import ending_with_ranks, prepare_mpi
from djl_trtllm.engines.compiler import (
    DISK,
    GPU_MEMORY,
    HOST_MEMORY,
    Compiler,
    CompileSpec,
    die_with_parent,
    read_causes,
    report_phase,
)
from djl_trtllm.engines.plan import copy_identity_files


class TensorRtLlmSpec(CompileSpec, frozen=True, kw_only=True):
    """`arguments` are those of TensorRT-LLM's LLM, as plain data (see `names.build_arguments`).

    `converter_alias` is a name that TensorRT-LLM must find in the checkpoint's path (`checkpoints.converter_alias`).
    """

    arguments: dict[str, Any]
    converter_alias: str | None = None


COMPILER = Compiler(
    module="djl_trtllm.backends.tensorrt_llm.compile",
    packages=("tensorrt-llm",),
    install="pip install 'djl-trtllm[trtllm]', or use TensorRT-LLM's container",
    phases=("start", "download", "convert", "quantize", "build", "save"),
    # The labels of LLM's own steps (llmapi/llm_utils.py), and what its quantiser prints.
    phase_lines={
        "download": re.compile(r"Downloading HF model"),
        "convert": re.compile(r"Loading (HF model|TRT checkpoints) to memory"),
        "quantize": re.compile(r"Starting quantization|Loading calibration dataset|Calibrating batch"),
        "build": re.compile(r"Build(ing)? (TRT-LLM|TensorRT) engine"),
    },
    causes=(GPU_MEMORY, HOST_MEMORY, DISK, *read_causes(__package__)),
    # TensorRT-LLM's own cache knows neither GPU nor weights; the one here does.
    environment={"TLLM_LLMAPI_BUILD_CACHE": "0"},
)


# The engine's own config.json says how it is quantised.
_OF_THE_CHECKPOINT = ("config.json", "hf_quant_config.json", "quantize_config.json", "quantization_config.json")


def main(argv: list[str]) -> int:
    """Compile what the spec file says; 0 when the engine directory is complete."""
    die_with_parent()
    prepare_mpi()
    spec = TensorRtLlmSpec.load(Path(argv[1]))
    out = Path(spec.out)
    # The timing cache is written to the working directory, and belongs to the engine.
    os.chdir(out)
    compile_engine(spec, out)
    copy_identity_files(Path(spec.checkpoint), Path(spec.tokenizer_dir), out, without=_OF_THE_CHECKPOINT)
    return 0


def compile_engine(spec: TensorRtLlmSpec, out: Path) -> None:
    """Compile and save; TensorRT-LLM's own log shows the phases between (see `COMPILER`)."""
    from tensorrt_llm._tensorrt_engine import LLM

    from djl_trtllm.backends.tensorrt_llm.names import build_arguments

    checkpoint = Path(spec.checkpoint)
    if spec.workspace is not None:
        Path(spec.workspace).mkdir(parents=True)
        if spec.converter_alias is not None:
            # A link with the name by which TensorRT-LLM recognises the checkpoint.
            checkpoint = Path(spec.workspace) / spec.converter_alias
            checkpoint.symlink_to(spec.checkpoint)
    report_phase("convert")
    # LLM loads what it has compiled; reuse of blocks, its default, is not in every engine.
    loading = {"kv_cache_config": {"class": "KvCacheConfig", "enable_block_reuse": False}}
    with ending_with_ranks():
        llm = LLM(
            model=str(checkpoint),
            tokenizer=spec.tokenizer_dir,
            workspace=spec.workspace,
            enable_build_cache=False,
            **build_arguments(spec.arguments | loading),
        )
    try:
        report_phase("save")
        llm.save(str(out))
    finally:
        llm.shutdown()


# MPI starts this module again for every further GPU.
if __name__ == "__main__":
    sys.exit(main(sys.argv))
