"""A LitServe server as its documentation has it: transformers' `generate`, one request at a time, OpenAI's API.

Run with the Python of an environment that has litserve, transformers and torch. Environment: PORT, MODEL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import litserve
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer


class Generation(litserve.LitAPI):  # type: ignore[misc]  # litserve is in another environment
    def setup(self, device: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(os.environ["MODEL"])
        self.model = AutoModelForCausalLM.from_pretrained(os.environ["MODEL"], dtype="float32")

    def decode_request(self, request: Any) -> Any:
        return request

    def predict(self, request: Any) -> Iterator[str]:
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True)
        tokens = request.max_tokens
        arguments = {**prompt, "streamer": streamer, "max_new_tokens": tokens, "min_new_tokens": tokens}
        thread = threading.Thread(target=self.model.generate, kwargs={**arguments, "do_sample": False})
        thread.start()
        yield from streamer
        thread.join()


if __name__ == "__main__":
    server = litserve.LitServer(Generation(spec=litserve.OpenAISpec()), accelerator="cpu", timeout=600)
    server.run(host="127.0.0.1", port=int(os.environ["PORT"]), generate_client_file=False)
