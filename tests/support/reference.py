"""What Hugging Face transformers says on the same checkpoint, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """The checkpoint in transformers."""

    def __init__(self, model: Path) -> None:
        # The model is too small to gain from a second thread, and the server needs the other cores.
        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def ids(self, text: str) -> list[int]:
        """The prompt's tokens."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def greedy(self, prompt_ids: list[int], max_new_tokens: int, **settings: Any) -> list[int]:
        """`generate(do_sample=False)`: the new tokens, the end token included."""
        prompt = torch.tensor([prompt_ids])
        settings = {"do_sample": False, "max_new_tokens": max_new_tokens, **settings}
        with torch.inference_mode():
            output = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        ids: list[int] = output[0, len(prompt_ids) :].tolist()
        return ids

    def logits(self, ids: list[int], last: int = 1) -> torch.Tensor:
        """Logits after each of the `last` tokens."""
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0, -last:].float()

    def logprobs(self, prompt_ids: list[int], output_ids: list[int]) -> list[float]:
        """Log-probability of each output token, from the whole softmax."""
        logits = self.logits((prompt_ids + output_ids)[:-1], last=len(output_ids))
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(output_ids)[:, None])
        return [float(value) for value in chosen[:, 0]]

    def margins(self, prompt_ids: list[int], output_ids: list[int]) -> list[float]:
        """How far the best token was ahead of the second best, at each output token."""
        best = self.logits((prompt_ids + output_ids)[:-1], last=len(output_ids)).topk(2).values
        return [float(value) for value in best[:, 0] - best[:, 1]]
