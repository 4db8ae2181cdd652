"""Triton's Python client over HTTP, unmodified, and the request lines of the workflow for Llama."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from djl_trtllm.model import Tokenizer
from tests.support.models import PROMPT
from tests.support.server import Server
from tests.support.triton_tensors import prompt_tensors, tensor

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

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


def inputs(tokens: int = 7, *, binary: bool = True) -> list[Any]:
    return prompt_tensors(triton, PROMPT, tokens, binary_data=binary)


def shell(server: Server, script: str) -> str:
    """What a line of the document prints, with this server's port."""
    line = script.replace("localhost:8000", f"localhost:{server.port}")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=True).stdout


@needs_curl
def test_the_documents_request_is_answered_with_its_keys_in_their_order(server: Server, tokenizer: Tokenizer) -> None:
    answer = json.loads(shell(server, CURL))
    assert list(answer) == KEYS
    text = answer.pop("text_output")
    assert answer == {
        "cum_log_probs": 0.0,
        "model_name": "ensemble",
        "model_version": "1",
        "output_log_probs": [0.0] * 20,
        "sequence_end": False,
        "sequence_id": 0,
        "sequence_start": False,
    }
    ids = tokenizer.encode("What is machine learning?")
    assert text == tokenizer.decode((ids * 20)[:20])


@needs_curl
def test_the_documents_20_requests_at_the_same_time(start: Any, tmp_path: Any) -> None:
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


def test_the_server_and_its_models_describe_themselves(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    for name in ("ensemble", "tensorrt_llm_bls", "preprocessing", "tensorrt_llm", "postprocessing", "scripted"):
        assert client.is_model_ready(name) and client.is_model_ready(name, "1")
    assert not client.is_model_ready("hen") and not client.is_model_ready("ensemble", "2")
    assert "generate" in client.get_server_metadata()["extensions"]
    assert len(client.get_model_metadata("ensemble")["inputs"]) == 34
    assert client.get_model_config("ensemble")["model_transaction_policy"] == {"decoupled": True}
    states = {model["name"]: model["state"] for model in client.get_model_repository_index()}
    assert states["ensemble"] == states["tensorrt_llm_bls"] == states["scripted"] == "READY"


def test_statistics_grow(client: Any) -> None:
    def count() -> int:
        (model,) = client.get_inference_statistics("ensemble", "1")["model_stats"]
        assert client.get_inference_statistics()["model_stats"]
        return int(model["inference_stats"]["success"]["count"])

    before = count()
    client.infer("ensemble", inputs())
    assert count() > before


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", ["ensemble", "tensorrt_llm_bls", "scripted"])
def test_infer_with_bytes_and_with_json(
    client: Any, tokenizer: Tokenizer, name: str, binary: bool, compression: str | None
) -> None:
    result = client.infer(
        name,
        inputs(binary=binary),
        request_id="7",
        outputs=[triton.InferRequestedOutput(each, binary_data=binary) for each in ("text_output", "output_log_probs")],
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )
    text = result.as_numpy("text_output")[0]
    assert (text.decode() if binary else text) == tokenizer.decode(tokenizer.encode(PROMPT)[:7])
    assert result.as_numpy("output_log_probs").tolist() == [[[0.0] * 7]]
    answer = result.get_response()
    assert (answer["model_name"], answer["model_version"], answer["id"]) == (name, "1", "7")


def test_a_batch_has_a_text_for_each_prompt(client: Any, tokenizer: Tokenizer) -> None:
    prompts = tensor(triton, "text_input", [[PROMPT], ["a wolf and a fox"]], "BYTES")
    counts = tensor(triton, "max_tokens", [[5], [3]], "UINT32")
    result = client.infer("ensemble", [prompts, counts])
    texts = [text.decode() for text in result.as_numpy("text_output")]
    expected = [(PROMPT, 5), ("a wolf and a fox", 3)]
    assert texts == [tokenizer.decode(tokenizer.encode(prompt)[:count]) for prompt, count in expected]
    assert result.as_numpy("output_log_probs").shape == (2, 1, 5)


def test_words_and_ids_stop(client: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    for name, values, datatype in (("stop_words", ["", "red"], "BYTES"), ("end_id", [ids[3]], "INT32")):
        result = client.infer("ensemble", [*inputs(20), tensor(triton, name, values, datatype)])
        whole = client.infer("ensemble", inputs(20)).as_numpy("text_output")[0].decode()
        text = result.as_numpy("text_output")[0].decode()
        assert whole.startswith(text) and len(text) < len(whole)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([("stream", [True], "BOOL")], "use generate_stream"),
        ([("return_context_logits", [True], "BOOL")], "return_context_logits"),
        ([("hen", [1], "INT32")], "unexpected inference input"),
        ([("top_p", [2.5], "FP32")], "'top_p' is 2.5"),
    ],
)
def test_errors_raise_tritons_exception(client: Any, more: list[Any], message: str) -> None:
    with pytest.raises(InferenceServerException, match=message):
        client.infer("ensemble", [*inputs(), *(tensor(triton, *each) for each in more)])


def test_parts_and_models_that_are_not_there_are_refused(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="send them to 'ensemble'"):
        client.infer("preprocessing", inputs())
    with pytest.raises(InferenceServerException, match="no model named 'hen'"):
        client.infer("hen", inputs())
    with pytest.raises(InferenceServerException, match="scripted error"):
        client.infer("ensemble", inputs(77))


def test_streams_join_to_the_whole_text_as_vllms_benchmark_reads_them(server: Server, tokenizer: Tokenizer) -> None:
    body = {
        "accumulate_tokens": True,
        "text_input": PROMPT,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 7,
        "stream": True,
    }
    text = ""
    with server.http.stream("POST", "/v2/models/ensemble/generate_stream", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [json.loads(line.removeprefix("data:")) for line in answer.iter_lines() if line]
    for event in events:
        assert list(event) == KEYS
        text += event["text_output"]
    assert len(events) > 1
    assert text == tokenizer.decode(tokenizer.encode(PROMPT)[:7])


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
