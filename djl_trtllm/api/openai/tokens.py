"""`/tokenize` and `/detokenize`, in vLLM's format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from djl_trtllm.api.base import ModelContext, RawRequest, Reply
from djl_trtllm.api.messages import read_messages
from djl_trtllm.api.openai.parameters import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from djl_trtllm.api.openai.parse import read_template
from djl_trtllm.api.openai.tools import fit_messages
from djl_trtllm.api.parameters import Problems, read_object, show
from djl_trtllm.errors import InvalidRequestError, PromptTooLongError

_MOST_IDS = 2**20
_MOST_CHARACTERS = 2**20
"""Of a text, or more if the model's prompts may be longer: a megabyte takes a second, and 100 MB of memory."""
_CHARACTERS_OF_A_TOKEN = 16

Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]


def tokenize(request: RawRequest, model: ModelContext, render: Render | None = None) -> Reply:
    """Token ids of a `prompt`, or of `messages` in the model's chat template, which `render` renders.

    Raises InvalidRequestError.
    """
    payload, problems = read_object(request), Problems.of(model.options)
    values = TOKENIZE_FIELDS.read(payload, problems, "field")
    if ("messages" in payload) == ("prompt" in payload):
        problems.invalid.append("expected either 'prompt' or 'messages'")
    messages = None
    if "messages" in payload:
        messages = fit_messages(read_messages(payload["messages"], problems), model, problems)
    problems.raise_any()
    tokenizer = model.tokenizer
    if messages is None:
        text, special = values.get("prompt", ""), values.get("add_special_tokens", True)
    else:
        template = read_template(values)
        text = tokenizer.render_chat(messages, **template) if render is None else render(messages, template)
        special = values.get("add_special_tokens", False)
    most = max(_MOST_CHARACTERS, _CHARACTERS_OF_A_TOKEN * (model.options.max_input_len or 0))
    if len(text) > most:
        raise PromptTooLongError(f"the text has {len(text)} characters: expected at most {most}")
    ids = tokenizer.encode(text, special)
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_seq_len, "tokens": ids}
    if values.get("return_token_strs"):
        reply["token_strs"] = [tokenizer.raw.id_to_token(id_) for id_ in ids]
    return Reply.json(reply)._replace(headers=problems.headers)


def detokenize(request: RawRequest, model: ModelContext) -> Reply:
    """The text of `tokens`. Raises InvalidRequestError."""
    payload, problems = read_object(request), Problems.of(model.options)
    DETOKENIZE_FIELDS.read(payload, problems, "field")
    problems.raise_any()
    ids, size = payload.get("tokens"), model.tokenizer.vocab_size
    if type(ids) is not list or len(ids) > _MOST_IDS or not all(type(id_) is int and 0 <= id_ < size for id_ in ids):
        raise InvalidRequestError(f"'tokens' is {show(ids)}: expected a list of token ids from 0 to {size - 1}")
    return Reply.json({"prompt": model.tokenizer.decode(ids, False)})._replace(headers=problems.headers)
