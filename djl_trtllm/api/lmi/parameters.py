"""The tables of LMI's parameters: those that DJL documents, and those of TGI and vLLM that clients send.

Targets are the field names of `Sampling`, `GenerationRequest` and `Presentation`.
"""

from __future__ import annotations

from djl_trtllm.api.messages import MESSAGES
from djl_trtllm.api.parameters import (
    BOOLEAN,
    IGNORED,
    OBJECT,
    PROMPT,
    TEXT,
    Parameter,
    Table,
    integer,
    number,
)
from djl_trtllm.api.sampling import ADAPTER, MOST_TOKENS, NOT_HONOURED, SAMPLING

_FORMATTER = (Parameter(("output_formatter",), TEXT, "output_formatter"),)
# litellm sends the address that its requests go to along with their parameters.
_LITELLM = (Parameter(("sagemaker_base_url",), target=IGNORED),)

INPUTS_PARAMETERS = Table(
    SAMPLING,
    _FORMATTER,
    _LITELLM,
    ADAPTER,
    NOT_HONOURED,
    (
        Parameter(("max_new_tokens",), integer(1, MOST_TOKENS), "max_new_tokens"),
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
    SAMPLING,
    _FORMATTER,
    _LITELLM,
    ADAPTER,
    NOT_HONOURED,
    (
        Parameter(("messages",), MESSAGES, IGNORED),
        Parameter(("max_tokens", "max_completion_tokens", "max_new_tokens"), integer(1, MOST_TOKENS), "max_new_tokens"),
        Parameter(("temperature",), number(0, 2), "temperature"),
        Parameter(("stream",), BOOLEAN, "stream"),
        Parameter(("stream_options",), OBJECT, "stream_options"),
        Parameter(("logprobs",), BOOLEAN, "logprobs"),
        Parameter(("top_logprobs",), neutral=(0, 1), advice="only the chosen token's is available"),
        Parameter(("tools",), neutral=([],), advice="/v1/chat/completions has tool calls"),
        Parameter(("tool_choice",), neutral=("none", "auto"), advice="/v1/chat/completions has tool calls"),
        Parameter(("model",), target=IGNORED),
        Parameter(("user",), target=IGNORED),
    ),
    elsewhere={
        "inputs": "to requests without 'messages'",
        "parameters": "to requests without 'messages', here its members stand beside 'messages'",
    },
    required=("messages",),
)
"""Top level of `{"messages", ...}`."""

INPUTS_FIELDS = Table(
    NOT_HONOURED,
    ADAPTER,
    (
        Parameter(("inputs",), PROMPT, IGNORED),
        Parameter(("parameters",), INPUTS_PARAMETERS.kind, IGNORED),
        Parameter(("stream",), BOOLEAN, "stream"),
        Parameter(("model",), target=IGNORED),
        # Clients of Hugging Face's hosted inference API send it to every server.
        Parameter(("options",), target=IGNORED),
    ),
    elsewhere=dict.fromkeys(INPUTS_PARAMETERS.rows, "in 'parameters'")
    | {"prompt": "to requests under option.bedrock_compat, here it is 'inputs'"},
    required=("inputs",),
)
"""Top level of `{"inputs", "parameters", "stream"}`."""

BEDROCK_FIELDS = Table(
    (
        Parameter(("prompt",), PROMPT, IGNORED),
        Parameter(("temperature",), number(0), "temperature"),
        Parameter(("top_p",), number(0, 1, above=True), "top_p"),
        Parameter(("max_gen_len",), integer(1, MOST_TOKENS), "max_new_tokens"),
    ),
    required=("prompt",),
)
"""Top level of `{"prompt", ...}` under `option.bedrock_compat`."""
