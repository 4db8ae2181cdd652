"""A proxy between a program and the bundled model, which has no idea of tools and reads 4,096 tokens.

It sends on what the program sends, with long texts cut, and forces the one call that the test wants: the model's output
is guided to this call until the conversation has a result, and to an answer from then on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import orjson

LONGEST = 200
"""Characters of a text that is sent on."""
TOKENS = 256
ANSWER = {"heard": "a wolf"}
"""What the model says in the end. Of its own it goes on until a limit, which a program may take as an error."""


@dataclass
class Forced:
    """The call that the model is made to make, and what became of the requests that had its tool."""

    tool: str
    arguments: dict[str, str]
    calls: int = 0
    answers: int = 0
    failures: list[str] = field(default_factory=list)

    def edit(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The body that is sent on."""
        anthropic = "/messages" in path
        offered = [tool for tool in body.pop("tools", ()) if tool.get("name") == self.tool]
        body = cut({name: value for name, value in body.items() if name not in ("system", "instructions")})
        if not offered or path.partition("?")[0].endswith("count_tokens"):
            return body
        body |= {"max_tokens" if anthropic else "max_output_tokens": TOKENS}
        if any(kind in ("tool_result", "function_call_output") for kind in kinds_of(body)):
            self.answers += 1
            form = {"type": "json_schema", "schema": schema_of(ANSWER)}
            if anthropic:
                return body | {"output_config": {"format": form}}
            return body | {"text": {"format": {**form, "name": "answer"}}}
        self.calls += 1
        schema = schema_of(self.arguments)
        if anthropic:
            body["tools"] = [{"name": self.tool, "input_schema": schema}]
            body["tool_choice"] = {"type": "tool", "name": self.tool, "disable_parallel_tool_use": True}
        else:
            body["tools"] = [{"type": "function", "name": self.tool, "parameters": schema, "strict": True}]
            body["tool_choice"] = {"type": "function", "name": self.tool}
        return body


def schema_of(values: dict[str, str]) -> dict[str, Any]:
    """The schema of an object with these values alone."""
    properties = {name: {"type": "string", "enum": [value]} for name, value in values.items()}
    return {"type": "object", "properties": properties, "required": [*values], "additionalProperties": False}


def cut(value: Any) -> Any:
    if isinstance(value, str):
        return value[:LONGEST]
    if isinstance(value, list):
        return [cut(each) for each in value]
    return {name: cut(each) for name, each in value.items()} if isinstance(value, dict) else value


def kinds_of(value: Any) -> Iterator[Any]:
    """The types of all objects in a body."""
    if isinstance(value, dict):
        yield value.get("type")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from kinds_of(each)


@contextlib.contextmanager
def forcing(url: str, forced: Forced) -> Iterator[str]:
    """The address of a proxy of the server at `url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
            sent = orjson.dumps(forced.edit(self.path, body))
            names = ("Content-Type", "anthropic-version", "anthropic-beta", "x-api-key", "Authorization")
            headers = {name: self.headers[name] for name in names if name in self.headers}
            with client.stream("POST", url + self.path, content=sent, headers=headers) as answer:
                self.send_response(answer.status_code)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.end_headers()
                text = b""
                for piece in answer.iter_raw():
                    text += piece
                    self.wfile.write(piece)
                    self.wfile.flush()
            if answer.status_code != 200:
                forced.failures.append(text.decode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with httpx.Client(timeout=300, trust_env=False) as client, ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}"
        finally:
            proxy.shutdown()
            thread.join()
