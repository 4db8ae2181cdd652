"""What clients get through Ray is what they get without."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import boto3
import openai
import pytest

from tests.integration.cluster.conftest import SCRIPTED
from tests.support.client import lmi
from tests.support.ray_cluster import RayCluster
from tests.support.server import Server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

STORY = "Once upon a time there was a little girl"


@pytest.mark.parametrize("stream", [False, True])
def test_the_bundled_model_answers_byte_for_byte_as_without_ray(
    cluster: RayCluster, server: Server, stream: bool
) -> None:
    for inputs in (STORY, "Tell me a story about a fox and a bear", "ein Wolf \N{WOLF FACE}"):
        request = lmi(inputs, stream=stream, max_new_tokens=40, details=True)
        expected = server.http.post("/invocations", json=request)
        answer = cluster.http.post("/invocations", json=request)
        assert (answer.status_code, answer.content) == (200, expected.content)
        assert answer.headers["content-type"] == expected.headers["content-type"]


def test_an_answer_has_one_request_id_that_of_its_request(cluster: RayCluster) -> None:
    given = cluster.http.post("/invocations", json=lmi(STORY, max_new_tokens=1), headers={"X-Request-ID": "mine"})
    assert given.headers.get_list("x-request-id") == ["mine"]
    made = cluster.http.get("/ping")
    assert len(made.headers.get_list("x-request-id")) == 1
    assert len(made.headers["x-request-id"]) > 30


def test_errors_are_those_of_the_server(cluster: RayCluster, server: Server) -> None:
    for request in (lmi(STORY, temperature="hot"), {"inputs": 7}, lmi("wolf " * 3000)):
        expected = server.http.post("/invocations", json=request)
        answer = cluster.http.post("/invocations", json=request)
        assert (answer.status_code, answer.content) == (expected.status_code, expected.content)
        assert answer.status_code >= 400


def test_another_model_of_the_cluster_has_its_own_route(cluster: RayCluster) -> None:
    answer = cluster.http.post(f"{SCRIPTED}/invocations", json=lmi(STORY, max_new_tokens=8))
    assert answer.status_code == 200
    assert answer.json()["generated_text"].strip() in STORY
    assert cluster.http.get(f"{SCRIPTED}/v1/models").json()["data"][0]["id"] == "scripted"
    assert cluster.http.get("/v1/models").json()["data"][0]["id"] == "tiny-stories"


def test_openai_works_unmodified(cluster: RayCluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    whole = client.completions.create(model="tiny-stories", prompt=STORY, max_tokens=16, temperature=0)
    parts = client.completions.create(model="tiny-stories", prompt=STORY, max_tokens=16, temperature=0, stream=True)
    streamed = "".join(part.choices[0].text for part in parts if part.choices)
    assert whole.choices[0].text == streamed != ""


def test_boto3_works_unmodified(cluster: RayCluster) -> None:
    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "region_name": "us-east-1"}
    runtime = boto3.client("sagemaker-runtime", endpoint_url=cluster.url, **keys)
    request = json.dumps(lmi(STORY, max_new_tokens=16))
    answer = runtime.invoke_endpoint(EndpointName="any", ContentType="application/json", Body=request)
    streamed = runtime.invoke_endpoint_with_response_stream(
        EndpointName="any", ContentType="application/json", Body=json.dumps(lmi(STORY, stream=True, max_new_tokens=16))
    )
    data = b"".join(event["PayloadPart"]["Bytes"] for event in streamed["Body"])
    text = json.loads(answer["Body"].read())["generated_text"]
    assert json.loads(data.splitlines()[-1])["generated_text"] == text != ""


def test_curl_works_unmodified(cluster: RayCluster) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl on this machine")
    request = json.dumps(lmi(STORY, stream=True, max_new_tokens=16))
    command = [curl, "--silent", "--fail", "--no-buffer", "--noproxy", "*", "--json", request]
    done = subprocess.run([*command, f"{cluster.url}/invocations"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 16


def test_requests_of_a_session_reach_one_replica(cluster: RayCluster) -> None:
    def finished(session: str) -> float:
        page = cluster.http.get(f"{SCRIPTED}/metrics", headers={"X-Session-Id": session}).text
        return sum(map(float, re.findall(r"^djl_trtllm_finished_total\{.*\} (\S+)$", page, re.MULTILINE)))

    def generate(session: str) -> None:
        request = lmi(STORY, max_new_tokens=1)
        cluster.http.post(f"{SCRIPTED}/invocations", json=request, headers={"X-Session-Id": session})

    def stays(session: str) -> bool:
        before = finished(session)
        for _ in range(3):
            generate(session)
        return finished(session) == before + 3

    sessions = [f"session-{number}" for number in range(8)]
    # While HAProxy learns of the second replica, sessions move. By chance alone, all stay once in 4 billion times.
    wait_until(lambda: all(stays(session) for session in sessions), what="sessions that stay at their replica")
    before = {session: finished(session) for session in sessions}
    generate(sessions[0])
    beside = [session for session in sessions if finished(session) > before[session]]
    assert sessions[0] in beside
    assert beside != sessions, "one replica has all sessions"
