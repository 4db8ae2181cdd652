"""What transformers generates from the bundled checkpoint, kept in a file: `python -m tests.support.golden` writes it.

Tests that compare with the file need neither torch nor transformers; one test compares the file with transformers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tests.support.models import TINY_STORIES
from tests.support.prompts import DOCUMENT, SHORT, SIXTEEN, story

if TYPE_CHECKING:
    import torch

    from tests.support.reference import Reference

Tokens: TypeAlias = "dict[str, list[list[int]]]"
"""Per case, the tokens after each prompt."""

FILE = Path(__file__).with_suffix(".json")
GREEDY = "greedy"
NEW_TOKENS = 64
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 1.5, "frequency_penalty": 0.7}
PENALISED = (DOCUMENT, *SHORT[1:4], story(6))
PENALISED_TOKENS = 40
_END = 2


def tokens_for(model: Path) -> Tokens:
    """The file's tokens for the bundled checkpoint; for another one transformers is asked."""
    if model.resolve() == TINY_STORIES.resolve():
        kept: Tokens = json.loads(FILE.read_text())
        return kept
    from tests.support.reference import Reference

    return make(Reference(model))


def make(reference: Reference) -> Tokens:
    """Ask transformers."""

    def presence(logits: torch.Tensor, output: list[int]) -> None:
        for token in set(output):
            logits[token] -= PENALTIES["presence_penalty"]

    def frequency(logits: torch.Tensor, output: list[int]) -> None:
        for token, count in Counter(output).items():
            logits[token] -= PENALTIES["frequency_penalty"] * count

    repetition = {"repetition_penalty": PENALTIES["repetition_penalty"]}
    return {
        GREEDY: [reference.greedy(reference.ids(prompt), NEW_TOKENS) for prompt in SIXTEEN],
        "repetition_penalty": [
            reference.greedy(reference.ids(prompt), PENALISED_TOKENS, **repetition) for prompt in PENALISED
        ],
        "presence_penalty": [_greedy_with(reference, prompt, presence) for prompt in PENALISED],
        "frequency_penalty": [_greedy_with(reference, prompt, frequency) for prompt in PENALISED],
    }


def _greedy_with(reference: Reference, prompt: str, penalise: Callable[[torch.Tensor, list[int]], None]) -> list[int]:
    """Greedy output where `penalise(logits, output)` changes the logits before each choice."""
    prompt_ids, output = reference.ids(prompt), list[int]()
    while len(output) < PENALISED_TOKENS and output[-1:] != [_END]:
        logits = reference.logits(prompt_ids + output)[0].clone()
        penalise(logits, output)
        output.append(int(logits.argmax()))
    return output


def main() -> None:
    """Write the file."""
    from tests.support.reference import Reference

    cases = make(Reference(TINY_STORIES)).items()
    lines = [f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, tokens)) + "\n]" for name, tokens in cases]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
