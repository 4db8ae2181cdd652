"""Triton's Python clients, unmodified, over HTTP and gRPC, and the request lines of the workflow for Llama."""

from __future__ import annotations

import asyncio
import json
import queue
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

from djl_trtllm.model import Tokenizer
from tests.integration.server.conftest import make_model, make_paced_model
from tests.server.test_grpc import TABLE
from tests.support.dialects import prompt_tensors, tensor
from tests.support.models import PROMPT, scripted_model, tensorrt_llm_model
from tests.support.processes import PATIENCE, wait_until
from tests.support.server import Server, free_port, running, serving
from tests.support.tables import by_table

pytestmark = pytest.mark.slow

CURL = """curl -s -X POST localhost:8000/v2/models/ensemble/generate -d '{"text_input": "What is machine learning?", \
"max_tokens": 20, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}'"""
PARALLEL = """cd FOLDER
echo '{"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "", "stop_words": "", "pad_id": 2, \
"end_id": 2}' > tmp.txt
printf '%s\\n' {1..20} | xargs -I % -P 20 curl -s -w '\\n' -X POST \
localhost:8000/v2/models/ensemble/generate -d @tmp.txt"""
KEYS = [
    *("cum_log_probs", "model_name", "model_version", "output_log_probs"),
    *("sequence_end", "sequence_id", "sequence_start", "text_output"),
]
NAMES = ("ensemble", "tensorrt_llm_bls", "scripted")
PROTOCOLS = {"http": over_http, "grpc": over_grpc}

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


@pytest.fixture(scope="module")
def grpc_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(executor: str, grpc_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the paced model with the gRPC port."""
    model, environ = make_paced_model(executor, tmp_path_factory.mktemp("triton") / "model")
    with serving(model, **environ, SERVING_TRITON_GRPC_PORT=grpc_address.rpartition(":")[2]) as started:
        with over_grpc.InferenceServerClient(grpc_address) as client:
            client.infer("ensemble", inputs(over_grpc, 2))
        started.note_rest()
        yield started


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def client(server: Server, grpc_address: str, protocol: str) -> Iterator[Any]:
    address = grpc_address if protocol == "grpc" else server.url.removeprefix("http://")
    with PROTOCOLS[protocol].InferenceServerClient(address) as client:
        yield client


def inputs(triton: Any, tokens: int = 7, **how: Any) -> list[Any]:
    return prompt_tensors(triton, PROMPT, tokens, **how)


def text_of(result: Any) -> str:
    return "".join(text if isinstance(text, str) else text.decode() for text in result.as_numpy("text_output"))


def expected(tokenizer: Tokenizer, tokens: int, prompt: str = PROMPT) -> str:
    """What the played engine generates: the prompt, again and again."""
    return tokenizer.decode((tokenizer.encode(prompt) * 20)[:tokens])


def shell(server: Server, script: str) -> str:
    """What a line of the document prints, with this server's port."""
    line = script.replace("localhost:8000", f"localhost:{server.port}")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=PATIENCE, check=True).stdout


@needs_curl
def test_the_documents_request_is_answered_with_its_keys_in_their_order(server: Server, tokenizer: Tokenizer) -> None:
    answer = json.loads(shell(server, CURL))
    assert list(answer) == KEYS
    assert answer == {
        "cum_log_probs": 0.0,
        "model_name": "ensemble",
        "model_version": "1",
        "output_log_probs": [0.0] * 20,
        "sequence_end": False,
        "sequence_id": 0,
        "sequence_start": False,
        "text_output": expected(tokenizer, 20, "What is machine learning?"),
    }


@needs_curl
def test_the_documents_20_requests_at_the_same_time(start: Any, tmp_path: Path) -> None:
    with start({}) as server:
        output = shell(server, PARALLEL.replace("FOLDER", str(tmp_path)))
    # Two responses may stand in one line: curl writes no line end.
    answers, rest = [], output.lstrip()
    while rest:
        answer, end = json.JSONDecoder().raw_decode(rest)
        answers.append(answer)
        rest = rest[end:].lstrip()
    assert [list(answer) for answer in answers] == [KEYS] * 20
    assert len({answer["text_output"] for answer in answers}) == 1


def test_the_server_and_its_models_describe_themselves(client: Any, protocol: str) -> None:
    how = {"as_json": True} if protocol == "grpc" else {}
    assert client.is_server_live() and client.is_server_ready()
    for name in (*NAMES, "preprocessing", "tensorrt_llm", "postprocessing"):
        assert client.is_model_ready(name) and client.is_model_ready(name, "1")
    assert not client.is_model_ready("hen") and not client.is_model_ready("ensemble", "2")
    assert client.get_server_metadata(**how)["name"] == "djl-trtllm"
    assert len(client.get_model_metadata("ensemble", **how)["inputs"]) == 38
    described = client.get_model_config("ensemble", **how)
    assert described.get("config", described)["model_transaction_policy"] == {"decoupled": True}
    index = client.get_model_repository_index(**how)
    listed = index["models"] if protocol == "grpc" else index
    assert {model["name"] for model in listed if model["state"] == "READY"} >= set(NAMES)

    def count() -> int:
        (model,) = client.get_inference_statistics("ensemble", "1", **how)["model_stats"]
        return int(model["inference_stats"]["success"]["count"])

    before = count()
    client.infer("ensemble", inputs(PROTOCOLS[protocol]))
    assert count() > before


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_infer(
    client: Any, protocol: str, tokenizer: Tokenizer, name: str, binary: bool, compression: str | None
) -> None:
    triton = PROTOCOLS[protocol]
    how = {"binary_data": binary} if protocol == "http" else {}
    given = ("request_", "response_") if protocol == "http" else ("",)
    outputs = [triton.InferRequestedOutput(each, **how) for each in ("text_output", "output_log_probs")]
    compressions = {f"{which}compression_algorithm": compression for which in given}
    result = client.infer(name, inputs(triton, **how), request_id="7", outputs=outputs, **compressions)
    assert text_of(result) == expected(tokenizer, 7)
    assert result.as_numpy("output_log_probs").tolist() == [[[0.0] * 7]]
    assert result.as_numpy("cum_log_probs") is None
    answer = result.get_response()
    if protocol == "grpc":
        answer = {each: getattr(answer, each) for each in ("model_name", "model_version", "id")}
    assert (answer["model_name"], answer["model_version"], answer["id"]) == (name, "1", "7")


def test_a_batch_has_a_text_for_each_prompt(client: Any, protocol: str, tokenizer: Tokenizer) -> None:
    asked = {PROMPT: 5, "a wolf and a fox": 3}
    prompts = tensor(PROTOCOLS[protocol], "text_input", [[prompt] for prompt in asked], "BYTES")
    counts = tensor(PROTOCOLS[protocol], "max_tokens", [[count] for count in asked.values()], "UINT32")
    result = client.infer("ensemble", [prompts, counts])
    texts = [text.decode() for text in result.as_numpy("text_output")]
    assert texts == [expected(tokenizer, count, prompt) for prompt, count in asked.items()]
    assert result.as_numpy("output_log_probs").shape == (2, 1, 5)


@by_table("name", "tokens", "more", "status", "message", apart=True)
def test_errors_raise_tritons_exception(
    client: Any, protocol: str, name: str, tokens: int, more: Any, status: str, message: str
) -> None:
    triton = PROTOCOLS[protocol]
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.infer(name, [*inputs(triton, tokens), *([] if more is None else [tensor(triton, *more)])])
    assert protocol == "http" or caught.value.status() == f"StatusCode.{status}"


# -- streams over HTTP, which Triton's client does not have ------------------------------------------------------------


def test_streams_join_to_the_whole_text_as_vllms_benchmark_reads_them(server: Server, tokenizer: Tokenizer) -> None:
    body = {
        "accumulate_tokens": True,
        "text_input": PROMPT,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 7,
        "stream": True,
    }
    with server.http.stream("POST", "/v2/models/ensemble/generate_stream", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [json.loads(line.removeprefix("data:")) for line in answer.iter_lines() if line]
    assert all(list(event) == KEYS for event in events)
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events) == expected(tokenizer, 7)


def test_a_stream_that_fails_has_the_error_as_its_last_event(server: Server) -> None:
    body = {"text_input": PROMPT, "max_tokens": 77}
    for _ in range(50):
        answer = server.http.post("/v2/models/ensemble/generate_stream", json=body)
        # A busy server may have the error before it has sent anything, and answers with its status then.
        assert json.loads(answer.text.strip().splitlines()[-1].removeprefix("data:")) == {"error": "scripted error"}
        if answer.status_code == 200:
            return
        assert answer.status_code == 500
    pytest.fail("no stream had begun before it failed")


# -- streams over gRPC -------------------------------------------------------------------------------------------------


class Stream:
    """The client's stream, with what its callback receives."""

    def __init__(self, client: Any) -> None:
        self.received: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = client
        client.start_stream(partial(self._keep, self.received))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_stream()

    @staticmethod
    def _keep(received: queue.Queue[tuple[Any, Any]], result: Any, error: Any) -> None:
        received.put((result, error))

    def next(self) -> tuple[Any, Any]:
        return self.received.get(timeout=PATIENCE)

    def until_final(self, count: int = 1) -> list[Any]:
        """The results up to the final ones of `count` requests."""
        results = []
        while count:
            result, error = self.next()
            assert error is None, error
            results.append(result)
            count -= is_final(result)
        return results


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


@pytest.fixture
def grpc_client(server: Server, grpc_address: str) -> Iterator[Any]:
    with over_grpc.InferenceServerClient(grpc_address) as client:
        yield client


def truss_inputs(tokenizer: Tokenizer) -> list[Any]:
    """What the client of its template sends: unsigned numbers, empty lists of words."""
    more: list[tuple[str, list[Any], str]] = [
        ("beam_width", [1], "UINT32"),
        ("bad_words", [""], "BYTES"),
        ("stop_words", [""], "BYTES"),
        ("end_id", [tokenizer.vocab_size - 1], "UINT32"),
        ("pad_id", [0], "UINT32"),
        ("repetition_penalty", [1.0], "FP32"),
    ]
    return [*inputs(over_grpc, 7, stream=True), *(tensor(over_grpc, *each) for each in more)]


def test_a_stream_with_what_truss_sends(grpc_client: Any, tokenizer: Tokenizer) -> None:
    with Stream(grpc_client) as stream:
        grpc_client.async_stream_infer("ensemble", truss_inputs(tokenizer), enable_empty_final_response=True)
        *results, last = stream.until_final()
    assert len(results) > 1 and not last.get_response().outputs
    assert "".join(map(text_of, results)) == expected(tokenizer, 7)


def test_the_asyncio_client_reads_to_the_end_of_the_stream(
    server: Server, grpc_address: str, tokenizer: Tokenizer
) -> None:
    async def read() -> list[Any]:
        async with over_grpc_aio.InferenceServerClient(grpc_address) as client:

            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "ensemble", "inputs": truss_inputs(tokenizer), "request_id": "1"}

            received = [pair async for pair in client.stream_infer(requests())]
            assert all(error is None for _, error in received)
            return [result for result, _ in received]

    results = asyncio.run(read())
    assert "".join(map(text_of, results)) == expected(tokenizer, 7)
    assert len(results) > 1 and not any(map(is_final, results))


def test_requests_of_one_stream_run_together_and_are_distinguished_by_id(
    grpc_client: Any, tokenizer: Tokenizer
) -> None:
    asked = {"a": 60, "b": 50, "c": 5}
    with Stream(grpc_client) as stream:
        for name, tokens in asked.items():
            grpc_client.async_stream_infer(
                "ensemble",
                inputs(over_grpc, tokens, stream=name != "c"),
                request_id=name,
                enable_empty_final_response=True,
            )
        results = stream.until_final(3)
    order = [result.get_response().id for result in results]
    for name, tokens in asked.items():
        own = [result for result in results if result.get_response().id == name and not is_final(result)]
        assert "".join(map(text_of, own)) == expected(tokenizer, tokens)
    assert order.index("b") < len(order) - 1 - order[::-1].index("a")


def test_a_deadline_cancels_its_request(grpc_client: Any, server: Server) -> None:
    before = server.finished("cancelled")

    def cancelled() -> bool:
        # On a busy machine a deadline may be over before the request has come.
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            grpc_client.infer("ensemble", inputs(over_grpc, 50_000), client_timeout=0.5)
        return server.finished("cancelled") > before

    wait_until(cancelled)


def test_a_draining_server_ends_what_runs_and_idle_streams(tmp_path: Path, executor: str, tokenizer: Tokenizer) -> None:
    model, environ = make_model(executor, tmp_path / "model", {"steps_per_second": 50})
    port = free_port()
    with (
        serving(model, **environ, SERVING_TRITON_GRPC_PORT=str(port)) as server,
        over_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
        over_grpc.InferenceServerClient(f"127.0.0.1:{port}") as idle,
        Stream(client) as stream,
        Stream(idle) as waiting,
    ):
        idle.async_stream_infer("ensemble", inputs(over_grpc, 1))
        waiting.next()
        client.async_stream_infer("ensemble", inputs(over_grpc, 50, stream=True), enable_empty_final_response=True)
        results = [stream.next()[0]]
        server.terminate()
        results += stream.until_final()
        assert "".join(map(text_of, results[:-1])) == expected(tokenizer, 50)
        assert server.wait() == 0


# -- the model repository of the workflow for Llama: served on Triton's ports, with Triton's table ---------------------

SCRIPT = Path(__file__).parents[3] / "scripts" / "launch_triton_server.py"
MODELS = ("ensemble", "preprocessing", "postprocessing", "tensorrt_llm", "tensorrt_llm_bls")


def repository(root: Path) -> Path:
    """The five models, and what runs them here."""
    model = scripted_model(root / "engine")
    folder = root / "triton_model_repo"
    for name in MODELS:
        (folder / name).mkdir(parents=True)
        policy = "model_transaction_policy { decoupled: true }" if name.startswith("tensorrt") else ""
        (folder / name / "config.pbtxt").write_text(f'name: "{name}"\nmax_batch_size: 4\n{policy}\n')
    properties = (model / "serving.properties").read_text()
    lines = [line for line in properties.splitlines() if "max_rolling_batch_size" not in line]
    (folder / "serving.properties").write_text("\n".join([*lines, f"option.model_id={model}"]) + "\n")
    (model / "serving.properties").unlink()
    return folder


def test_it_listens_on_tritons_ports_and_prints_tritons_table(tmp_path: Path) -> None:
    http, metrics = free_port(), free_port()
    ports = {"SERVING_TRITON_HTTP_PORT": str(http), "SERVING_TRITON_METRICS_PORT": str(metrics)}
    with serving(repository(tmp_path), **ports) as server:
        assert TABLE in "\n".join(line.strip() for line in server.log)
        with over_http.InferenceServerClient(f"127.0.0.1:{http}") as client:
            assert client.is_server_ready() and client.is_model_ready("ensemble")
            assert {model["name"] for model in client.get_model_repository_index()} >= set(MODELS)
            assert client.get_model_config("ensemble")["max_batch_size"] == 4
        page = httpx.get(f"http://127.0.0.1:{metrics}/metrics", trust_env=False).text
        assert 'djl_trtllm_ready{model="scripted"} 1.0' in page


def test_the_script_of_the_workflow_does_the_same(tmp_path: Path) -> None:
    """A shell stands between, as `Server` has its own arguments."""
    program = tmp_path / "launch.py"
    program.write_text(
        "import os, sys\n"
        "_, serve, repository, port_flag, port, host_flag, host = sys.argv\n"
        "os.environ |= {'SERVING_INFERENCE_PORT': port, 'SERVING_INFERENCE_HOST': host}\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, {str(SCRIPT)!r}, '--world_size=1', '--model_repo', "
        "repository, '--http_port=0', '--metrics_port=0'])\n"
    )
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    with running(Server(repository(tmp_path), {"PATH": path}, program=(str(program),))) as server:
        assert TABLE in "\n".join(line.strip() for line in server.log)


LLM_API_CONFIG = """
name: "tensorrt_llm"
backend: "python"
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
LLM_API_MODEL = """
model: MODEL
backend: "pytorch"
tensor_parallel_size: 1
kv_cache_config:
  enable_block_reuse: false
triton_config:
  max_batch_size: 0
  decoupled: true
"""
LLM_API_CURL = """curl -s -X POST localhost:8000/v2/models/tensorrt_llm/generate -d '{"text_input": "What is machine \
learning?", "sampling_param_max_tokens": 10, "return_finish_reason": true}'"""


def unbatched(triton: Any, text: str, tokens: int, *, stream: bool = False) -> list[Any]:
    """The inputs of the LLM API's model, which have no batch dimension."""
    made = []
    for name, values, datatype in (
        ("text_input", [text.encode()], "BYTES"),
        ("sampling_param_max_tokens", [tokens], "INT32"),
        ("streaming", [stream], "BOOL"),
    ):
        kinds = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_}
        made.append(triton.InferInput(name, [1], datatype))
        made[-1].set_data_from_numpy(np.array(values, kinds[datatype]))
    return made


@needs_curl
def test_a_repository_of_the_llm_api_is_served_to_curl_and_tritons_clients(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model, environ = tensorrt_llm_model(tmp_path / "checkpoint")
    version = tmp_path / "repository" / "tensorrt_llm" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(LLM_API_CONFIG)
    (version / "model.yaml").write_text(LLM_API_MODEL.replace("MODEL", str(model)))
    address = f"127.0.0.1:{free_port()}"
    environ |= {"SERVING_TRITON_GRPC_PORT": address.rpartition(":")[2]}
    environ |= dict.fromkeys(("SERVING_TRITON_HTTP_PORT", "SERVING_TRITON_METRICS_PORT"), "0")
    with serving(version.parent.parent, **environ) as server:
        answer = json.loads(shell(server, LLM_API_CURL))
        text = expected(tokenizer, 10, "What is machine learning?")
        assert answer == {
            "finish_reason": "length",
            "model_name": "tensorrt_llm",
            "model_version": "1",
            "text_output": text,
        }
        body = {"text_input": PROMPT, "sampling_param_max_tokens": 3, "streaming": True}
        with httpx.stream("POST", f"{server.url}/v2/models/tensorrt_llm/generate_stream", json=body) as response:
            events = [json.loads(line[6:])["text_output"] for line in response.iter_lines() if line]
        assert events[-1] == expected(tokenizer, 3) and all(events[-1].startswith(event) for event in events)
        with over_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
            whole = client.infer("tensorrt_llm", unbatched(over_http, PROMPT, 5))
            assert text_of(whole) == expected(tokenizer, 5)
            assert client.get_model_config("tensorrt_llm")["max_batch_size"] == 0
        results: queue.Queue[Any] = queue.Queue()
        with over_grpc.InferenceServerClient(address) as rpc:
            rpc.start_stream(lambda result, error: results.put(error or result))
            rpc.async_stream_infer("tensorrt_llm", unbatched(over_grpc, PROMPT, 3, stream=True))
            found = [text_of(results.get(timeout=PATIENCE))]
            while found[-1] != expected(tokenizer, 3):
                found.append(text_of(results.get(timeout=PATIENCE)))
            rpc.stop_stream()
