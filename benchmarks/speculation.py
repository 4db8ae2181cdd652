"""Speculation: whether greedy output stays the same, and how fast a copy load becomes.

    python -m benchmarks.speculation equal [--backend vllm] [--way WAY ...] [--prompts 200] [--streams 1 16]
    python -m benchmarks.speculation copy [--backend vllm-gpu] [--tokens 64] [--layers 6] [--streams 1]   a made model

`equal` compares tokens with those of the same server without speculation; a draft is the model itself. With `vllm` it
runs in the environment of `scripts/test-vllm`, with `vllm-gpu` on a GPU. The model of `copy` is no language model: its
weights are written so that it goes on with what followed the last three tokens earlier in its prompt, which is the work
of a summary that quotes. All but two of its layers only cost what layers cost. It is the best case of speculation. Its
draft has the two layers alone. OpenVINO compiles both (`djl-trtllm[cpu-compile]`), which takes a minute.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from benchmarks.servers import Server, running
from djl_trtllm.commands.serve import demo_model
from tests.support.client import lmi
from tests.support.models import link_checkpoint

WORDS = (
    "Tom Sue Lily the a dog cat bird park tree saw ran to and was happy big little one day they went found said Once"
)
WORDS += " upon time there forest river king old house ball red blue played with in on"
_CODE = 128
"""Numbers in the code of a token, and in a head."""
_HIDDEN = 8 * _CODE
_HEADS = 8
_BASE = 1e12
"""Of rotations: most pairs of numbers do not turn over a prompt, and the first ones differ between neighbours."""
_MATCH = slice(40, 64)
Array = npt.NDArray[np.float32]


def prompts(count: int, seed: int = 1) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS.split(), k=chance.randint(3, 60))) for _ in range(count)]


def make_copier(directory: Path, layers: int) -> Path:
    """Write a Llama whose first layer notes each token's three predecessors, and whose second finds their like."""
    source = demo_model()
    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, directory / name)
    config = json.loads((source / "config.json").read_text()) | {
        "hidden_size": _HIDDEN,
        "intermediate_size": 22 * _CODE,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _CODE,
        "rope_theta": _BASE,
        "attention_bias": True,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(layers, config["vocab_size"]), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _weights(layers: int, vocabulary: int) -> dict[str, npt.NDArray[np.float16]]:
    chance = np.random.default_rng(7)
    codes = chance.choice(np.array([-1.0, 1.0], np.float32), (vocabulary, _CODE))
    embedding, head = np.zeros((2, vocabulary, _HIDDEN), np.float32)
    embedding[:, :_CODE] = codes
    # What the second layer has found is in the fifth part of the hidden state.
    head[:, 4 * _CODE : 5 * _CODE] = codes
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
    }
    for number in range(layers):
        layer = f"model.layers.{number}"
        weights |= {
            f"{layer}.{name}_layernorm.weight": np.ones(_HIDDEN, np.float32) for name in ("input", "post_attention")
        }
        attention = {name: np.zeros((_HIDDEN, _HIDDEN), np.float32) for name in "qkvo"}
        biases = {name: np.zeros(_HIDDEN, np.float32) for name in "qkvo"}
        if number == 0:
            _note_predecessors(attention, biases)
        elif number == 1:
            _find_the_same(attention, chance)
        else:
            attention |= {name: _small(chance, _HIDDEN, _HIDDEN) for name in "qkv"}
        for name in "qkvo":
            weights[f"{layer}.self_attn.{name}_proj.weight"] = attention[name]
            weights[f"{layer}.self_attn.{name}_proj.bias"] = biases[name]
        wide = 22 * _CODE
        weights[f"{layer}.mlp.gate_proj.weight"] = _small(chance, wide, _HIDDEN)
        weights[f"{layer}.mlp.up_proj.weight"] = _small(chance, wide, _HIDDEN)
        weights[f"{layer}.mlp.down_proj.weight"] = np.zeros((_HIDDEN, wide), np.float32)
    return {name: values.astype(np.float16) for name, values in weights.items()}


def _small(chance: np.random.Generator, rows: int, columns: int) -> Array:
    return (chance.standard_normal((rows, columns)) * 0.02).astype(np.float32)


def _note_predecessors(attention: dict[str, Array], biases: dict[str, Array]) -> None:
    """Heads 0, 1 and 2 look one, two and three tokens back, and copy the code that is there beside the token's own.

    Query and key are the same for all tokens; only the rotations of their positions differ.
    """
    turns = _BASE ** (-np.arange(_CODE // 2) / (_CODE // 2))
    for back in (1, 2, 3):
        head = slice((back - 1) * _CODE, back * _CODE)
        pairs = np.where(turns > 0.02, 26.0, 0.0)
        biases["k"][head] = np.concatenate([pairs, 0 * pairs])
        biases["q"][head] = np.concatenate([pairs * np.cos(back * turns), -pairs * np.sin(back * turns)])
        attention["v"][head, :_CODE] = np.eye(_CODE)
        # Codes are divided by the root of their mean square: sqrt(1/8).
        attention["o"][back * _CODE : (back + 1) * _CODE, head] = np.eye(_CODE) / np.sqrt(8)


def _find_the_same(attention: dict[str, Array], chance: np.random.Generator) -> None:
    """Head 0 compares a token and its two predecessors with the three predecessors of others; the best one is next."""
    rows = [*range(_MATCH.start, _MATCH.stop), *range(64 + _MATCH.start, 64 + _MATCH.stop)]
    for part in range(3):
        hashes = chance.standard_normal((len(rows), _CODE)).astype(np.float32) * 0.5
        attention["q"][rows, part * _CODE : (part + 1) * _CODE] = hashes
        attention["k"][rows, (part + 1) * _CODE : (part + 2) * _CODE] = hashes
    attention["v"][:_CODE, :_CODE] = np.eye(_CODE)
    attention["o"][4 * _CODE : 5 * _CODE, :_CODE] = np.eye(_CODE)


WAYS: dict[str, dict[str, str]] = {
    "alone": {},
    "prompt lookup": {"OPTION_SPECULATIVE_DECODING_MODE": "ngram"},
    "draft model": {"OPTION_SPECULATIVE_DECODING_MODE": "draft_model"},
}


BACKENDS: dict[str, dict[str, str]] = {
    "openvino": {},
    "vllm": {
        "OPTION_BACKEND": "vllm",
        "OPTION_DTYPE": "fp32",
        "OPTION_ENFORCE_EAGER": "true",
        "OPTION_MAX_MODEL_LEN": "512",
        "OPTION_MAX_ROLLING_BATCH_SIZE": "16",
        "OPTION_EXECUTOR_HANG_TIMEOUT": "300",
        "OPTION_MODEL_LOADING_TIMEOUT": "1800",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    },
    "vllm-gpu": {
        "OPTION_BACKEND": "vllm",
        "OPTION_DTYPE": "bf16",
        "OPTION_MAX_MODEL_LEN": "2048",
        "OPTION_MAX_ROLLING_BATCH_SIZE": "256",
        "OPTION_GPU_MEMORY_UTILIZATION": "0.3",
    },
}
_START_SECONDS = 1800
"""Importing vLLM takes minutes where two cores are shared."""


def equal(backend: str, ways: list[str], count: int, streams: list[int]) -> bool:
    """Compare the greedy tokens of the bundled model with those of these ways; its draft is its own engine."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = backend != "openvino"
        model = link_checkpoint(Path(folder) / "story") if checkpoint else demo_model() / "engine"
        return _equal(model, BACKENDS[backend], ways, prompts(count), streams)


def _equal(model: Path, limits: dict[str, str], ways: list[str], texts: list[str], streams: list[int]) -> bool:
    count = len(texts)
    asked = [lmi(text, max_new_tokens=48, details=True) for text in texts]
    expected: list[list[int]] = []
    good = True
    for way in ("alone", *ways):
        options = WAYS[way]
        draft = {"OPTION_SPECULATIVE_DRAFT_MODEL": str(model)} if way == "draft model" else {}
        environ = limits | options | draft
        with running(Server(model, environ), _START_SECONDS) as server:
            for at_once in streams if options else [max(streams)]:
                began = time.perf_counter()
                answers = server.together(asked, at_once=at_once)
                rate = sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - began)
                tokens = [answer.token_ids for answer in answers]
                expected = expected or tokens
                same = sum(one == other for one, other in zip(tokens, expected, strict=True))
                good &= same == count
                accepted = server.metric("accepted_draft_tokens_total") if options else 0
                share = accepted / server.metric("generated_tokens_total")
                print(
                    f"{way}, {at_once} streams: {same} of {count} equal, {rate:,.0f} tok/s, {100 * share:.0f} % of "
                    "tokens drafted so far",
                    flush=True,
                )
    return good


def copy(backend: str, tokens: int, layers: int, repeats: int, streams: list[int]) -> None:
    """Measure streams of the model that copies, each with a text of its own."""
    limits = {"OPTION_BACKEND": backend, "OPTION_MAX_ROLLING_BATCH_SIZE": "4", **BACKENDS[backend]}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model, draft = make_copier(scratch / "copier", layers), make_copier(scratch / "draft", 2)
        requests = [_copying(number, tokens) for number in range(max(streams))]
        expected: dict[int, list[list[int]]] = {}
        alone: dict[int, float] = {}
        for way, options in WAYS.items():
            named = {"OPTION_SPECULATIVE_DRAFT_MODEL": str(draft)} if way == "draft model" else {}
            environ = limits | options | named
            with running(Server(model, environ, scratch), _START_SECONDS) as server:
                for at_once in streams:
                    rates, found = _rates(server, requests[:at_once], repeats)
                    accepted = server.metric("accepted_draft_tokens_total") if options else 0
                    share = accepted / server.metric("generated_tokens_total")
                    rate = statistics.median(rates)
                    first = alone.setdefault(at_once, rate)
                    same = sum(map(list.__eq__, found, expected.setdefault(at_once, found)))
                    print(
                        f"{way}, {at_once} streams: {rate:,.1f} tok/s ({min(rates):,.1f}-{max(rates):,.1f}, x "
                        f"{rate / first:.2f}), {100 * share:.0f} % of tokens drafted so far, {same} of {at_once} "
                        "the same",
                        flush=True,
                    )


def _copying(number: int, tokens: int) -> dict[str, Any]:
    words = random.Random(3 + number).choices(WORDS.split(), k=160)
    text = f"{' '.join(words)}. {' '.join(words[:8])}"
    return lmi(text, stream=True, max_new_tokens=tokens, details=True, ignore_eos=True)


def _rates(server: Server, requests: list[dict[str, Any]], repeats: int) -> tuple[list[float], list[list[int]]]:
    """Tokens per second from the first token of all streams to the last; the first load is not counted."""
    rates, found = [], list[list[int]]()
    for _ in range(repeats + 1):
        answers = server.together(requests, at_once=len(requests))
        found = [answer.token_ids for answer in answers]
        begun = min(answer.asked + answer.time_to_first_token for answer in answers)
        rates.append(sum(len(ids) - 1 for ids in found) / (max(answer.ended for answer in answers) - begun))
    return rates[1:], found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["equal", "copy"])
    parser.add_argument("--backend", choices=list(BACKENDS), default="openvino")
    others = list(WAYS)[1:]
    parser.add_argument("--way", choices=others, nargs="+", default=others, help="of `equal`")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--streams", type=int, nargs="+", help="default: 1 and 16, of `copy` 1")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.what == "copy":
        streams = arguments.streams or [1]
        copy(arguments.backend, arguments.tokens, arguments.layers, arguments.repeats, streams)
    elif not equal(arguments.backend, arguments.way, arguments.prompts, arguments.streams or [1, 16]):
        sys.exit(1)


if __name__ == "__main__":
    main()
