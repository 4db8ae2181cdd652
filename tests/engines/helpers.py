"""A tiny checkpoint made without torch, engine files that only look like one, configurations."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from djl_trtllm.config import Config, load
from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.manifest import EngineDir, Manifest
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.engines.staging import staged

LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY, CONTEXT = 2, 4, 2, 16, 128, 512, 256
HIDDEN = HEADS * HEAD_DIM
CPU_ONLY = Hardware(gpus=(), tensorrt_llm=None, available_memory=8 * 10**9)
H200 = Gpu("NVIDIA H200", (9, 0), 143_771 * 2**20)


def wait_until(condition: Callable[[], object], seconds: float = 300) -> None:
    """Look until it holds; AssertionError when that takes too long for any machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gpu_machine(tensorrt_llm: str | None = "1.2.1", gpus: int = 1, *, gpu: Gpu = H200) -> Hardware:
    """A machine with GPUs of one kind and a TensorRT-LLM."""
    return Hardware(gpus=(gpu,) * gpus, tensorrt_llm=tensorrt_llm, available_memory=8 * 10**9, driver="580.95.05")


def write_checkpoint(path: Path, *, seed: int = 0) -> Path:
    """A random Llama in float16 with a byte-level BPE tokenizer."""
    from safetensors.numpy import save_file

    path.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
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
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
            }
        )
    )


def write_engine_files(path: Path, *, weights: bytes = bytes(1000)) -> Path:
    """The files of an engine as far as checks look at them; nothing can load it."""
    path.mkdir(parents=True, exist_ok=True)
    constant = f'<data element_type="f16" shape="{len(weights) // 2}" offset="0" size="{len(weights)}" />'
    (path / "openvino_model.xml").write_text(f'<?xml version="1.0"?>\n<net name="m"><layer>{constant}</layer></net>\n')
    (path / "openvino_model.bin").write_bytes(weights)
    return path


def built(plan: EnginePlan, out: Path) -> EngineDir:
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
    return EngineDir(out, plan.backend.value, Manifest.read(out), out)


def write_tensorrt_engine(path: Path, *, ranks: int = 1, version: str = "1.2.1", **build: object) -> Path:
    """An engine directory as TensorRT-LLM lays it out, of the tiny checkpoint; nothing can load it."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "version": version,
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": "float16",
            "vocab_size": VOCABULARY,
            "max_position_embeddings": CONTEXT,
            "mapping": {"world_size": ranks, "tp_size": ranks, "pp_size": 1},
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        },
        "build_config": {
            "max_batch_size": 16,
            "max_input_len": 128,
            "max_seq_len": 192,
            "max_num_tokens": 160,
            "max_beam_width": 2,
            "kv_cache_type": "PAGED",
            "plugin_config": {"tokens_per_block": 32, "use_paged_context_fmha": True, "remove_input_padding": True},
            **build,
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    for rank in range(ranks):
        (path / f"rank{rank}.engine").write_bytes(b"engine")
    return path


def configured(environ: Mapping[str, str] | None = None, /, **options: object) -> Config:
    """A configuration from `OPTION_*` variables: `configured(quantize="int8")`."""
    return load(None, {**(environ or {}), **{f"OPTION_{name.upper()}": str(value) for name, value in options.items()}})
