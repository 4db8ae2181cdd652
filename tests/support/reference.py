"""Prompts for the bundled model, what transformers answers in float32, and what servers that speculate answer.

`python -m tests.support.reference` writes what it generates into golden.json: tests that compare with the file need
neither torch nor transformers, and one test compares the file with transformers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.engines.helpers import write_tokenizer
from tests.support.client import Answer, lmi, raw_post, read_until
from tests.support.models import TINY_STORIES
from tests.support.processes import wait_until
from tests.support.server import Server

DOCUMENT = "tell me a story of the little red riding hood"
"""The prompt of the LMI document's first request."""

_SENTENCES = (
    "Once upon a time there was a little girl who lived with her mother at the edge of the woods.",
    "Her grandmother had made her a red hood, and she wore it every day.",
    'One sunny day her mother said, "Take this basket of bread and butter to your grandmother."',
    "The girl walked along the path, and the birds sang in the trees.",
    "In the middle of the wood she met a big wolf.",
    '"Where are you going, little girl?" asked the wolf.',
    '"To my grandmother\'s cottage," she said.',
    "The wolf ran ahead, and knocked at the door.",
    "The flowers were yellow and blue, and she picked a big bunch of them.",
    "A woodcutter heard the noise, and came with his axe.",
    "The old woman was ill in bed and very tired.",
    "They all sat down at the table and ate the bread and the butter.",
    "The fox looked out of the bushes and said nothing at all.",
    "It was dark in the forest, and the wind was cold.",
    "The three little pigs lived in a house of bricks.",
    "A kind bear found the lost child and brought her home.",
)


def story(sentences: int, first: int = 0) -> str:
    """A text of `sentences` sentences (about 20 tokens each), different for every `first` of 0 to 15."""
    count = len(_SENTENCES)
    step = 2 * (first // 2) + 1
    return " ".join(_SENTENCES[(first + step * at) % count] for at in range(sentences))


SHORT = (
    DOCUMENT,
    "Once",
    "A wolf",
    "The grandmother was",
    "Once upon a time there was a",
    "tell me a story of the three little pigs",
    "In the dark woods lived an old fox who",
    '"Who is there?" said the',
)

SIXTEEN = (*SHORT, *(story(length, first) for first, length in enumerate((1, 2, 3, 5, 8, 13, 21, 34))))
"""Prompts of one token to several hundred."""


# -- What Hugging Face transformers says on the same checkpoint, in float32 --------------------------------------------

# -- tiny random checkpoints of the architectures that people serve most, and what transformers generates from them ----

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


class Reference:
    """The checkpoint in transformers."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
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
        prompt = self.torch.tensor([prompt_ids])
        settings = {"do_sample": False, "max_new_tokens": max_new_tokens, **settings}
        with self.torch.inference_mode():
            output = self.model.generate(prompt, attention_mask=self.torch.ones_like(prompt), **settings)
        ids: list[int] = output[0, len(prompt_ids) :].tolist()
        return ids

    def logits(self, ids: list[int], last: int = 1) -> Any:
        """Logits after each of the `last` tokens."""
        with self.torch.inference_mode():
            return self.model(self.torch.tensor([ids])).logits[0, -last:].float()

    def logprobs(self, prompt_ids: list[int], output_ids: list[int]) -> list[float]:
        """Log-probability of each output token, from the whole softmax."""
        logits = self.logits((prompt_ids + output_ids)[:-1], last=len(output_ids))
        chosen = self.torch.log_softmax(logits, -1).gather(1, self.torch.tensor(output_ids)[:, None])
        return [float(value) for value in chosen[:, 0]]


# -- what transformers generates from the bundled checkpoint, kept in a file -------------------------------------------

if TYPE_CHECKING:
    import torch

Tokens: TypeAlias = "dict[str, list[list[int]]]"
"""The tokens after each prompt, by case."""

FILE = Path(__file__).with_name("golden.json")
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
    cases = make(Reference(TINY_STORIES)).items()
    lines = [f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, tokens)) + "\n]" for name, tokens in cases]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()


def said(answer: Answer) -> tuple[int, list[int], str, dict[str, Any]]:
    """All that a response says, but for figures of drafts and the last digits of log-probabilities."""
    found = answer.json
    details = found["details"]
    tokens = details.pop("tokens")
    accepted = details.pop("accepted_tokens", None)
    details.pop("drafted_tokens", None)
    assert accepted is None or 0 <= accepted < len(tokens)
    assert all(token["log_prob"] is not None for token in tokens)
    return answer.status, [token["id"] for token in tokens], found["generated_text"], details


def check_that_a_client_may_leave(speculating: Server, server: Server) -> None:
    """A client that leaves a stream ends its own sequence, and the answers to others stay those of `server`."""
    cancelled = speculating.finished("cancelled")
    with speculating.connect() as leaving:
        endless = lmi(SHORT[0], stream=True, max_new_tokens=400, ignore_eos=True)
        leaving.sendall(raw_post(json.dumps(endless).encode()))
        read_until(leaving, b'"token"')
    asked = [lmi(text, max_new_tokens=60, details=True) for text in SHORT[:6]]
    assert [said(each) for each in speculating.together(asked)] == [said(each) for each in server.together(asked)]
    wait_until(lambda: speculating.finished("cancelled") == cancelled + 1, what="the request is cancelled")
    wait_until(lambda: speculating.metric("running") == 0)
