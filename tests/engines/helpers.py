"""A tiny checkpoint made without torch, engine files that only look like one, configurations."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from djl_trtllm.config import Config, load
from djl_trtllm.engines.cache import Manifest
from djl_trtllm.engines.hardware import Gpu, Hardware
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.model.work_directory import staged
from tests.support.tables import table

# As in the tiny checkpoint's config.json.
LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY, CONTEXT = 2, 4, 2, 16, 128, 512, 256
HIDDEN = HEADS * HEAD_DIM
CPU_ONLY = Hardware(gpus=(), tensorrt_llm=None, available_memory=8 * 10**9)
H200 = Gpu("NVIDIA H200", (9, 0), 143_771 * 2**20)


def gpu_machine(tensorrt_llm: str | None = "1.2.1", gpus: int = 1, *, gpu: Gpu = H200) -> Hardware:
    """A machine with GPUs of one kind and a TensorRT-LLM."""
    return Hardware(gpus=(gpu,) * gpus, tensorrt_llm=tensorrt_llm, available_memory=8 * 10**9, driver="580.95.05")


def write_checkpoint(path: Path, *, seed: int = 0) -> Path:
    """A random Llama in float16 with a byte-level BPE tokenizer."""
    from safetensors.numpy import save_file

    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(table(__file__, "config.json")))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    save_file(_weights(seed), path / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(path)
    return path


def _weights(seed: int) -> dict[str, Any]:
    import numpy as np

    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "lm_head": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj": (HIDDEN, HIDDEN),
            f"{prefix}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj": (HIDDEN, HIDDEN),
            f"{prefix}.mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj": (HIDDEN, INTERMEDIATE),
            f"{prefix}.input_layernorm": (HIDDEN,),
            f"{prefix}.post_attention_layernorm": (HIDDEN,),
        }
    # Large enough that logits are far apart: identity of greedy output must not hang on rounding.
    return {
        f"{name}.weight": (np.ones(shape) if len(shape) == 1 else random.normal(0, 0.08, shape)).astype(np.float16)
        for name, shape in shapes.items()
    }


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the little red riding hood went into the wood"] * 8, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(table(__file__, "tokenizer_config.json")))


def write_engine_files(path: Path, *, weights: bytes = bytes(1000)) -> Path:
    """The files of an engine as far as checks look at them; nothing can load it."""
    path.mkdir(parents=True, exist_ok=True)
    constant = f'<data element_type="f16" shape="{len(weights) // 2}" offset="0" size="{len(weights)}" />'
    (path / "openvino_model.xml").write_text(f'<?xml version="1.0"?>\n<net name="m"><layer>{constant}</layer></net>\n')
    (path / "openvino_model.bin").write_bytes(weights)
    return path


def built(plan: EnginePlan, out: Path) -> None:
    """What compiling a plan of OpenVINO leaves, as far as checks look at it."""
    with staged(out) as partial:
        write_engine_files(partial)
        Manifest.of(
            partial,
            backend=plan.backend.value,
            checkpoint=plan.checkpoint_identity,
            options=plan.build_options,
            versions=plan.versions,
            platform=plan.platform,
            limits=plan.built_limits,
        ).write(partial)


def write_tensorrt_engine(path: Path, *, ranks: int = 1, version: str = "1.2.1", **build: object) -> Path:
    """An engine directory as TensorRT-LLM lays it out, of the tiny checkpoint; nothing can load it."""
    path.mkdir(parents=True, exist_ok=True)
    mapping = {"world_size": ranks, "tp_size": ranks, "pp_size": 1}
    config = {
        "version": version,
        "pretrained_config": {**table(__file__, "pretrained_config of an engine"), "mapping": mapping},
        "build_config": {**table(__file__, "build_config of an engine"), **build},
    }
    (path / "config.json").write_text(json.dumps(config))
    for rank in range(ranks):
        (path / f"rank{rank}.engine").write_bytes(b"engine")
    return path


def configured(environ: Mapping[str, str] | None = None, /, **options: object) -> Config:
    """A configuration from `OPTION_*` variables: `configured(quantize="int8")`."""
    return load(None, {**(environ or {}), **{f"OPTION_{name.upper()}": str(value) for name, value in options.items()}})


# -- entries of an engine cache, and marks as other processes hold them ------------------------------------------------


KEY = "openvino-0123456789abcdef0123456789abcdef"


def seal(directory: Path) -> None:
    """Write the manifest of what is in a directory."""
    Manifest.of(directory, backend="openvino", checkpoint="x", options={}, versions={}, platform="x86_64").write(
        directory
    )


def build(out: Path, *, size: int = 10_000) -> None:
    """Write a whole engine of one file."""
    with staged(out) as partial:
        (partial / "model.bin").write_bytes(bytes(size))
        seal(partial)


class Builder:
    """Builds at once and counts."""

    def __init__(self, size: int = 10_000) -> None:
        self.calls = 0
        self._size = size

    def __call__(self, out: Path) -> None:
        self.calls += 1
        build(out, size=self._size)


@contextmanager
def locked(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock on a file as another process would."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def is_free(path: Path) -> bool:
    """Whether another process could lock a file."""
    with path.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextmanager
def started(what: str, root: Path, *names: str, lease: float | None = None) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes on one cache, see other_process.py; they are killed after the block."""
    script = Path(__file__).with_name("other_process.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    further = [] if lease is None else [str(lease)]
    commands = [[sys.executable, str(script), "cache", what, str(root), name, *further] for name in names]
    processes = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
