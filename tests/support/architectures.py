"""Tiny random checkpoints of the architectures that people serve most, and what transformers generates from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.helpers import write_tokenizer

VOCABULARY = 300
_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_PLAIN = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 16},
    "gpt2": _GPT2,
    "mistral": {**_LLAMA, "sliding_window": None},
    "mixtral": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": {**_LLAMA, "head_dim": 16},
    "gemma2": {**_LLAMA, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 128},
    "phi3": {**_LLAMA, "pad_token_id": 0},
    "falcon": _PLAIN,
    "opt": {**_PLAIN, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "gptj": {**_GPT2, "rotary_dim": 8},
    "gpt_neox": {**_PLAIN, "intermediate_size": 128},
    "gpt_bigcode": {**_GPT2, "n_inner": 128},
}
"""model_type to sizes."""

_EMBEDDINGS = ("embed", "wte", "wpe")
_TIE = 2e-3
"""Share of the logits' spread by which the first token must lead: below it, rounding to f16 may decide."""


def write_checkpoint(path: Path, model_type: str, **changes: Any) -> Path:
    """A random checkpoint in float16 as transformers saves it, with a byte-level tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)  # several are slower: the models are tiny
    torch.manual_seed(11)
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, **ARCHITECTURES[model_type], **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.ndim > 1:
                # Weights so large that the model does not repeat one token, whose embedding it is tied to.
                values.normal_(0, 0.1 if any(part in name for part in _EMBEDDINGS) else 0.3)
    model.half().save_pretrained(path)
    write_tokenizer(path)
    return path


@dataclass(frozen=True)
class Expected:
    """Greedy tokens after a prompt. Only the first `certain` count: at the next, two tokens are equally good."""

    tokens: list[int]
    certain: int


def greedy(checkpoint: Path, prompts: list[list[int]], new_tokens: int) -> list[Expected]:
    """What transformers generates in float32, without ending at an end token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return [_continue(model, prompt, new_tokens) for prompt in prompts]


def _continue(model: Any, prompt: list[int], new_tokens: int) -> Expected:
    import torch

    tokens, certain = list(prompt), None
    for number in range(new_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        best = logits.topk(2)
        if certain is None and float(best.values[0] - best.values[1]) < _TIE * max(1.0, float(logits.std())):
            certain = number
        tokens.append(int(best.indices[0]))
    return Expected(tokens[len(prompt) :], new_tokens if certain is None else certain)
