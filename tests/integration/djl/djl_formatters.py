"""What djl_python itself answers: run with djl_python on PYTHONPATH, a list of cases on stdin, their answers on stdout.

A case has the request (`payload`), the model's options (`configs`), the prompt, its tokens, and what is
generated: `steps` of a sequence's index, a token and the finish reason if it is the last. A token is
[id, text, log_prob, special_token, error_msg]. The request takes djl_python's own way: its input parser, its `Request`,
its output formatter, a token at a time.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from djl_python.input_parser import add_server_maintained_params, format_input  # type: ignore[import-not-found]
from djl_python.inputs import Input  # type: ignore[import-not-found]
from djl_python.request import Request  # type: ignore[import-not-found]
from djl_python.request_io import Token  # type: ignore[import-not-found]


class Tokenizer:
    """A chat template that makes one prompt of any messages."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    def apply_chat_template(self, messages: object, **options: object) -> str:
        """The prompt."""
        return self._prompt


def answer(case: dict[str, Any]) -> dict[str, str]:
    """Content type and body."""
    item = Input()
    item.properties = {"Content-Type": "application/json"}
    item.content.add(key="data", value=json.dumps(case["payload"]).encode())
    configs = SimpleNamespace(**case["configs"], bedrock_compat=False)
    options = {"configs": configs, "is_rolling_batch": True, "tokenizer": Tokenizer(case["prompt"])}
    request_input = format_input(item, **options)
    request_input.request_id = 0
    request_input.tgi_compat = configs.tgi_compat
    add_server_maintained_params(request_input, item, **options)
    request = Request(request_input=request_input)
    output = request.request_output
    output.prompt_tokens_details = [Token(*token) for token in case["prompt_tokens"]]
    running = {index for index, *_ in case["steps"]}
    output.other_sequences_indices = sorted(running)[1:]
    body = ""
    for index, token, finish_reason in case["steps"]:
        output.set_next_token(Token(*token), index, finish_reason is not None, finish_reason)
        running -= {index} if finish_reason is not None else set()
        output.finished = not running
        body += request.get_next_token()
        request.reset_next_token()
    return {"content_type": request.get_content_type(), "body": body}


if __name__ == "__main__":
    json.dump([answer(case) for case in json.load(sys.stdin)], sys.stdout)
