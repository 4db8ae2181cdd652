"""The request lines of the documents, as they stand there. Only curl's configuration leads them to the server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.clients.conftest import PROMPT, TOKENS
from tests.support.server import Server

ONE = (
    "curl -X POST localhost:8000/v2/models/ensemble/generate -d "
    """'{"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "", "stop_words": "", """
    """"pad_id": 2, "end_id": 2}'"""
)
MANY = (
    """echo '{"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "", "stop_words": "", """
    """"pad_id": 2, "end_id": 2}' > tmp.txt\n"""
    "printf '%s\\n' {1..20} | xargs -I % -P 20 curl -X POST localhost:8000/v2/models/ensemble/generate -d @tmp.txt"
)


def run(lines: str, server: Server, folder: Path) -> list[dict[str, Any]]:
    """The JSON objects that lines of bash wrote."""
    # localhost:8000 of the documents is this server; a progress meter would only fill the log.
    (folder / ".curlrc").write_text(f'connect-to = "localhost:8000:127.0.0.1:{server.port}"\nsilent\nfail-with-body\n')
    environ = {"PATH": "/usr/bin:/bin", "CURL_HOME": str(folder)}
    done = subprocess.run(["bash", "-c", lines], cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    text, found = done.stdout.strip(), []
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    return found


def test_the_request_of_the_triton_document(server: Server, tmp_path: Path) -> None:
    (answer,) = run(ONE, server, tmp_path)
    assert list(answer) == [
        "cum_log_probs",
        "model_name",
        "model_version",
        "output_log_probs",
        "sequence_end",
        "sequence_id",
        "sequence_start",
        "text_output",
    ]
    assert (answer["cum_log_probs"], answer["model_name"], answer["model_version"]) == (0.0, "ensemble", "1")
    # One for each token; the bundled model may end its answer before the 20th.
    assert answer["text_output"] and answer["output_log_probs"] == [0.0] * len(answer["output_log_probs"])
    assert 0 < len(answer["output_log_probs"]) <= 20


def test_twenty_at_the_same_time(server: Server, tmp_path: Path) -> None:
    answers = run(MANY, server, tmp_path)
    assert len(answers) == 20
    assert len({answer["text_output"] for answer in answers}) == 1


@pytest.mark.parametrize("path", ["/v1/models/model:predict", "/predict"])
def test_the_fields_of_the_truss_document(server: Server, story: str, path: str) -> None:
    body: dict[str, Any] = {
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "beam_width": 1,
        "bad_words_list": [],
        "stop_words_list": [],
        "repetition_penalty": 1.0,
    }
    session = requests.Session()
    session.trust_env = False
    with session.post(server.url + path, json=body, stream=True) as answer:
        assert answer.status_code == 200
        parts = list(answer.iter_content(chunk_size=None))
    assert b"".join(parts).decode() == story
    assert len(parts) > 1
    assert session.post(server.url + path, json={**body, "stream": False}).json() == {"text": story}
    session.close()
