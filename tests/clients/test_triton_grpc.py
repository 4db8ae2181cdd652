"""tritonclient over gRPC: infer and streams, in its synchronous and its asyncio form."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

from tests.clients.conftest import MODEL, PROMPT, TOKENS
from tests.support.dialects import prompt_tensors
from tests.support.server import Server


@pytest.fixture
def client(server: Server, grpc_address: str) -> Iterator[Any]:
    with triton.InferenceServerClient(grpc_address) as client:
        yield client


def inputs(*, stream: bool = False) -> list[Any]:
    return prompt_tensors(triton, PROMPT, TOKENS, stream=stream)


def text_of(result: Any) -> str:
    return "".join(text.decode() for text in result.as_numpy("text_output").reshape(-1))


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", MODEL])
def test_infer(client: Any, story: str, model: str) -> None:
    assert text_of(client.infer(model, inputs())) == story
    results: queue.Queue[Any] = queue.Queue()
    for _ in range(8):
        client.async_infer(model, inputs(), lambda result, error: results.put(error or text_of(result)))
    assert {results.get(timeout=60) for _ in range(8)} == {story}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", MODEL])
def test_a_stream(client: Any, story: str, model: str) -> None:
    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: results.put(error or result))
    texts: dict[str, list[str]] = {"whole": [], "streamed": []}
    for name, parts in texts.items():
        client.async_stream_infer(
            model, inputs(stream=name == "streamed"), request_id=name, enable_empty_final_response=True
        )
        while True:
            result = results.get(timeout=60)
            answer = result.get_response()
            assert answer.id == name
            if answer.parameters["triton_final_response"].bool_param:
                break
            parts.append(text_of(result))
    client.stop_stream()
    assert "".join(texts["streamed"]) == "".join(texts["whole"]) == story
    assert len(texts["streamed"]) > 1 == len(texts["whole"])


def test_asynchronously(server: Server, grpc_address: str, story: str) -> None:
    async def both() -> tuple[str, str]:
        async with triton_aio.InferenceServerClient(grpc_address) as client:

            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "ensemble", "inputs": inputs(stream=True)}

            whole = await client.infer("ensemble", inputs())
            parts = [pair async for pair in client.stream_infer(requests())]
            assert all(error is None for _, error in parts)
            return text_of(whole), "".join(text_of(result) for result, _ in parts)

    assert asyncio.run(both()) == (story, story)


def test_the_descriptions(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("ensemble")
    assert client.get_model_metadata("ensemble").name == "ensemble"
    assert client.get_model_config("ensemble").config.model_transaction_policy.decoupled
    assert {model.state for model in client.get_model_repository_index().models} == {"READY"}
