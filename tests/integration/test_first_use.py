"""What a newcomer does first works as documented, and what goes wrong for a newcomer is an error that helps."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from huggingface_hub import InferenceClient

from tests.support.client import Answer, exchange
from tests.support.prompts import DOCUMENT
from tests.support.server import Server, environment, run_cli, serving

REQUEST = {"inputs": DOCUMENT, "parameters": {"max_new_tokens": 128, "do_sample": True}}


def copied(model: Path, to: Path, *, properties: str = "") -> Path:
    """The model's files elsewhere, with a serving.properties of its own."""
    shutil.copytree(model, to)
    (to / "serving.properties").write_text(properties)
    return to


# -- the document's request --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_server(model: Path, scratch: Path) -> Iterator[Server]:
    """The model as it is, nothing configured."""
    with serving(model, scratch) as started:
        yield started


def is_a_story(text: str) -> bool:
    """Whether it is whole sentences of English in ASCII."""
    words = re.findall(r"[A-Za-z']+", text)
    return len(words) > 20 and text.isascii() and "." in text and " the " in text


def tells_a_story(ask: Callable[[], str]) -> bool:
    """Whether one of several answers is a story: the document's request samples, and some answers end early."""
    return any(is_a_story(ask()) for _ in range(6))


@pytest.mark.parametrize("path", ["/invocations", "/predictions/{model}", "/endpoints/anything/invocations"])
def test_the_documents_request_gets_a_story(default_server: Server, path: str) -> None:
    (name,) = default_server.http.get("/ping").json()

    def ask() -> str:
        answer = default_server.http.post(path.format(model=name), json=REQUEST)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert list(answer.json()) == ["generated_text"]
        text: str = answer.json()["generated_text"]
        return text

    assert tells_a_story(ask)


def test_the_documents_request_by_curl(default_server: Server) -> None:
    command = ["curl", "-s", "-X", "POST", f"{default_server.url}/invocations", "-H", "Content-Type: application/json"]
    command += ["-d", json.dumps(REQUEST)]
    environ = {**os.environ, "NO_PROXY": "*"}
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")

    def ask() -> str:
        answer = subprocess.run(command, env=environ, capture_output=True, check=True)
        text: str = json.loads(answer.stdout)["generated_text"]
        return text

    assert tells_a_story(ask)


def test_the_documents_request_streams_lines(default_server: Server) -> None:
    def ask() -> str:
        answer = asyncio.run(exchange(default_server.port, {**REQUEST, "stream": True}))
        assert answer.headers["content-type"] == "application/jsonlines"
        assert len(answer.arrivals) > 2
        *lines, last = answer.lines
        assert all(list(line) == ["token"] for line in lines)
        assert all(list(line["token"])[:3] == ["id", "text", "log_prob"] for line in lines)
        text: str = last["generated_text"]
        assert "".join(line["token"]["text"] for line in [*lines, last]) == text
        return text

    assert tells_a_story(ask)


def test_server_sent_events_are_the_same_lines(default_server: Server) -> None:
    request = {"max_new_tokens": 20, "details": True}
    lines = Answer(body=default_server.post(DOCUMENT, stream=True, **request).content).lines
    events = default_server.post(DOCUMENT, stream=True, output_formatter="sse", **request)
    assert events.headers["content-type"] == "text/event-stream"
    assert events.text.endswith("\n\n")
    assert [json.loads(event.removeprefix("data: ")) for event in events.text.split("\n\n")[:-1]] == lines
    assert lines[-1]["details"] == {"finish_reason": "length", "generated_tokens": 20, "inputs": DOCUMENT}


def test_details_tell_every_token(default_server: Server) -> None:
    answer = default_server.answer(DOCUMENT, max_new_tokens=12)
    assert list(answer["details"]) == ["finish_reason", "generated_tokens", "inputs", "tokens"]
    assert answer["details"]["generated_tokens"] == len(answer["details"]["tokens"]) == 12
    assert "".join(token["text"] for token in answer["details"]["tokens"]) == answer["generated_text"]
    assert all(token["log_prob"] <= 0 for token in answer["details"]["tokens"])


def test_boto3_invokes_the_endpoint(default_server: Server) -> None:
    client = boto3.client(
        "sagemaker-runtime",
        region_name="us-east-1",
        endpoint_url=default_server.url,
        aws_access_key_id="none",
        aws_secret_access_key="none",
    )

    def ask() -> str:
        answer = client.invoke_endpoint(
            EndpointName="my-endpoint", ContentType="application/json", Body=json.dumps(REQUEST).encode()
        )
        assert answer["ContentType"] == "application/json"
        text: str = json.loads(answer["Body"].read())["generated_text"]
        return text

    assert tells_a_story(ask)


def test_chat_answers_as_an_assistant(default_server: Server) -> None:
    messages = [{"role": "user", "content": DOCUMENT}]
    answer = default_server.http.post("/invocations", json={"messages": messages, "max_tokens": 60, "temperature": 0})
    assert answer.status_code == 200
    (choice,) = answer.json()["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) > 20
    assert choice["finish_reason"] in ("eos_token", "length")
    usage = answer.json()["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    streamed = default_server.http.post(
        "/invocations", json={"messages": messages, "max_tokens": 60, "temperature": 0, "stream": True}
    )
    deltas = [line["choices"][0]["delta"].get("content", "") for line in Answer(body=streamed.content).lines]
    assert "".join(deltas) == choice["message"]["content"]


# -- TGI's client ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tgi(model: Path, scratch: Path) -> Iterator[InferenceClient]:
    with serving(model, scratch, OPTION_TGI_COMPAT="true") as started:
        yield InferenceClient(f"{started.url}/invocations", timeout=60)


def test_huggingface_client_gets_details(tgi: InferenceClient) -> None:
    answer = tgi.text_generation(DOCUMENT, max_new_tokens=24, details=True, stream=False)
    assert isinstance(answer.generated_text, str)
    assert answer.details is not None
    assert answer.details.finish_reason == "length"
    assert answer.details.generated_tokens == 24
    assert "".join(token.text for token in answer.details.tokens) == answer.generated_text
    assert all(isinstance(token.id, int) and isinstance(token.logprob, float) for token in answer.details.tokens)


def test_huggingface_client_streams_details(tgi: InferenceClient) -> None:
    whole = tgi.text_generation(DOCUMENT, max_new_tokens=24, details=True, stream=False)
    parts = list(tgi.text_generation(DOCUMENT, max_new_tokens=24, details=True, stream=True))
    assert whole.details is not None
    assert [part.token.id for part in parts] == [token.id for token in whole.details.tokens]
    assert parts[-1].generated_text == whole.generated_text
    assert parts[-1].details is not None
    assert parts[-1].details.finish_reason == "length"


def test_huggingface_client_gets_plain_text(tgi: InferenceClient) -> None:
    text = tgi.text_generation(DOCUMENT, max_new_tokens=24)
    assert "".join(tgi.text_generation(DOCUMENT, max_new_tokens=24, stream=True)) == text


# -- archives ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "folder", ["model/", pytest.param(".", marks=pytest.mark.slow)], ids=["with-the-folder", "without"]
)
def test_a_tarball_serves(model: Path, scratch: Path, tmp_path: Path, folder: str) -> None:
    directory = copied(model, tmp_path / "model", properties="engine=Python\noption.max_rolling_batch_size=4\n")
    where, what = (tmp_path, "model/") if folder == "model/" else (directory, ".")
    subprocess.run(["tar", "czf", str(tmp_path / "model.tar.gz"), what], cwd=where, check=True)
    with tarfile.open(tmp_path / "model.tar.gz") as archive:
        assert any(name.endswith("openvino_model.bin") for name in archive.getnames())
    shutil.rmtree(directory)
    with serving(tmp_path / "model.tar.gz", scratch) as server:
        assert tells_a_story(lambda: server.http.post("/invocations", json=REQUEST).json()["generated_text"])
        assert server.says("up to 4 sequences")


# -- configuration -----------------------------------------------------------------------------------------------------


def shown(model: Path, scratch: Path, **variables: str) -> dict[str, dict[str, Any]]:
    run = run_cli("config", str(model), "--json", environ=environment(scratch / "cache", **variables))
    assert run.returncode == 0, run.stderr
    options: dict[str, dict[str, Any]] = json.loads(run.stdout)["options"]
    return options


def test_max_num_tokens_widens_the_limits_and_says_so(model: Path, scratch: Path) -> None:
    options = shown(model, scratch, OPTION_MAX_NUM_TOKENS="4096")
    names = ("max_num_tokens", "max_input_len", "max_output_len", "max_rolling_batch_size")
    assert [options[name]["value"] for name in names] == [4096, 4096, 4096, 256]
    origins = [options[name]["origin"] for name in names]
    assert [origin["kind"] for origin in origins] == ["environment", "derived", "derived", "derived"]
    assert all("OPTION_MAX_NUM_TOKENS" in origin["text"] for origin in origins)


def test_max_rolling_batch_size_alone_is_itself(model: Path, scratch: Path) -> None:
    option = shown(model, scratch, OPTION_MAX_ROLLING_BATCH_SIZE="8")["max_rolling_batch_size"]
    assert option["value"] == 8
    assert option["origin"]["where"] == "OPTION_MAX_ROLLING_BATCH_SIZE"


# -- what a newcomer gets wrong ----------------------------------------------------------------------------------------


def refused(path: Path, scratch: Path, **variables: str) -> str:
    """What `serve` prints when it does not start."""
    run = run_cli("serve", str(path), "--port", "0", environ=environment(scratch / "cache", **variables))
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    return run.stderr


def test_a_wrong_configuration_is_reported_as_a_whole(model: Path, scratch: Path, tmp_path: Path) -> None:
    properties = "option.max_rolling_batch_size=many\noption.kv_cache_free_gpu_mem_fraction=7\n"
    told = refused(copied(model, tmp_path / "model", properties=properties), scratch, OPTION_MAX_INPUT_LEN="-1")
    assert "3 configuration problems" in told
    for word in ("max_rolling_batch_size", "many", "kv_cache_free_gpu_mem_fraction", "7", "serving.properties"):
        assert word in told
    assert "OPTION_MAX_INPUT_LEN" in told


def test_an_unknown_option_gets_a_did_you_mean(model: Path, scratch: Path, tmp_path: Path) -> None:
    properties = "option.max_roling_batch_size=4\noption.strict=true\n"
    told = refused(copied(model, tmp_path / "model", properties=properties), scratch)
    assert "max_roling_batch_size" in told
    assert "did you mean" in told
    assert "max_rolling_batch_size" in told


def test_a_missing_directory_is_named(scratch: Path, tmp_path: Path) -> None:
    told = refused(tmp_path / "nowhere", scratch)
    assert str(tmp_path / "nowhere") in told


def test_a_directory_without_a_model_says_what_is_there_and_what_is_missing(scratch: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    told = refused(tmp_path, scratch)
    assert "notes.txt" in told
    assert "config.json" in told
    assert "safetensors" in told


def test_a_missing_tokenizer_is_reported(model: Path, scratch: Path, tmp_path: Path) -> None:
    directory = copied(model, tmp_path / "model")
    for path in directory.rglob("*tokenizer*"):
        path.unlink()
    assert "tokenizer" in refused(directory / "engine", scratch)


def test_a_file_that_is_no_archive_is_reported(scratch: Path, tmp_path: Path) -> None:
    (tmp_path / "model.tar.gz").write_text("not an archive")
    told = refused(tmp_path / "model.tar.gz", scratch)
    assert "model.tar.gz" in told
    assert "gzip" in told or "tar" in told


def test_a_truncated_engine_is_reported_before_it_is_loaded(model: Path, scratch: Path, tmp_path: Path) -> None:
    engine = copied(model / "engine", tmp_path / "engine")
    weights = engine / "openvino_model.bin"
    size = weights.stat().st_size
    os.truncate(weights, size - 1000)
    told = refused(engine, scratch)
    assert f"the engine {engine} is damaged" in told
    assert f"openvino_model.bin: truncated, {size - 1000} of {size} bytes" in told
    assert "djl-trtllm compile" in told


def test_an_engine_that_cannot_be_loaded_is_reported_with_the_loaders_words(
    model: Path, scratch: Path, tmp_path: Path
) -> None:
    engine = copied(model / "engine", tmp_path / "engine")
    (engine / "manifest.json").unlink()
    graph = engine / "openvino_model.xml"
    graph.write_text(graph.read_text().replace('type="MatMul"', 'type="NoSuchOperation"'))
    run = run_cli("serve", str(engine), "--port", "0", environ=environment(scratch / "cache"))
    assert run.returncode == 1
    assert "has failed: the engine process" in run.stderr
    assert "doesn't contain the operation with type: NoSuchOperation" in run.stderr


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{not json", ["not valid JSON"]),
        (b"", ["the body is empty"]),
        (b"{}", ["'inputs' field"]),
        (b'{"inputs": ["a", "b"]}', ["must be a string", "one request per prompt"]),
        (b'{"inputs": "a", "parameters": {"max_new_token": 5}}', ["max_new_token", "did you mean 'max_new_tokens'"]),
        (b'{"inputs": "a", "parameters": {"temperature": "hot"}}', ["'temperature' is \"hot\"", "expected a number"]),
        (b'{"inputs": "a", "parameters": {"top_p": 7}}', ["'top_p' is 7", "at most 1"]),
        (b'{"inputs": "a", "parameters": {"max_new_tokens": 100000}}', ["max_output_len is ", "100000"]),
        (b'{"inputs": "a", "parameters": {"bad_sequences": ["b"]}}', ["bad_sequences", "not supported"]),
    ],
)
def test_a_bad_request_says_what_is_wrong(default_server: Server, body: bytes, words: list[str]) -> None:
    answer = default_server.http.post("/invocations", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 424
    assert list(answer.json()) == ["error", "code"]
    assert answer.json()["code"] == 424
    for word in words:
        assert word in answer.json()["error"]


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(default_server: Server) -> None:
    error = default_server.post("wolf " * 2000).json()["error"]
    assert re.search("the prompt has 20.. tokens", error)
    assert "max_input_len is 1024" in error


def test_unknown_paths_models_and_methods_are_reported(default_server: Server) -> None:
    http = default_server.http
    assert http.get("/nothing").status_code == 404
    unknown = http.post("/predictions/nobody", json=REQUEST)
    assert unknown.status_code == 404
    assert "nobody" in unknown.json()["message"]
    assert http.get("/invocations").status_code == 405


def test_an_overload_is_refused_at_once_with_queue_depth_and_retry_after(model: Path, scratch: Path) -> None:
    request = {"inputs": DOCUMENT, "parameters": {"max_new_tokens": 300, "ignore_eos": True}}
    with serving(model, scratch, OPTION_MAX_ROLLING_BATCH_SIZE="1", SERVING_JOB_QUEUE_SIZE="2") as server:
        answers = server.together([request] * 8)
    assert sorted(answer.status for answer in answers) == [200] * 3 + [503] * 5
    served, refused = ([answer for answer in answers if answer.status == status] for status in (200, 503))
    assert max(answer.ended for answer in refused) < min(answer.ended for answer in served)
    for answer in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json["type"] == "WlmCapacityException"
        assert (answer.json["queue_depth"], answer.json["queue_capacity"]) == (2, 2)
        assert "job_queue_size is 2" in answer.json["message"]


def test_ping_says_when_the_model_is_ready(default_server: Server) -> None:
    answer = httpx.get(f"{default_server.url}/ping", trust_env=False)
    assert answer.status_code == 200
    assert [status["status"] for status in answer.json().values()] == ["Healthy"]
