"""Compare what is read of GPUs, and estimated for them, with what PyTorch sees and allocates.

    python -m tools.sizing.gpu_check [--most-gib 60]

Needs a GPU and torch, no engine. Prints the memory, architecture and links of each GPU as NVML and torch report them,
and the bytes that torch allocates for the weights and the KV cache of Llama-shaped models beside the estimate's. Then
fills a GPU with what the estimate says fits. Exits with 1 if a figure differs by more than 2 % and by more than torch's
allocator rounds: its blocks are up to 1 MiB longer than what was asked for, which shows in small models.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from djl_trtllm.engines.hardware import GpuState, read_states
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import GIB, Conditions, Estimate

_NEAR = 0.02
_ROUNDED = 32 << 20
_BLOCK = 32
_TOKENS = 8192 * 4
_MODELS = {
    "TinyLlama 1.1B": (22, 2048, 5632, 32, 4, 32000, False),
    "Llama 3.2 3B": (28, 3072, 8192, 24, 8, 128256, True),
    "Llama 2 7B": (32, 4096, 11008, 32, 32, 32000, False),
    "Llama 3 8B": (32, 4096, 14336, 32, 8, 128256, False),
}
"""Layers, hidden size, inner size, heads, heads of keys, vocabulary, tied."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-gib", type=float, default=60, help="skip what needs more memory")
    most = int(parser.parse_args().most_gib * GIB)
    import torch

    wrong = [line for line in _gpus(torch, read_states()) if line.startswith("differs")]
    for line in (*_models(torch, most), _filled(torch)):
        print(line)
        wrong += [line] if line.startswith("differs") else []
    return 1 if wrong else 0


def _gpus(torch: Any, states: tuple[GpuState, ...]) -> Iterator[str]:
    print(f"torch {torch.__version__}, {torch.cuda.device_count()} GPUs; NVML: {len(states)} GPUs")
    for index, gpu in enumerate(states[: torch.cuda.device_count()]):
        free, total = torch.cuda.mem_get_info(index)
        reached = tuple(
            other
            for other in range(torch.cuda.device_count())
            if other != index and torch.cuda.can_device_access_peer(index, other)
        )
        rows = [
            ("total GiB", f"{gpu.total / GIB:.2f}", f"{total / GIB:.2f}", abs(gpu.total / total - 1) <= _NEAR),
            ("free GiB", f"{gpu.free / GIB:.2f}", f"{free / GIB:.2f}", abs(gpu.free - free) <= _NEAR * gpu.total),
            ("peers", gpu.peers, reached, None),
        ]
        print(f"GPU {index}: {torch.cuda.get_device_properties(index).name}")
        for what, read, seen, right in rows:
            good = read == seen if right is None else right
            line = f"{'same' if good else 'differs'}: {what}: NVML {read}, torch {seen}"
            print(f"  {line}")
            yield line


def _config(name: str) -> dict[str, Any]:
    layers, hidden, inner, heads, keys, vocabulary, tied = _MODELS[name]
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": tied,
    }


def _models(torch: Any, most: int) -> Iterator[str]:
    for name, (layers, hidden, _, heads, keys, _, _) in _MODELS.items():
        config = _config(name)
        sizes = CheckpointSizes.from_config(config, name)
        for ranks in (1, 2, 4, 8):
            found = Estimate(sizes, Conditions(80 * GIB, tensor_parallel=ranks, backend="pytorch"))
            if found.weights + found.kv_bytes_per_token * _TOKENS > most:
                yield f"{name}, tp {ranks}: skipped, it needs more than --most-gib"
                continue
            made = _allocated(torch, partial(_weights, torch, config, ranks))
            yield _compared(f"{name}, tp {ranks}, weights", found.weights, made)
            for dtype, kv_dtype in ((torch.bfloat16, None), (torch.float8_e4m3fn, "fp8")):
                conditions = Conditions(80 * GIB, tensor_parallel=ranks, kv_dtype=kv_dtype, backend="pytorch")
                expected = Estimate(sizes, conditions).kv_bytes_per_token * _TOKENS
                shape = (_TOKENS // _BLOCK, 2, max(1, keys // ranks), _BLOCK, hidden // heads)
                made = _allocated(torch, partial(_cache, torch, layers, shape, dtype))
                yield _compared(f"{name}, tp {ranks}, KV of {_TOKENS} tokens, {kv_dtype or 'bf16'}", expected, made)


def _filled(torch: Any) -> str:
    """Allocate everything that the estimate of the whole GPU says fits, and see what is left."""
    _, total = torch.cuda.mem_get_info(0)
    config = _config("Llama 3 8B")
    states = read_states()
    memory = states[0].total if states else total
    found = Estimate(CheckpointSizes.from_config(config), Conditions(memory, fraction=1.0, backend="pytorch"))
    try:
        kept = [
            _weights(torch, config, 1),
            torch.empty(found.kv_bytes(8192), dtype=torch.uint8, device="cuda"),
            torch.empty(found.activations(8192), dtype=torch.uint8, device="cuda"),
        ]
    except torch.cuda.OutOfMemoryError as error:
        return f"differs: Llama 3 8B with all of the KV cache that is estimated does not fit: {error}"
    left, _ = torch.cuda.mem_get_info(0)
    del kept
    return (
        f"same: Llama 3 8B fills {memory / GIB:.2f} GiB with {found.kv_tokens(8192):,} tokens at fraction 1: "
        f"{left / GIB:.2f} GiB are left of the {found.overhead / GIB:.2f} that are for the runtime"
    )


def _allocated(torch: Any, make: Callable[[], Any]) -> tuple[int, int]:
    """Bytes on the GPU while what `make` returns lives: as allocated, and as asked for."""
    gc.collect()
    torch.cuda.empty_cache()
    keys = ("allocated_bytes.all.current", "requested_bytes.all.current")
    before = torch.cuda.memory_stats()
    kept = make()
    after = torch.cuda.memory_stats()
    del kept
    allocated, requested = (int(after[key] - before.get(key, 0)) for key in keys)
    return allocated, requested


def _weights(torch: Any, config: dict[str, Any], ranks: int) -> Any:
    """The modules of one rank of a Llama, as TensorRT-LLM and others divide them."""
    nn = torch.nn
    hidden, inner = config["hidden_size"], config["intermediate_size"] // ranks
    head_dim = hidden // config["num_attention_heads"]
    width = config["num_attention_heads"] * head_dim // ranks
    keys = max(1, config["num_key_value_heads"] // ranks) * head_dim
    like = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    vocabulary = config["vocab_size"] // ranks
    modules = [nn.Embedding(vocabulary, hidden, device="cuda", dtype=torch.bfloat16)]
    for _ in range(config["num_hidden_layers"]):
        modules += [
            nn.Linear(hidden, width + 2 * keys, **like),
            nn.Linear(width, hidden, **like),
            nn.Linear(hidden, 2 * inner, **like),
            nn.Linear(inner, hidden, **like),
            nn.RMSNorm(hidden, device="cuda", dtype=torch.bfloat16),
            nn.RMSNorm(hidden, device="cuda", dtype=torch.bfloat16),
        ]
    modules.append(nn.RMSNorm(hidden, device="cuda", dtype=torch.bfloat16))
    if not config["tie_word_embeddings"]:
        modules.append(nn.Linear(hidden, vocabulary, **like))
    return modules


def _cache(torch: Any, layers: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """A pool of blocks for each layer."""
    return [torch.empty(shape, dtype=dtype, device="cuda") for _ in range(layers)]


def _compared(what: str, expected: int, made: tuple[int, int]) -> str:
    allocated, requested = made
    apart = expected - allocated
    wrong = abs(apart) > _NEAR * allocated and (abs(apart) > _ROUNDED or abs(expected - requested) > _NEAR * requested)
    return (
        f"{'differs' if wrong else 'same'}: {what}: estimate {expected:,}, torch {allocated:,} "
        f"({apart / allocated:+.2%}), of which {requested:,} asked for"
    )


if __name__ == "__main__":
    sys.exit(main())
