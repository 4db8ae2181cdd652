"""The sampling parameters that dialects share, and how their values become a `GenerationRequest`.

Targets are the field names of `Sampling` and `GenerationRequest`. Ranges are DJL's if it documents them, otherwise
TGI's; `top_k` -1 means 0, as in vLLM.
"""

from __future__ import annotations

from typing import Any

from djl_trtllm.api.guides import GUIDES
from djl_trtllm.api.parameters import (
    BOOLEAN,
    STRINGS,
    STRINGS_OR_NONE,
    TEXT,
    TOKEN_IDS,
    Kind,
    Parameter,
    Problems,
    integer,
    number,
)
from djl_trtllm.request import GenerationRequest, Sampling

_MOST_SEQUENCES = 16
"""Of one request."""
_SAMPLING_FIELDS = frozenset(Sampling.__struct_fields__)

MOST_TOKENS = 2**31 - 1
"""No request generates more tokens than this; the model's own limits are checked after tokenising."""


def _read_top_k(value: object) -> int:
    count: int = integer(-1, MOST_TOKENS).read(value)
    return max(count, 0)


_TOP_K = Kind(
    f"an integer from 0 to {MOST_TOKENS}, 0 for the whole vocabulary",
    _read_top_k,
    {"type": "integer", "minimum": -1, "maximum": MOST_TOKENS},
)


def _read_adapter(value: object) -> str | None:
    names = value if type(value) is list else [value]
    if len(names) > 1:
        raise ValueError(" (a request is one prompt, and has one adapter)")
    return TEXT.read(names[0]) or None if names else None


_ADAPTER = Kind(
    "the name of an adapter, or a list of one",
    _read_adapter,
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 1}]},
)
ADAPTER = (Parameter(("adapters", "adapter_id"), _ADAPTER, "adapter"),)
_MOST_BEAMS = 64

SAMPLING = (
    Parameter(("do_sample",), BOOLEAN, "do_sample"),
    Parameter(("top_k",), _TOP_K, "top_k"),
    Parameter(("top_p",), number(0, 1, above=True), "top_p"),
    Parameter(("repetition_penalty",), number(0, above=True), "repetition_penalty"),
    Parameter(("presence_penalty",), number(-2, 2), "presence_penalty"),
    Parameter(("frequency_penalty",), number(-2, 2), "frequency_penalty"),
    Parameter(("seed",), integer(0, 2**64 - 1), "seed"),
    Parameter(("n",), integer(1), "n"),
    Parameter(("best_of",), integer(1), "best_of"),
    Parameter(("min_new_tokens", "min_length", "min_tokens"), integer(0, MOST_TOKENS), "min_new_tokens"),
    Parameter(("stop_sequences", "stop"), STRINGS, "stop", union=True),
    Parameter(("stop_token_ids",), TOKEN_IDS, "stop_token_ids"),
    Parameter(("ignore_eos_token", "ignore_eos"), BOOLEAN, "ignore_eos"),
    Parameter(("truncate",), integer(1, MOST_TOKENS), "truncate"),
    Parameter(("min_p",), number(0, 1), "min_p"),
    Parameter(("no_repeat_ngram_size",), integer(0, MOST_TOKENS), "no_repeat_ngram_size"),
    Parameter(("bad_sequences", "bad_words"), STRINGS_OR_NONE, "bad", union=True),
    Parameter(("num_beams", "beam_width"), integer(1, _MOST_BEAMS), "beam_width"),
    Parameter(("length_penalty",), number(0, 10), "length_penalty"),
    Parameter(("early_stopping",), BOOLEAN, "early_stopping"),
    Parameter(("beam_search_diversity_rate",), number(0, 10), "beam_search_diversity_rate"),
    *GUIDES,
)

NOT_HONOURED = (
    Parameter(("top_n_tokens",), neutral=(0,), advice="tokens carry the chosen token's log-probability only"),
    Parameter(("prompt_logprobs",), neutral=(0, False)),
    Parameter(("typical_p",), neutral=(1,), advice="use 'top_p'"),
    Parameter(("watermark",), neutral=(False,)),
    Parameter(("logit_bias",), neutral=({},)),
    Parameter(("cached_prompt",), advice="equal prompt beginnings are reused by themselves (prefix caching)"),
    Parameter(("include_stop_str_in_output",), neutral=(False,)),
    Parameter(("skip_special_tokens",), neutral=(True,)),
    Parameter(("spaces_between_special_tokens",), neutral=(True,)),
)


def read_sampling(values: dict[str, Any], problems: Problems, *, ranked: bool = False) -> Sampling:
    """The sampling of a request from what `Table.read` found in it.

    A request without `do_sample` samples if it sets `temperature` (not 1), `top_k` (above 1) or `top_p` (below 1).
    Temperature 0 is greedy. `ranked`: the response has the best sequence first. A dialect puts its own number of new
    tokens, for requests that give none, into `values` as `default_new_tokens`.
    """
    chosen = {name: value for name, value in values.items() if name in _SAMPLING_FIELDS}
    if "do_sample" not in chosen:
        chosen["do_sample"] = (
            chosen.get("temperature", 1.0) != 1.0 or chosen.get("top_k", 0) > 1 or chosen.get("top_p", 1.0) < 1.0
        )
    if chosen.get("temperature") == 0:
        # At temperature 0, sampling always takes the most likely token.
        del chosen["temperature"]
        chosen["do_sample"] = False
    n = chosen.setdefault("n", 1)
    beams = chosen.get("beam_width", 1)
    if beams > 1 and chosen.get("best_of", beams) != beams:
        problems.invalid.append(f"'num_beams' is {beams} and 'best_of' {chosen['best_of']}: give one of them")
    if beams > 1:
        chosen["do_sample"] = False
    best_of = beams if beams > 1 else chosen.get("best_of", n)
    if best_of < n:
        name = "num_beams" if beams > 1 else "best_of"
        problems.invalid.append(f"'{name}' is {best_of}: expected at least 'n', which is {n}")
    if max(n, best_of) > _MOST_SEQUENCES:
        name = "n" if n == max(n, best_of) and "n" in values else "num_beams" if beams > 1 else "best_of"
        problems.invalid.append(f"'{name}' is {max(n, best_of)}: expected at most {_MOST_SEQUENCES}")
        n = best_of = beams = chosen["n"] = chosen["beam_width"] = 1  # the encoder of a refused request stays small
    chosen["best_of"] = best_of if beams == 1 and (best_of > n or (ranked and n > 1)) else None
    sampling = Sampling(**chosen)
    most = sampling.max_new_tokens or values.get("default_new_tokens", 0)
    if 0 < most < sampling.min_new_tokens:
        problems.invalid.append(
            f"the least number of new tokens is {sampling.min_new_tokens}: expected at most 'max_new_tokens', "
            f"which is {most}{'' if sampling.max_new_tokens else ' by default'}"
        )
    return sampling


def generation_request(
    values: dict[str, Any],
    sampling: Sampling,
    logprobs: bool,
    *,
    prompt: str | None = None,
    messages: list[dict[str, Any]] | None = None,
    template: dict[str, Any] | None = None,
) -> GenerationRequest:
    """The request of these values. `logprobs`: the response has a place for log-probabilities."""
    return GenerationRequest(
        prompt=prompt,
        messages=messages,
        template=template,
        sampling=sampling,
        stop=values.get("stop", ()),
        stop_token_ids=values.get("stop_token_ids", ()),
        logprobs=logprobs,
        asks_logprobs=values.get("details", False),
        top_logprobs=values.get("top_logprobs", 0),
        needs_logprobs=values.get("logprobs", False) or sampling.best_of is not None,
        truncate=values.get("truncate"),
        bad=values.get("bad", ()),
        guide=values.get("guide"),
        adapter=values.get("adapter"),
        default_new_tokens=values.get("default_new_tokens", 0),
    )


def refuse_ranked_stream(sampling: Sampling, beams: str, problems: Problems) -> None:
    """Refuse a stream whose best sequences are chosen at its end; `beams` is the name of the parameter."""
    if sampling.sequences > sampling.n:
        problems.invalid.append(
            f"'best_of' or '{beams}' is {sampling.sequences}, 'n' {sampling.n} and 'stream' true: which sequences "
            "are the best is known only at the end, expected 'best_of' to be 'n' and no beams in a stream"
        )
