"""From a checkpoint to an engine directory, with the real phases' log lines (facts §3.4)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import engine_files
from .logger import cpp_log, logger, print_colored
from .memory import memory_model, torch_out_of_memory
from .settings import VERSION, device_memory, script
from .tokenizer import load_hf_tokenizer

SUPPORTED = frozenset(
    (
        "ArcticForCausalLM",
        "BaiChuanForCausalLM",
        "BaichuanForCausalLM",
        "BloomForCausalLM",
        "ChatGLMForCausalLM",
        "ChatGLMModel",
        "CohereForCausalLM",
        "DbrxForCausalLM",
        "DeciLMForCausalLM",
        "DeepseekForCausalLM",
        "DeepseekV2ForCausalLM",
        "ExaoneForCausalLM",
        "FalconForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GPTJForCausalLM",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "InternLM2ForCausalLM",
        "InternLMForCausalLM",
        "LlamaForCausalLM",
        "MPTForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "NemotronForCausalLM",
        "OPTForCausalLM",
        "Phi3ForCausalLM",
        "Phi3SmallForCausalLM",
        "PhiForCausalLM",
        "PhiMoEForCausalLM",
        "QWenForCausalLM",
        "QWenLMHeadModel",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "RWForCausalLM",
        "SkyworkForCausalLM",
        "Starcoder2ForCausalLM",
    )
)
"""Hugging Face architectures that the engine backend has a model for."""

CALIBRATED = frozenset({"W4A16_AWQ", "FP8", "W8A8_SQ_PER_CHANNEL", "W4A8_AWQ"})
"""What ModelOpt quantises with calibration data (facts §3.5)."""


class OutOfMemoryError(RuntimeError):
    """PyTorch's."""


OutOfMemoryError.__module__ = "torch"


def build(rank: int, plan: dict[str, Any]) -> list[tuple[str, float]]:
    """One rank's share of the build; labels and seconds of its steps."""
    steps: list[tuple[str, Callable[[int, dict[str, Any]], None]]]
    if plan["format"] == engine_files.HF:
        steps = [("Loading HF model to memory", _load), ("Building TRT-LLM engine", _build)]
    else:
        steps = [("Loading TRT checkpoints to memory", _load), ("Build TRT-LLM engine", _build)]
    info = []
    started = time.monotonic()
    for number, (label, step) in enumerate(steps, 1):
        if rank == 0:
            print_colored("Loading Model: ")
            print_colored(f"[{number}/{len(steps)}]\t", "bold_green")
            print_colored(f"{label}\n")
        began = time.monotonic()
        step(rank, plan)
        time.sleep(script()["build_seconds"] / len(steps))
        if rank == 0:
            print_colored(f"Time: {time.monotonic() - began:.3f}s\n", "grey")
        info.append((label, time.monotonic() - began))
    if rank == 0:
        print_colored("Loading model done.\n", "bold_green")
        print_colored(f"Total latency: {time.monotonic() - started:.3f}s\n", "grey")
    _save(rank, plan)
    return info


def _load(rank: int, plan: dict[str, Any]) -> None:
    model = Path(plan["model"])
    fail = script()["build_error"]
    if plan["format"] == engine_files.HF:
        architecture = (plan["config"].get("architectures") or ["None"])[0]
        if architecture not in SUPPORTED or fail == "unsupported":
            raise NotImplementedError(
                f"The given huggingface model architecture {architecture} is not supported in TRT-LLM yet"
            )
        if plan["load_format"] != "dummy" and not any(model.glob("*.safetensors")) and not any(model.glob("*.bin")):
            raise OSError(
                "Error no file named pytorch_model.bin, model.safetensors, tf_model.h5, model.ckpt.index or "
                f"flax_model.msgpack found in directory {model}."
            )
        if plan["calibrate"]:
            _quantize(rank, plan)
    elif not (model / f"rank{rank}.safetensors").exists():
        raise FileNotFoundError(f"No such file or directory: {model / f'rank{rank}.safetensors'}")
    if fail == "oom":
        raise _out_of_memory()
    if fail == "die":
        time.sleep(1)  # no rank ends sooner: importing TensorRT-LLM alone takes some seconds
        os.kill(os.getpid(), 9)


def _quantize(rank: int, plan: dict[str, Any]) -> None:
    if rank:
        return
    calibration = plan["calibration"]
    print(f"Initializing model from {plan['model']}", flush=True)
    print(f"Initializing tokenizer from {plan['model']}", flush=True)
    print("Loading calibration dataset", flush=True)
    print("Starting quantization...", flush=True)
    for batch in range(min(3, calibration["calib_batches"])):
        print(f"Calibrating batch {batch}", flush=True)
    if script()["build_error"] == "quantize_oom":
        raise _out_of_memory()
    print("Quantization done. Total time used: 0.01 s.", flush=True)
    print(f"Quantized model exported to {plan['workspace']}/quantized-checkpoint", flush=True)


def _build(rank: int, plan: dict[str, Any]) -> None:
    logger.info(f"Build TensorRT engine Unnamed Network {rank}")
    memory = memory_model()
    fits = memory is None or memory.builds(plan["build_config"]["max_num_tokens"])
    match script()["build_error"] if fits else "build_oom":
        case "build_oom":
            print("[TRT] [E] Error Code: 9: Skipping tactic 0x0 due to exception Cuda Runtime (out of memory)")
            print(
                "[TRT] [E] [globWriter.cpp::makeResizableGpuMemory::515] Error Code 2: OutOfMemory (Requested size "
                f"was {2 * device_memory()} bytes.)",
                flush=True,
            )
            raise AssertionError("Engine building failed, please check the error log.")
        case "option":
            raise ValueError("max_seq_len (0) is not valid: it must be greater than 0")
        case None | "oom" | "quantize_oom" | "unsupported" | "die":
            pass
        case message:
            raise RuntimeError(message)
    cpp_log(
        "INFO", "[MemUsageChange] TensorRT-managed allocation in building engine: CPU 0 MiB, GPU 0 MiB, total 0 MiB"
    )
    logger.info(f"Total time of building Unnamed Network {rank}: 00:00:00")


def _out_of_memory() -> OutOfMemoryError:
    return OutOfMemoryError(torch_out_of_memory())


def _save(rank: int, plan: dict[str, Any]) -> None:
    directory = Path(plan["engine_dir"])
    directory.mkdir(parents=True, exist_ok=True)
    engine_files.write_rank(directory, rank)
    if rank == 0:
        config = {
            "version": str(VERSION),
            "pretrained_config": plan["pretrained_config"],
            "build_config": plan["build_config"],
        }
        (directory / "config.json").write_text(json.dumps(config, indent=4))
        tokenizer = load_hf_tokenizer(Path(plan["model"]))
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)


def pretrained_config(config: dict[str, Any], dtype: str, mapping: dict[str, int], quantization: Any) -> dict[str, Any]:
    """TensorRT-LLM's description of a Hugging Face model."""
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads", text.get("n_head", 1))
    hidden = text.get("hidden_size", text.get("n_embd", 1))
    return {
        "architecture": (config.get("architectures") or ["None"])[0],
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": text.get("vocab_size"),
        "max_position_embeddings": positions(config),
        "hidden_size": hidden,
        "num_hidden_layers": text.get("num_hidden_layers", text.get("n_layer")),
        "num_attention_heads": heads,
        "num_key_value_heads": text.get("num_key_value_heads", heads),
        "head_size": text.get("head_dim") or hidden // heads,
        "hidden_act": text.get("hidden_act", text.get("activation_function")),
        "intermediate_size": text.get("intermediate_size", text.get("n_inner")),
        "norm_epsilon": text.get("rms_norm_eps", text.get("layer_norm_epsilon", 1e-5)),
        "position_embedding_type": "rope_gpt_neox",
        "mapping": mapping,
        "quantization": quantization,
        "runtime_defaults": None,
    }


def positions(config: dict[str, Any]) -> int:
    """max_position_embeddings, by any of its names; 2048 without one."""
    text = config.get("text_config", config)
    for name in ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"):
        length: int | None = text.get(name)
        if length:
            return length
    return 2048
