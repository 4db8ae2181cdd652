"""The compiler of TensorRT engines: `python -m djl_trtllm.backends.tensorrt_llm.compile SPEC.json`.

Runs in a process of its own, so that the GPU's memory is free when the engine is done. Nothing else imports this.
Checkpoint in, engine directory out, laid out as `LLM.save` does it: config.json, a `rankN.engine` for every GPU, and
the tokenizer. The manifest is the parent's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from djl_trtllm.backends.tensorrt_llm.compiler import TensorRtLlmSpec
from djl_trtllm.backends.tensorrt_llm.ranks import ending_with_ranks
from djl_trtllm.engines.identity import copy_identity_files
from djl_trtllm.engines.parent_watchdog import die_with_parent
from djl_trtllm.engines.spec import report_phase

# The engine's own config.json says how it is quantised.
_OF_THE_CHECKPOINT = ("config.json", "hf_quant_config.json", "quantize_config.json", "quantization_config.json")


def main(argv: list[str]) -> int:
    """Compile what the spec file says; 0 when the engine directory is complete."""
    die_with_parent()
    spec = TensorRtLlmSpec.load(Path(argv[1]))
    out = Path(spec.out)
    # The timing cache is written to the working directory, and belongs to the engine.
    os.chdir(out)
    compile_engine(spec, out)
    copy_identity_files(Path(spec.checkpoint), Path(spec.tokenizer_dir), out, without=_OF_THE_CHECKPOINT)
    return 0


def compile_engine(spec: TensorRtLlmSpec, out: Path) -> None:
    """Compile and save; TensorRT-LLM's own log shows the phases between (see `compiler.COMPILER`)."""
    from tensorrt_llm._tensorrt_engine import LLM

    from djl_trtllm.backends.tensorrt_llm.objects import build_arguments

    if spec.workspace is not None:
        Path(spec.workspace).mkdir(parents=True)
    report_phase("convert")
    # LLM loads what it has compiled; reuse of blocks, its default, is not in every engine.
    loading = {"kv_cache_config": {"class": "KvCacheConfig", "enable_block_reuse": False}}
    with ending_with_ranks():
        llm = LLM(
            model=_checkpoint(spec),
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


def _checkpoint(spec: TensorRtLlmSpec) -> str:
    """The checkpoint, by a path that TensorRT-LLM recognises."""
    if spec.converter_alias is None or spec.workspace is None:
        return spec.checkpoint
    link = Path(spec.workspace) / spec.converter_alias
    link.symlink_to(spec.checkpoint)
    return str(link)


# MPI starts this module again for every further GPU.
if __name__ == "__main__":
    sys.exit(main(sys.argv))
