"""Every dialect gives the same tokens for the same sampling, and answers what schemathesis sends."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import tritonclient.grpc as triton
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.model import Tokenizer
from djl_trtllm.server.routes import OPERATIONS
from tests.support.client import lmi, opened
from tests.support.dialects import Way, tensor, triton_inputs, ways, without_row
from tests.support.server import Server, free_port, serving

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


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("way", ways(), ids=lambda way: way.name)
def test_http(served: Server, texts: dict[tuple[str, bool], str], way: Way, sampling: str) -> None:
    answer = served.http.post(way.url("tiny-stories"), json=way.body(PROMPT, SAMPLING[sampling]))
    assert answer.status_code == 200, answer.text
    assert way.text(answer.content) == texts[sampling, way.row.chat]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING)
def test_grpc(served: Server, texts: dict[tuple[str, bool], str], grpc_port: int, sampling: str) -> None:
    parts: list[Any] = []
    with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        assert text_of(client.infer("ensemble", tensors(sampling, stream=False))) == texts[sampling, False]
        client.start_stream(lambda result, error: parts.append(error or text_of(result)))
        client.async_stream_infer("ensemble", tensors(sampling, stream=True))
        client.stop_stream()
    assert len(parts) > 1 and "".join(parts) == texts[sampling, False]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("stream", [False, True])
def test_a_websocket(served: Server, texts: dict[tuple[str, bool], str], sampling: str, stream: bool) -> None:
    with opened(served.port) as socket:
        socket.send(json.dumps(lmi(PROMPT, stream=stream, **SAMPLING[sampling])))
        answer = ""
        while "generated_text" not in answer:
            answer += str(socket.recv())
    assert json.loads(answer.splitlines()[-1])["generated_text"] == texts[sampling, False]


EXAMPLES = int(os.environ.get("OPENAPI_EXAMPLES", "3"))

OWN = [(method.lower(), path) for method, path in map(str.split, OPERATIONS)]
# Other paths of the same tables, of SageMaker's for one, are read by the same code.
DIFFERENT = [
    *OWN,
    *(("get", path) for dialect in DIALECTS for path in dialect.pages),
    *{
        (type(dialect), dialect.tables.get(path) or path): ("post", path)
        for dialect in DIALECTS
        for path in reversed((*dialect.paths, *dialect.actions))
    }.values(),
]
NAMES = {"model": ["story", "hen"], "version": ["1"]}


@pytest.fixture(scope="module")
def described(address: str) -> Any:
    return httpx.get(f"{address}/openapi.json", trust_env=False).json()


@pytest.fixture(scope="module")
def schema(described: Any) -> Any:
    schemathesis = pytest.importorskip("schemathesis")  # it takes a second
    described = copy.deepcopy(described)
    for methods in described["paths"].values():
        for operation in methods.values():
            for parameter in operation.get("parameters", []):
                if parameter["name"] in NAMES:
                    parameter["schema"] = {"enum": NAMES[parameter["name"]]}
            # Otherwise nearly every request would name no model.
            operation["parameters"] = [
                parameter for parameter in operation.get("parameters", []) if parameter["name"] != "model_name"
            ]
    checks = {"negative_data_rejection": {"expected-statuses": ["4xx"]}}
    config = schemathesis.Config.from_dict({"checks": checks})
    loaded = schemathesis.openapi.from_dict(described, config=config)
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), DIFFERENT)
def test_an_operation_does_what_its_description_says(schema: Any, address: str, method: str, path: str) -> None:
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    wanted = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
        checks.unsupported_method,
    ]
    session = requests.Session()
    session.trust_env = False
    operation = schema[path][method.upper()]
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

        @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None, database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def one(case: Any) -> None:
            # Requests would end the path at a question mark that schemathesis leaves in it.
            if any("?" in str(value) for value in case.path_parameters.values()):
                return
            case.call_and_validate(address, session=session, checks=wanted, timeout=120)

        try:
            one()
        except Unsatisfiable:
            # Nothing that the operation takes can be wrong.
            assert mode is GenerationMode.NEGATIVE


@pytest.mark.slow
def test_a_request_that_takes_seconds_to_make_finds_its_connection_open(address: str) -> None:
    host, _, port = address.removeprefix("http://").partition(":")
    connection = HTTPConnection(host, int(port), timeout=120)
    with closing(connection):
        for pause in (6, 0):  # beyond the 5 seconds that uvicorn waits by itself
            connection.request("GET", "/ping")
            connection.auto_open = 0  # nor is another one opened
            assert connection.getresponse().read()
            time.sleep(pause)
