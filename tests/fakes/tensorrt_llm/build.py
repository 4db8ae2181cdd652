"""From a checkpoint to an engine directory, with the real phases' log lines (facts §3.4), and its tokenizer."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from .settings import VERSION, cpp_log, device_memory, logger, memory_model, print_colored, script, torch_out_of_memory

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


class TransformersTokenizer:
    """The Hugging Face tokenizer of a directory, without the import of transformers where tokenizer.json is there."""

    def __init__(self, directory: Path) -> None:
        import tokenizers

        self._directory = directory
        self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        config = _read_json(directory / "tokenizer_config.json")
        model = _read_json(directory / "config.json")
        self.name_or_path = str(directory)
        self.has_end = config.get("eos_token") is not None
        self.eos_token_id = self._special(config, model, "eos")
        self.bos_token_id = self._special(config, model, "bos")
        self.pad_token_id = self._special(config, model, "pad")
        self.tokenizer = self

    def _special(self, config: dict[str, Any], model: dict[str, Any], kind: str) -> int | None:
        token = config.get(f"{kind}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            token_id: int | None = self._tokenizer.token_to_id(token)
            return token_id
        found: int | list[int] | None = model.get(f"{kind}_token_id")
        return found[0] if isinstance(found, list) else found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = True
    ) -> str:
        """By itself transformers removes spaces before some marks."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return re.sub(r" ([.,!?'])", r"\1", text) if clean_up_tokenization_spaces else text

    def save_pretrained(self, directory: Path) -> None:
        copy_tokenizer(self._directory, directory)


def copy_tokenizer(source: Path, target: Path) -> None:
    """What `save_pretrained` leaves in `target`."""
    for name in _FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def load_hf_tokenizer(directory: Path) -> Any:
    """None, with a warning, where there is none (facts §3.1: a trtllm-build directory has no tokenizer)."""
    directory = Path(directory)
    try:
        if (directory / "tokenizer.json").exists():
            return TransformersTokenizer(directory)
        if not any((directory / name).exists() for name in _FILES):
            raise OSError(f"Can't load tokenizer for '{directory}'.")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:
        logger.warning(f"Failed to load hf tokenizer from {directory}, encounter error: {error}")
        return None


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


# -- what is in a directory, and what an engine directory holds (facts §3.1 to §3.3) -----------------------------------

_CONTENT = b"FAKE TensorRT engine " + str(VERSION).encode()


def is_engine(directory: Path) -> bool:
    """Whether config.json is that of an engine. Other formats than Hugging Face's are not built here."""
    config = read_config(directory)
    return "pretrained_config" in config and "build_config" in config


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a directory."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def write_rank(directory: Path, rank: int) -> None:
    """rank{R}.engine: the version that wrote it is inside."""
    (directory / f"rank{rank}.engine").write_bytes(_CONTENT)


def load_rank(directory: Path, rank: int, max_beam_width: int) -> None:
    """What the runtime does with a rank's file: it has to be there, and of this very version.

    The check of beams is that of cpp/tensorrt_llm/batch_manager/trtGptModel.h (12,829 characters, about 1.0).
    """
    config = read_config(directory)
    version, built = config["version"], config["build_config"].get("max_beam_width") or 1
    cpp_log("INFO", f"Engine version {version} found in the config file, assuming engine(s) built by new builder API.")
    path = directory / f"rank{rank}.engine"
    if not path.exists():
        raise RuntimeError(
            f"[TensorRT-LLM][ERROR] Assertion failed: Error opening engine file: {path} "
            "(/src/tensorrt_llm/cpp/tensorrt_llm/runtime/rawEngine.h)"
        )
    if path.read_bytes() != _CONTENT:
        raise deserialize_error()
    if max_beam_width > built:
        raise RuntimeError(
            f"[TensorRT-LLM][ERROR] Assertion failed: Runtime configured max beam width ({max_beam_width}) must not "
            f"exceed engine max beam width ({built}) (/src/tensorrt_llm/cpp/tensorrt_llm/batch_manager/trtGptModel.h)"
        )
    cpp_log("INFO", f"Loaded engine size: {path.stat().st_size >> 20} MiB")


def deserialize_error() -> RuntimeError:
    """What an engine of another TensorRT-LLM ends in."""
    cpp_log(
        "ERROR",
        "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization assertion "
        "stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not match. Note: Current Version: 240, "
        "Serialized Engine Version: 238) in stdArchiveReader",
    )
    return RuntimeError(
        "[TensorRT-LLM][ERROR] Assertion failed: Failed to deserialize cuda engine. "
        "(/src/tensorrt_llm/cpp/tensorrt_llm/runtime/tllmRuntime.cpp:239)"
    )


SUPPORTED = frozenset(json.loads(Path(__file__).with_name("architectures.json").read_text()))
"""Hugging Face architectures that the engine backend has a model for."""

CALIBRATED = frozenset({"W4A16_AWQ", "FP8", "W8A8_SQ_PER_CHANNEL", "W4A8_AWQ"})
"""What ModelOpt quantises with calibration data (facts §3.5)."""


class OutOfMemoryError(RuntimeError):
    """PyTorch's."""


OutOfMemoryError.__module__ = "torch"


def build(plan: dict[str, Any], *, rank: int) -> None:
    """One rank's share of the build."""
    steps = (("Loading HF model to memory", _load), ("Building TRT-LLM engine", _build))
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
    if rank == 0:
        print_colored("Loading model done.\n", "bold_green")
        print_colored(f"Total latency: {time.monotonic() - started:.3f}s\n", "grey")
    _save(rank, plan)


def _load(rank: int, plan: dict[str, Any]) -> None:
    model = Path(plan["model"])
    fail = script()["build_error"]
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
    write_rank(directory, rank)
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
