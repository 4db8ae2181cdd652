"""Triton's Python client over gRPC, unmodified: whole and streamed, in its synchronous and its asyncio form."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from djl_trtllm.model import Tokenizer
from tests.integration.server.conftest import make_model, make_paced_model
from tests.support.models import PROMPT
from tests.support.server import Server, free_port, serving
from tests.support.triton_tensors import prompt_tensors, tensor
from tests.support.waiting import wait_until

NAMES = ("ensemble", "tensorrt_llm_bls", "scripted")


class GrpcServer:
    """A server with Triton's gRPC port."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.address = f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def grpc_server(executor: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    """As `server`, with the gRPC port."""
    model, environ = make_paced_model(executor, tmp_path_factory.mktemp("grpc") / "model")
    port = free_port()
    with serving(model, **environ, SERVING_TRITON_GRPC_PORT=str(port)) as started:
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.infer("ensemble", inputs(2))
        started.note_rest()
        yield GrpcServer(started, port)


@pytest.fixture
def client(grpc_server: GrpcServer) -> Iterator[Any]:
    with triton.InferenceServerClient(grpc_server.address) as client:
        yield client


def inputs(tokens: int = 7, *, stream: bool | None = None) -> list[Any]:
    return prompt_tensors(triton, PROMPT, tokens, stream=stream)


def text_of(result: Any) -> str:
    return "".join(text.decode() for text in result.as_numpy("text_output"))


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def expected(tokenizer: Tokenizer, tokens: int) -> str:
    return tokenizer.decode(tokenizer.encode(PROMPT)[:tokens])


class Stream:
    """The client's stream, with what its callback receives."""

    def __init__(self, client: Any, **options: Any) -> None:
        self.received: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = client
        client.start_stream(partial(self._keep, self.received), **options)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_stream()

    @staticmethod
    def _keep(received: queue.Queue[tuple[Any, Any]], result: Any, error: Any) -> None:
        received.put((result, error))

    def next(self) -> tuple[Any, Any]:
        return self.received.get(timeout=60)

    def until_final(self) -> list[Any]:
        """The results up to the final one."""
        results = []
        while True:
            result, error = self.next()
            assert error is None, error
            results.append(result)
            if is_final(result):
                return results


def test_the_server_and_its_models_describe_themselves(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    for name in (*NAMES, "preprocessing", "tensorrt_llm", "postprocessing"):
        assert client.is_model_ready(name) and client.is_model_ready(name, "1")
    assert not client.is_model_ready("hen") and not client.is_model_ready("ensemble", "2")
    assert client.get_server_metadata().name == "djl-trtllm"
    metadata = client.get_model_metadata("ensemble")
    assert len(metadata.inputs) == 34 and list(metadata.inputs[0].shape) == [-1, 1]
    config = client.get_model_config("ensemble").config
    assert config.model_transaction_policy.decoupled and config.max_batch_size == 2
    assert {each.name: each.data_type for each in config.input}["text_input"] == triton.model_config_pb2.TYPE_STRING
    states = {model.name: model.state for model in client.get_model_repository_index().models}
    assert states["ensemble"] == states["tensorrt_llm_bls"] == states["scripted"] == "READY"


def test_statistics_grow(client: Any) -> None:
    def count() -> int:
        (model,) = client.get_inference_statistics("ensemble", "1").model_stats
        return int(model.inference_stats.success.count)

    before = count()
    client.infer("ensemble", inputs())
    assert count() > before


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("name", NAMES)
def test_infer(client: Any, tokenizer: Tokenizer, name: str, compression: str | None) -> None:
    outputs = [triton.InferRequestedOutput(each) for each in ("text_output", "output_log_probs")]
    result = client.infer(name, inputs(), request_id="7", outputs=outputs, compression_algorithm=compression)
    assert text_of(result) == expected(tokenizer, 7)
    assert result.as_numpy("output_log_probs").tolist() == [[[0.0] * 7]]
    assert result.as_numpy("cum_log_probs") is None
    answer = result.get_response()
    assert (answer.model_name, answer.model_version, answer.id) == (name, "1", "7")


def truss_inputs(tokenizer: Tokenizer) -> list[Any]:
    """What the client of its template sends: unsigned numbers, empty lists of words."""
    return [
        *inputs(7, stream=True),
        tensor(triton, "beam_width", [1], "UINT32"),
        tensor(triton, "bad_words", [""], "BYTES"),
        tensor(triton, "stop_words", [""], "BYTES"),
        tensor(triton, "end_id", [tokenizer.vocab_size - 1], "UINT32"),
        tensor(triton, "pad_id", [0], "UINT32"),
        tensor(triton, "repetition_penalty", [1.0], "FP32"),
    ]


def test_a_stream_with_what_truss_sends(client: Any, tokenizer: Tokenizer) -> None:
    with Stream(client) as stream:
        client.async_stream_infer("ensemble", truss_inputs(tokenizer), enable_empty_final_response=True)
        *results, last = stream.until_final()
    assert len(results) > 1 and not last.get_response().outputs
    assert "".join(map(text_of, results)) == expected(tokenizer, 7)


def test_the_asyncio_client_reads_to_the_end_of_the_stream(grpc_server: GrpcServer, tokenizer: Tokenizer) -> None:
    async def read() -> list[Any]:
        async with triton_aio.InferenceServerClient(grpc_server.address) as client:

            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "ensemble", "inputs": truss_inputs(tokenizer), "request_id": "1"}

            received = [pair async for pair in client.stream_infer(requests())]
            assert all(error is None for _, error in received)
            return [result for result, _ in received]

    results = asyncio.run(read())
    assert "".join(map(text_of, results)) == expected(tokenizer, 7)
    assert len(results) > 1 and not any(map(is_final, results))


def test_requests_of_one_stream_run_together_and_are_distinguished_by_id(client: Any, tokenizer: Tokenizer) -> None:
    texts = {"a": "", "b": "", "c": ""}
    order = []
    with Stream(client) as stream:
        for name, tokens in (("a", 60), ("b", 50), ("c", 5)):
            client.async_stream_infer(
                "ensemble", inputs(tokens, stream=name != "c"), request_id=name, enable_empty_final_response=True
            )
        unfinished = 3
        while unfinished:
            result, error = stream.next()
            assert error is None
            name = result.get_response().id
            order.append(name)
            if is_final(result):
                unfinished -= 1
            else:
                texts[name] += text_of(result)
    assert texts["c"] == expected(tokenizer, 5)
    for name, tokens in (("a", 60), ("b", 50)):
        ids = tokenizer.encode(PROMPT)
        assert texts[name] == tokenizer.decode((ids * 60)[:tokens])
    assert order.index("b") < len(order) - 1 - order[::-1].index("a")


def test_errors_of_a_stream_leave_it_open(client: Any, tokenizer: Tokenizer) -> None:
    with Stream(client) as stream:
        client.async_stream_infer("hen", inputs(), request_id="1")
        _, error = stream.next()
        assert "no model named 'hen'" in str(error)
        client.async_stream_infer("ensemble", inputs(77, stream=True), request_id="2")
        while True:
            _, error = stream.next()
            if error is not None:
                break
        assert "scripted error" in str(error)
        client.async_stream_infer("ensemble", inputs(3), request_id="3")
        assert text_of(stream.next()[0]) == expected(tokenizer, 3)


def test_with_triton_grpc_error_the_first_error_is_the_status_of_the_stream(client: Any) -> None:
    with Stream(client, headers={"triton_grpc_error": "true"}) as stream:
        client.async_stream_infer("hen", inputs(), request_id="1")
        _, error = stream.next()
        assert error.status() == "StatusCode.NOT_FOUND"


@pytest.mark.parametrize(
    ("name", "more", "status", "message"),
    [
        ("ensemble", [("stream", [True], "BOOL")], "INVALID_ARGUMENT", "use ModelStreamInfer"),
        ("ensemble", [("return_context_logits", [True], "BOOL")], "INVALID_ARGUMENT", "return_context_logits"),
        ("ensemble", [("hen", [1], "INT32")], "INVALID_ARGUMENT", "unexpected inference input"),
        ("preprocessing", [], "INVALID_ARGUMENT", "send them to 'ensemble'"),
        ("hen", [], "NOT_FOUND", "no model named 'hen'"),
    ],
)
def test_errors_have_tritons_status(client: Any, name: str, more: list[Any], status: str, message: str) -> None:
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.infer(name, [*inputs(), *(tensor(triton, *each) for each in more)])
    assert caught.value.status() == f"StatusCode.{status}"


def test_an_engine_that_fails_is_internal(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="scripted error") as caught:
        client.infer("ensemble", inputs(77))
    assert caught.value.status() == "StatusCode.INTERNAL"


def test_a_message_that_is_too_large_is_refused(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="larger than max") as caught:
        client.infer("ensemble", [tensor(triton, "text_input", [b"a " * 200_000], "BYTES"), *inputs()[1:]])
    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_a_full_queue_refuses_requests(client: Any, grpc_server: GrpcServer, tokenizer: Tokenizer) -> None:
    with Stream(client) as stream:
        for number in range(12):
            client.async_stream_infer("ensemble", inputs(20), request_id=str(number))
        errors = [str(error) for _, error in (stream.next() for _ in range(12)) if error is not None]
    assert errors and all("queue" in error for error in errors)
    wait_until(grpc_server.server.idle)


def test_a_client_that_leaves_cancels_its_requests(client: Any, grpc_server: GrpcServer) -> None:
    server = grpc_server.server
    before = server.finished("cancelled")
    with Stream(client):
        for number in range(2):
            client.async_stream_infer("ensemble", inputs(5000, stream=True), request_id=str(number))
        wait_until(lambda: server.metric("running") == 2)
        client.stop_stream(cancel_requests=True)
    wait_until(lambda: server.finished("cancelled") == before + 2)
    call = client.async_infer("ensemble", inputs(5000), lambda result, error: None)
    wait_until(lambda: server.metric("running") == 1)
    call.cancel()
    wait_until(lambda: server.finished("cancelled") == before + 3)


def test_a_deadline_cancels_too(client: Any, grpc_server: GrpcServer) -> None:
    before = grpc_server.server.finished("cancelled")
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        client.infer("ensemble", inputs(5000), client_timeout=0.5)
    wait_until(lambda: grpc_server.server.finished("cancelled") == before + 1)


def test_messages_that_are_none_are_refused(grpc_server: GrpcServer) -> None:
    with grpc.insecure_channel(grpc_server.address) as channel:
        for method in ("ModelInfer", "ModelReady"):
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\xff\xff\xff", timeout=60)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/inference.GRPCInferenceService/LogSettings")(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_draining_server_ends_what_runs_and_idle_streams(tmp_path: Path, executor: str, tokenizer: Tokenizer) -> None:
    model, environ = make_model(executor, tmp_path / "model", {"steps_per_second": 50})
    port = free_port()
    with (
        serving(model, **environ, SERVING_TRITON_GRPC_PORT=str(port)) as server,
        triton.InferenceServerClient(f"127.0.0.1:{port}") as client,
        triton.InferenceServerClient(f"127.0.0.1:{port}") as idle,
        Stream(client) as stream,
        Stream(idle) as waiting,
    ):
        idle.async_stream_infer("ensemble", inputs(1))
        waiting.next()
        client.async_stream_infer("ensemble", inputs(50, stream=True), enable_empty_final_response=True)
        results = [stream.next()[0]]
        server.terminate()
        results += stream.until_final()
        ids = tokenizer.encode(PROMPT)
        assert "".join(map(text_of, results[:-1])) == tokenizer.decode((ids * 50)[:50])
        assert server.wait() == 0


def test_a_port_that_is_taken_ends_the_server_with_the_option_to_change(
    grpc_server: GrpcServer, tmp_path: Path, executor: str
) -> None:
    model, environ = make_model(executor, tmp_path / "model", None)
    port = grpc_server.address.rpartition(":")[2]
    with Server(model, {**environ, "SERVING_TRITON_GRPC_PORT": port}) as second:
        assert second.wait() == 1
        assert second.says(f"triton_grpc_port={port}: cannot listen on 127.0.0.1:{port}")
