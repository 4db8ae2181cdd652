"""One file of requests: what clients get is what the HTTP server answers, in both modes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.djl.conftest import FAILING, STOPPING, Start
from tests.integration.djl.engines import DjlAnswer, JavaEngine, Ranks, djl_model
from tests.support.client import JSON, body
from tests.support.processes import wait_until
from tests.support.server import serving

pytestmark = pytest.mark.slow

REQUESTS = [json.loads(line) for line in (Path(__file__).parent / "requests.jsonl").read_text().splitlines()]
_OPTIONS = {"option.max_rolling_batch_size": 64, "option.max_input_len": 4096}
_VARYING = re.compile(rb'"(id|created)":("[^"]*"|\d+)')


@dataclass
class Expected:
    status: int
    content_type: str
    body: bytes


def _steady(data: bytes) -> object:
    """An answer without what differs between two answers to the same request.

    Texts of OpenAI's chunks are joined: tokens that come at once are one chunk.
    """
    data = _VARYING.sub(rb'"\1":0', data)
    lines = [line for line in data.splitlines() if b'"finish_reason":null' in line]
    if not lines or b'"choices"' not in lines[0]:
        return data
    texts: dict[int, str] = {}
    for (choice,) in (json.loads(line)["choices"] for line in lines):
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts, sorted(line for line in data.splitlines() if line not in lines)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Expected]:
    """What `djl-trtllm serve` answers."""
    model = djl_model(tmp_path_factory.mktemp("http") / "model", "async", **_OPTIONS)
    answers = {}
    with serving(model) as server:
        for request in REQUESTS:
            headers = JSON | {name.replace("_", "-"): value for name, value in request["headers"].items()}
            got = server.http.post("/invocations", content=request["body"].encode(), headers=headers)
            answers[request["name"]] = Expected(got.status_code, got.headers["content-type"], got.content)
    return answers


def test_answers_are_those_of_the_http_server(wide: JavaEngine, expected: dict[str, Expected]) -> None:
    wrong: list[str] = []
    for request in REQUESTS:
        answer = wide.request(request["body"].encode(), **request["headers"]).wait()
        want = expected[request["name"]]
        assert answer.error == ""
        if want.status == 200:
            same = _steady(answer.body) == _steady(want.body) and answer.code == 200
            same = same and answer.headers["Content-Type"] == want.content_type
        else:
            same = (answer.code, json.loads(answer.body)) == (want.status, json.loads(want.body))
        if not same:
            wrong.append(f"{request['name']}: {answer.code} {answer.body!r}, and over HTTP {want.status} {want.body!r}")
    assert not wrong, "\n".join(wrong)
    assert sum(want.status == 200 for want in expected.values()) >= 40


def test_all_requests_at_once_get_what_they_get_alone(wide: JavaEngine, expected: dict[str, Expected]) -> None:
    running: list[tuple[str, DjlAnswer]] = [
        (request["name"], wide.request(request["body"].encode(), **request["headers"])) for request in REQUESTS
    ]
    for name, answer in running:
        assert _steady(answer.wait().body) == _steady(expected[name].body) or expected[name].status != 200, name
        assert answer.code == expected[name].status, name


def stopped(engine: JavaEngine) -> psutil.Process:
    """The engine process, where its script has stopped it."""
    host = engine.host()
    wait_until(lambda: host.status() == psutil.STATUS_STOPPED, what="a host that stands still")
    return host


def test_tokens_travel_as_they_come(wide: JavaEngine) -> None:
    answer = wide.request(body(STOPPING, stream=True))
    host = stopped(wide)
    wait_until(lambda: answer.body.count(b"\n") == 2, what="the tokens so far")
    assert not answer.ended
    host.resume()
    assert answer.wait().body.count(b"\n") == STOPPING


def test_a_failing_request_costs_the_others_nothing(wide: JavaEngine) -> None:
    good = [wide.request(body(40, stream=True)) for _ in range(10)]
    bad = wide.request(body(FAILING, stream=True))
    whole = wide.request(body(FAILING))
    unreadable = wide.request(b"{")
    assert all(answer.wait().body.count(b"\n") == 40 for answer in good)
    assert json.loads(bad.wait().body.splitlines()[-1])["details"]["finish_reason"] == "error"
    assert whole.wait().code == unreadable.wait().code == 424


def test_too_many_requests_are_refused_at_once(narrow: JavaEngine, mode: str) -> None:
    # DJL itself keeps the requests of a rolling batch that are more than its max_rolling_batch_size waiting.
    refused = 0 if mode == "rolling" else 2
    answers = [narrow.request(body(STOPPING, stream=True))]
    host = stopped(narrow)
    # The others are for fewer tokens, and stop nothing.
    answers += [narrow.request(body(STOPPING - 1, stream=True)) for _ in range(7)]
    wait_until(lambda: sum(answer.ended for answer in answers) == refused, what="refusals")
    host.resume()
    codes = sorted(answer.wait().code for answer in answers)
    assert codes == [200] * (8 - refused) + [503] * refused
    for answer in answers:
        if answer.code == 503:
            assert "job_queue_size" in json.loads(answer.body)["error"]
            assert int(answer.headers["Retry-After"]) >= 1


@pytest.mark.parametrize("mode", ["rolling"], indirect=True)
def test_a_timeout_is_reported(start: Start) -> None:
    engine = start({"steps_per_second": 20}, **{"option.predict_timeout": 1})
    answer = engine.request(body(1_000_000)).wait()
    assert answer.code == 400
    assert "predict_timeout" in json.loads(answer.body)["error"]


_FORMATTERS = """
import json
from djl_python.inputs import Input
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import TextGenerationOutput, output_formatter
from djl_python.request_io import TextInput


@input_formatter
def read(inputs: Input, **kwargs) -> TextInput:
    text = TextInput()
    text.input_text = inputs.get_as_json()["story"]
    text.parameters = {"max_new_tokens": 4, "stream": True}
    return text


@output_formatter
def write(output: TextGenerationOutput) -> str:
    token, index, first, last = output.sequences[output.best_sequence_index].get_next_token()
    return json.dumps({"part": token.text, "last": last}) + chr(10)
"""
_STORY = b'{"story": "the little red riding hood"}'


@pytest.fixture(scope="module")
def over_http(tmp_path_factory: pytest.TempPathFactory) -> tuple[httpx.Response, httpx.Response]:
    """What `djl-trtllm serve` answers with a model's own formatters: to a story, and to a request without one."""
    model = djl_model(tmp_path_factory.mktemp("http") / "model", "async")
    (model / "model.py").write_text(_FORMATTERS)
    with serving(model) as server:
        answered, refused = (server.http.post("/invocations", content=each, headers=JSON) for each in (_STORY, b"{}"))
    return answered, refused


def test_a_models_own_formatters_work_as_in_the_http_server(
    start: Start, over_http: tuple[httpx.Response, httpx.Response], tmp_path: Path
) -> None:
    answered, refused = over_http
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.py").write_text(_FORMATTERS)
    engine = start()
    failed = engine.request(b"{}").wait()
    assert (failed.code, json.loads(failed.body)) == (refused.status_code, json.loads(refused.content))
    assert failed.code == 424 and "KeyError" in failed.body.decode()
    answer = engine.request(_STORY).wait()
    assert (answer.code, answer.body) == (answered.status_code, answered.content) == (200, answer.body)
    assert [json.loads(line)["last"] for line in answer.body.splitlines()] == [False, False, False, True]


# -- Workers that mpirun starts, as DJL does for `engine=MPI` and for `option.rolling_batch=trtllm` (0.36) -------------


def test_the_first_rank_serves_and_the_others_stay_idle(mode: str, tmp_path: Path) -> None:
    with Ranks(djl_model(tmp_path / "model", mode), mode, 2) as engine:
        for text in engine.answers([body(20, stream=True)] * 8):
            lines = text.splitlines()
            assert len(lines) == 20 and json.loads(lines[-1])["generated_text"], engine.log()
        started = {each.pid: " ".join(each.cmdline()) for each in engine.process.children(recursive=True)}
        # One engine process, and it is no part of the MPI world.
        (host,) = (psutil.Process(pid) for pid, command in started.items() if "djl_trtllm.executor.process" in command)
        assert not [name for name in host.environ() if name.startswith(("OMPI_", "PMIX_", "PMI_", "PRTE_"))]
        ranks = [pid for pid, command in started.items() if "djl_python_engine.py" in command]
        assert len(ranks) == 2 and host.ppid() in ranks
