"""Train the bundled story teller from nothing: grammar, then tokenizer, then a small Llama.

The one idea: the grammar never runs dry, so no document is seen twice, and the only thing which a model of
three million weights can learn is the grammar itself.  Everything is drawn from one seed and counted in
steps, never in seconds, so the same command writes the same checkpoint.

    python serving/tiny_stories/train.py [--out DIR] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from grammar import Message, document
from muon import Muon
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIALS = ("<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")
UNK, BOS, EOS = 0, 1, 2
# A plain document which is a request and its answer: one line, and then a single line break.
REQUEST = re.compile(r"[^\n]+(?=\n[^\n])")
REQUEST_WEIGHT = 0.1
# Short answers are few tokens among many, and as easy to forget.
SHORT_WEIGHT = 4.0
SHORT_ROW = 64
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": UNK,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    # It was trained without tools: a guide makes it write calls (tool_choice).
    "{% if tools %}{{ '<|system|>You can call' }}"
    "{% for tool in tools %}{{ ' ' + tool['function']['name'] }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('the roles are system, user, assistant and tool') }}"
    "{% endif %}"
    "{{ '<|user|>' if message['role'] == 'tool' else '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(seed: int, documents: int) -> Tokenizer:
    """A byte-level BPE of the grammar's words, over all 256 bytes: it can write down any text."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ARCHITECTURE["vocab_size"],
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for _ in range(documents) for text in contents(document(rng)))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def contents(written: str | list[Message]) -> list[str]:
    """The bare texts of a document."""
    return [written] if isinstance(written, str) else [message.content for message in written]


def encode(tokenizer: Tokenizer, written: str | list[Message], rng: random.Random) -> list[tuple[int, float]]:
    """The ids of one document, as a server would see them, each with its weight in the loss.

    Servers disagree about `<s>` (some add none, some two), and people end a prompt with a space; a little of
    both is in the training data, so that neither throws the model off its story.  A request weighs little:
    the model shall answer it, and not go on writing it.
    """

    def plain(text: str, weight: float) -> list[tuple[int, float]]:
        return [(i, weight) for i in tokenizer.encode(text, add_special_tokens=False).ids]

    def worth(answer: str) -> float:
        return SHORT_WEIGHT if len(answer) < 100 else 1.0

    row = [(BOS, 1.0)] * rng.choices((1, 0, 2), (90, 5, 5))[0]
    if isinstance(written, str):
        asked = REQUEST.match(written)
        begin = asked.end() if asked else 0
        cut = begin
        if rng.random() < 0.04:
            cut = max(begin, written.find(" ", rng.randrange(begin, len(written))) + 1)
        row += plain(written[:begin], REQUEST_WEIGHT)
        for part in (written[begin:cut], written[cut:]):
            row += plain(part, worth(written[begin:]))
        return [*row, (EOS, 1.0)]
    for message in written:
        row.append((SPECIALS.index(f"<|{message.role}|>"), 1.0))
        answer = message.role == "assistant"
        row += plain(message.content, worth(message.content) if answer else REQUEST_WEIGHT)
        row += [(EOS, 1.0)] if answer else []
    return row


def batches(
    tokenizer: Tokenizer, seed: int, tokens: int, pool: int = 1536
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and weights of about `tokens` tokens, of documents of like length: hardly any is padding."""
    rng = random.Random(seed)
    while True:
        rows = sorted((encode(tokenizer, document(rng), rng) for _ in range(pool)), key=len)
        short = sum(len(row) < SHORT_ROW for row in rows)
        ready: list[list[list[tuple[int, float]]]] = [[]]
        for row in rows[short:]:
            if (len(ready[-1]) + 1) * len(row) > tokens:
                ready.append([])
            ready[-1].append(row)
        for number, row in enumerate(rows[:short]):
            ready[number % len(ready)].append(row)
        rng.shuffle(ready)
        for chosen in ready:
            width = max(map(len, chosen))
            padded = [row + [(UNK, 0.0)] * (width - len(row)) for row in chosen]
            yield (
                torch.tensor([[i for i, _ in row] for row in padded]),
                torch.tensor([[weight for _, weight in row] for row in padded]),
            )


def build_model() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**ARCHITECTURE))
    depth = (2 * ARCHITECTURE["num_hidden_layers"]) ** -0.5
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.mul_(depth)
    return model


def optimizers_for(model: LlamaForCausalLM, rate: float) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    inner = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    outer = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return Muon(inner, rate), torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.97), weight_decay=0.0)


def train(tokenizer: Tokenizer, seed: int, steps: int, tokens: int, rate: float) -> tuple[LlamaForCausalLM, float]:
    """The trained model, and its loss on the last fiftieth of the steps (none of them seen before)."""

    def share(step: int) -> float:
        """Of the learning rate: up for thirty steps, then level, then down over the last six tenths."""
        return max(0.01, min((step + 1) / 30, 1.0, (steps - step) / (0.6 * steps)))

    torch.manual_seed(seed)
    model = build_model().train()
    optimizers = optimizers_for(model, rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, share) for optimizer in optimizers]
    losses: list[float] = []
    seen, started = 0, time.monotonic()
    for step, (ids, weights) in zip(range(1, steps + 1), batches(tokenizer, seed + 1, tokens), strict=False):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        wanted = weights[:, 1:].flatten()
        loss = (each * wanted).sum() / wanted.sum()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        losses.append(loss.item())
        seen += int((weights > 0).sum())
        if step % 50 == 0 or step == steps:
            recent = losses[-50:]
            speed = seen / (time.monotonic() - started)
            print(f"step {step:5d}  loss {sum(recent) / len(recent):.4f}  {speed:.0f} tokens/s", flush=True)
    last = losses[-max(1, steps // 50) :]
    return model.eval(), sum(last) / len(last)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint with plain, version-neutral configuration files."""
    model.half().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    head = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float16"}
    write_json(folder / "config.json", head | ARCHITECTURE)
    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": UNK}
    write_json(folder / "generation_config.json", ends)
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIALS[UNK],
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "pad_token": SPECIALS[UNK],
        "additional_special_tokens": list(SPECIALS[3:]),
        "model_max_length": ARCHITECTURE["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[1] / "models" / "tiny-stories"
    parser.add_argument("--out", type=Path, default=default, help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--tokens", type=int, default=2560, help="tokens of one batch")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--threads", type=int, default=2, help="part of the recipe: sums differ")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    started = time.monotonic()
    tokenizer = train_tokenizer(options.seed, documents=8000)
    model, loss = train(tokenizer, options.seed, options.steps, options.tokens, options.rate)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out.parent) as scratch:
        save(model, tokenizer, Path(scratch))
        for path in Path(scratch).iterdir():
            path.chmod(0o644)
            path.replace(options.out / path.name)
    weights = sum(weight.numel() for weight in model.parameters())
    print(f"{weights:,} weights, loss {loss:.4f}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
