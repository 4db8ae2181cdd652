"""Agents run a loop with a tool to its end.

`recorded_clients.json` has what each client sent in such a loop, with long texts cut: a request in which its user asks
for a call, and one with the tool's output. `scripts/test-clients` runs the clients themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import echoing_model
from tests.support.server import Server, serving

pytestmark = pytest.mark.slow

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("recorded_clients.json").read_text())

CALLS = [
    ("weather", {"city": "Rome"}),
    ("Bash", {"command": "echo It rains.", "description": "x"}),
    ("exec_command", {"cmd": "echo It rains."}),
]
"""What their users asked for."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(echoing_model(tmp_path_factory.mktemp("agents") / "model", "hermes")) as started:
        yield started


def send(server: Server, request: dict[str, Any]) -> Any:
    """What a recorded request is answered: the body, or what the events of a stream join to."""
    answer = server.http.post(request["path"], json=request["body"], headers=request["headers"])
    assert answer.status_code == 200, answer.text
    if not request["body"].get("stream"):
        return answer.json()
    events = [dict(line.split(": ", 1) for line in event.split("\n")) for event in answer.text.strip().split("\n\n")]
    data = [json.loads(event["data"]) for event in events]
    assert [event["event"] for event in events] == [each["type"] for each in data]
    if "messages" not in request["path"]:
        assert [each["sequence_number"] for each in data] == list(range(len(data)))
        deltas = "".join(each["delta"] for each in data if each["type"].endswith(".delta"))
        completed = data[-1]["response"]
        assert data[-1]["type"] == "response.completed" and all(
            part in deltas for _, part in parts(completed) if isinstance(part, str)
        )
        return completed
    return joined(data)


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events of Anthropic's API join to."""
    message: dict[str, Any] = events[0]["message"]
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            ((name, text),) = ((name, delta[name]) for name in delta if name != "type")
            if name == "partial_json":
                inputs[event["index"]] = inputs.get(event["index"], "") + text
            else:
                message["content"][event["index"]][name] += text
        elif event["type"] == "message_delta":
            message |= event["delta"]
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    assert events[-1]["type"] == "message_stop"
    return message


def parts(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    """The parts of an answer: the arguments of a call by its function's name, and texts."""
    found: list[tuple[str, Any]] = []
    for part in answer["content"] if "content" in answer else answer["output"]:
        if part["type"] in ("tool_use", "function_call"):
            found.append((part["name"], part["input"] if "input" in part else json.loads(part["arguments"])))
        else:
            found.append(("", part.get("text", part.get("thinking")) or part.get("content", [{"text": ""}])[0]["text"]))
    return found


@pytest.mark.parametrize("client", RECORDED)
def test_a_recorded_client_gets_its_call_and_then_its_answer(server: Server, client: str) -> None:
    asked, told = RECORDED[client]
    assert parts(send(server, asked))[-1] in CALLS
    answered = parts(send(server, told))
    assert [kind for kind, _ in answered] == [""] and "It rains." in answered[0][1]


def test_openais_sdk_continues_a_stored_response(server: Server) -> None:
    import openai

    tools: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]
    told = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        called: Any = client.responses.create(model="hermes", input=told, tools=tools)
        (call,) = called.output
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
        with client.responses.stream(
            model="hermes", input=[result], tools=tools, previous_response_id=called.id
        ) as events:
            answered = events.get_final_response()
        assert answered.output_text == "It rains."
        assert client.responses.retrieve(answered.id).output_text == "It rains."
        client.responses.delete(answered.id)
        for unknown in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                unknown(answered.id)
