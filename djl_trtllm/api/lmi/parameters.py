"""The tables of LMI's parameters: those that DJL documents, and those of TGI and vLLM that clients send.

Targets are the field names of `Sampling`, `GenerationRequest` and `Presentation`. Ranges are DJL's if it documents
them, otherwise TGI's; `top_k` -1 means 0, as in vLLM.
"""

from __future__ import annotations

from djl_trtllm.api.guides import GUIDES
from djl_trtllm.api.parameters import (
    BOOLEAN,
    IGNORED,
    OBJECT,
    STRINGS,
    STRINGS_OR_NONE,
    TEXT,
    TOKEN_IDS,
    Kind,
    Parameter,
    Table,
    integer,
    number,
)

_COUNT = 2**31 - 1
"""No request generates more tokens than this; the model's own limits are checked after tokenising."""


def _read_top_k(value: object) -> int:
    count: int = integer(-1, _COUNT).read(value)
    return max(count, 0)


_TOP_K = Kind(f"an integer from 0 to {_COUNT}, 0 for the whole vocabulary", _read_top_k)


def _read_adapter(value: object) -> str | None:
    names = value if type(value) is list else [value]
    if len(names) > 1:
        raise ValueError(" (a request is one prompt, and has one adapter)")
    return TEXT.read(names[0]) or None if names else None


_ADAPTER = (
    Parameter(("adapters", "adapter_id"), Kind("the name of an adapter, or a list of one", _read_adapter), "adapter"),
)
_MOST_BEAMS = 64

_SAMPLING = (
    Parameter(("do_sample",), BOOLEAN, "do_sample"),
    Parameter(("top_k",), _TOP_K, "top_k"),
    Parameter(("top_p",), number(0, 1, above=True), "top_p"),
    Parameter(("repetition_penalty",), number(0, above=True), "repetition_penalty"),
    Parameter(("presence_penalty",), number(-2, 2), "presence_penalty"),
    Parameter(("frequency_penalty",), number(-2, 2), "frequency_penalty"),
    Parameter(("seed",), integer(0, 2**64 - 1), "seed"),
    Parameter(("n",), integer(1), "n"),
    Parameter(("best_of",), integer(1), "best_of"),
    Parameter(("min_new_tokens", "min_length", "min_tokens"), integer(0, _COUNT), "min_new_tokens"),
    Parameter(("stop_sequences", "stop"), STRINGS, "stop", union=True),
    Parameter(("stop_token_ids",), TOKEN_IDS, "stop_token_ids"),
    Parameter(("ignore_eos_token", "ignore_eos"), BOOLEAN, "ignore_eos"),
    Parameter(("truncate",), integer(1, _COUNT), "truncate"),
    Parameter(("min_p",), number(0, 1), "min_p"),
    Parameter(("no_repeat_ngram_size",), integer(0, _COUNT), "no_repeat_ngram_size"),
    Parameter(("bad_sequences", "bad_words"), STRINGS_OR_NONE, "bad", union=True),
    Parameter(("num_beams", "beam_width"), integer(1, _MOST_BEAMS), "beam_width"),
    Parameter(("length_penalty",), number(-10, 10), "length_penalty"),
    Parameter(("early_stopping",), BOOLEAN, "early_stopping"),
    Parameter(("beam_search_diversity_rate",), number(0, 10), "beam_search_diversity_rate"),
    *GUIDES,
    Parameter(("output_formatter",), TEXT, "output_formatter"),
)

_NOT_HONOURED = (
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

INPUTS_PARAMETERS = Table(
    _SAMPLING,
    _ADAPTER,
    _NOT_HONOURED,
    (
        Parameter(("max_new_tokens",), integer(1, _COUNT), "max_new_tokens"),
        Parameter(("temperature",), number(0), "temperature"),
        Parameter(("details",), BOOLEAN, "details"),
        Parameter(("return_full_text",), BOOLEAN, "return_full_text"),
        Parameter(("decoder_input_details",), BOOLEAN, "prefill"),
        Parameter(("logprobs",), neutral=(0, 1, True, False), advice="only the chosen token's is available"),
    ),
    elsewhere=dict.fromkeys(("inputs", "stream", "messages"), "beside 'parameters', not in it"),
)
"""`parameters` of `{"inputs", "parameters", "stream"}`."""

CHAT_FIELDS = Table(
    _SAMPLING,
    _ADAPTER,
    _NOT_HONOURED,
    (
        Parameter(("messages",), target=IGNORED),
        Parameter(("max_tokens", "max_completion_tokens", "max_new_tokens"), integer(1, _COUNT), "max_new_tokens"),
        Parameter(("temperature",), number(0, 2), "temperature"),
        Parameter(("stream",), BOOLEAN, "stream"),
        Parameter(("stream_options",), OBJECT, "stream_options"),
        Parameter(("logprobs",), BOOLEAN, "logprobs"),
        Parameter(("top_logprobs",), neutral=(0, 1), advice="only the chosen token's is available"),
        Parameter(("tools",), neutral=([],), advice="this dialect has no tool calls"),
        Parameter(("tool_choice",), neutral=("none", "auto"), advice="this dialect has no tool calls"),
        Parameter(("model",), target=IGNORED),
        Parameter(("user",), target=IGNORED),
    ),
    elsewhere={
        "inputs": "to requests without 'messages'",
        "parameters": "to requests without 'messages', here its members stand beside 'messages'",
    },
)
"""Top level of `{"messages", ...}`."""

INPUTS_FIELDS = Table(
    _NOT_HONOURED,
    _ADAPTER,
    (
        Parameter(("inputs",), target=IGNORED),
        Parameter(("parameters",), target=IGNORED),
        Parameter(("stream",), BOOLEAN, "stream"),
        Parameter(("model",), target=IGNORED),
        # Clients of Hugging Face's hosted inference API send it to every server.
        Parameter(("options",), target=IGNORED),
    ),
    elsewhere=dict.fromkeys(INPUTS_PARAMETERS.rows, "in 'parameters'")
    | {"prompt": "to requests under option.bedrock_compat, here it is 'inputs'"},
)
"""Top level of `{"inputs", "parameters", "stream"}`."""

BEDROCK_FIELDS = Table(
    (
        Parameter(("prompt",), target=IGNORED),
        Parameter(("temperature",), number(0), "temperature"),
        Parameter(("top_p",), number(0, 1, above=True), "top_p"),
        Parameter(("max_gen_len",), integer(1, _COUNT), "max_new_tokens"),
    )
)
"""Top level of `{"prompt", ...}` under `option.bedrock_compat`."""
