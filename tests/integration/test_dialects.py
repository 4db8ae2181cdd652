"""The same sampling gives the same tokens in every dialect, over HTTP, gRPC and a WebSocket, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton

from djl_trtllm.model import Tokenizer
from tests.support.client import lmi
from tests.support.dialects import Way, tensor, triton_inputs, ways, without_row
from tests.support.server import Server, free_port, serving
from tests.support.websocket import opened

PROMPT = "Once upon a time there was a little girl"
TOKENS = 20
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": TOKENS, "temperature": 0},
    "penalised": {"max_new_tokens": TOKENS, "temperature": 0, "repetition_penalty": 2.0, "frequency_penalty": 1.5},
    # Numbers that an FP32 tensor has exactly.
    "sampled": {"max_new_tokens": TOKENS, "temperature": 2.0, "top_k": 200, "top_p": 0.96875, "seed": 11},
}
DATATYPES = {str: "BYTES", int: "INT32", float: "FP32"}


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def served(model: Path, scratch: Path, grpc_port: int) -> Iterator[Server]:
    """A server with Triton's gRPC port."""
    with serving(model, scratch, SERVING_TRITON_GRPC_PORT=str(grpc_port)) as server:
        with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
            client.infer("ensemble", tensors("greedy", stream=False))
        server.note_rest()
        yield server


@pytest.fixture(scope="module")
def texts(served: Server, tokenizer: Tokenizer) -> dict[tuple[str, bool], str]:
    """What LMI's schema answers to the prompt, by sampling and whether it is a chat's."""
    chat = tokenizer.render_chat([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
    begin = tokenizer.decode([1], skip_special_tokens=False)
    return {
        (name, is_chat): served.answer(prompt, **sampling)["generated_text"]
        for name, sampling in SAMPLING.items()
        for is_chat, prompt in ((False, PROMPT), (True, chat.removeprefix(begin)))
    }


def tensors(name: str, *, stream: bool) -> list[Any]:
    """The inputs of a request over gRPC."""
    made = []
    for each, value in {"text_input": PROMPT, **triton_inputs(SAMPLING[name])}.items():
        datatype = {"random_seed": "UINT64", "temperature": "FP32"}.get(each, DATATYPES[type(value)])
        made.append(tensor(triton, each, [value], datatype))
    return [*made, tensor(triton, "stream", [stream], "BOOL")]


def text_of(result: Any) -> str:
    return "".join(text.decode() for text in result.as_numpy("text_output"))


def test_every_path_has_a_row() -> None:
    assert without_row() == []


def test_the_samplings_differ(texts: dict[tuple[str, bool], str]) -> None:
    assert len(set(texts.values())) == len(texts)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("way", ways(), ids=lambda way: way.name)
def test_http(served: Server, texts: dict[tuple[str, bool], str], way: Way, sampling: str) -> None:
    answer = served.http.post(way.url("tiny-stories"), json=way.body(PROMPT, SAMPLING[sampling]))
    assert answer.status_code == 200, answer.text
    assert way.text(answer.content) == texts[sampling, way.row.chat]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_grpc(served: Server, texts: dict[tuple[str, bool], str], grpc_port: int, sampling: str) -> None:
    parts: list[Any] = []
    with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        assert text_of(client.infer("ensemble", tensors(sampling, stream=False))) == texts[sampling, False]
        client.start_stream(lambda result, error: parts.append(error or text_of(result)))
        client.async_stream_infer("ensemble", tensors(sampling, stream=True))
        client.stop_stream()
    assert len(parts) > 1 and "".join(parts) == texts[sampling, False]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("stream", [False, True])
def test_a_websocket(served: Server, texts: dict[tuple[str, bool], str], sampling: str, stream: bool) -> None:
    with opened(served.port) as socket:
        socket.send(json.dumps(lmi(PROMPT, stream=stream, **SAMPLING[sampling])))
        answer = ""
        while "generated_text" not in answer:
            answer += str(socket.recv())
    assert json.loads(answer.splitlines()[-1])["generated_text"] == texts[sampling, False]
