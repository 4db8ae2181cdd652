"""What TensorRT-LLM meets only with its first requests, looked for while the engine is loaded.

For example, FlashInfer ships its sampling kernels as source: the first request that samples compiles them, which takes
minutes, in the loop that serves all requests. So the engine process sends such a request before clients do.
"""

import json
from pathlib import Path

from djl_trtllm.executor.protocol import Feature, FirstRequest, Limits, Submit
from djl_trtllm.request import Guide, GuideKind, Sampling

_PROMPT_TOKENS = 8
_NEW_TOKENS = 3
"""An iteration that reads the prompt, and some that read a token."""
_GUIDES = frozenset({Feature.JSON, Feature.REGEX, Feature.GRAMMAR, Feature.STRUCTURAL_TAG})
_LOGPROBS = frozenset({Feature.LOGPROBS, Feature.BEAM_LOGPROBS, "top_logprobs"})


def first_requests(limits: Limits, features: frozenset[str]) -> list[FirstRequest]:
    """Return a request of each kind that an engine with these features serves with code of its own."""
    prompt = [1] * max(1, min(_PROMPT_TOKENS, limits.max_prompt_len or _PROMPT_TOKENS, limits.max_seq_len // 2))
    tokens = max(1, min(_NEW_TOKENS, limits.max_seq_len - len(prompt)))
    if limits.beams:
        beams = Sampling(tokens, beam_width=limits.beams)
        requests = [FirstRequest("a request with beams", Submit(0, prompt, beams))]
        if Feature.BEAM_LOGPROBS in features:
            submit = Submit(0, prompt, beams, logprobs=True)
            requests.append(FirstRequest("a request with log-probabilities of beams", submit, features & _LOGPROBS))
        return requests
    greedy = Sampling(tokens)
    sampled = Sampling(tokens, do_sample=True, temperature=0.8, top_k=40, top_p=0.9)
    requests = [
        FirstRequest("a greedy request", Submit(0, prompt, greedy)),
        FirstRequest("a sampled request (top_k, top_p)", Submit(0, prompt, sampled)),
    ]
    if Feature.LOGPROBS in features:
        submit = Submit(0, prompt, greedy, logprobs=True)
        requests.append(FirstRequest("a request with log-probabilities", submit, features & _LOGPROBS))
    if Feature.REGEX in features:
        submit = Submit(0, prompt, greedy, guide=Guide(GuideKind.REGEX, "[a-z]+"))
        requests.append(FirstRequest("a guided request", submit, features & _GUIDES))
    return requests


def guide_problem(package: str, tokenizer_dir: str, *, trust_remote_code: bool) -> str | None:
    """Return why TensorRT-LLM cannot prepare `package` for the model's guides, which would end the load; else None.

    It makes a table of the tokenizer (`_xgrammar_tokenizer_info` in `llmapi/tokenizer.py`, about 1.2) for every model
    with a guided decoding backend, also where no request has a guide.
    """
    if _is_ordinary(Path(tokenizer_dir)):
        return None
    from transformers import AutoTokenizer  # takes seconds where TensorRT-LLM has not imported it yet

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_dir, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception:
        return None  # the load finds out and says more
    name = type(tokenizer).__name__
    if tokenizer.eos_token_id is None:
        return f"the tokenizer ({name}) has no end token"
    files = tokenizer.vocab_files_names.get("vocab_file", "")
    if tokenizer.is_fast or (package == "xgrammar" and "tiktoken" in files):
        return None
    return f"{package} reads tokenizers with a tokenizer.json, and this one is a {name} in Python"


def _is_ordinary(tokenizer_dir: Path) -> bool:
    """Return whether the files alone show a fast tokenizer with an end token, as those of most models do."""
    try:
        config = json.loads((tokenizer_dir / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    has_end = isinstance(config, dict) and bool(config.get("eos_token")) and "auto_map" not in config
    return has_end and (tokenizer_dir / "tokenizer.json").is_file()
