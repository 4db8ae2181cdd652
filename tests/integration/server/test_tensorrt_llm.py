"""What only an engine with workers of its own can do to a server: they die, fall silent, or do not come up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.installation import fake_tensorrt_llm, worker_processes
from tests.support.client import body, raw_post, read_all, read_until
from tests.support.hostile import Pinging
from tests.support.in_process import PROMPT
from tests.support.models import tensorrt_llm_model
from tests.support.processes import survivors, wait_until
from tests.support.server import Server, serving
from tests.support.vision import data_url, encoded, image_part, picture, seeing_model_on_tensorrt_llm

pytestmark = pytest.mark.slow

HANG_TIMEOUT = 2.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """`start(script, **options)`: a server with 64 places on the fake TensorRT-LLM."""
    with contextlib.ExitStack() as stack:

        def start_one(script: dict[str, object], **options: object) -> Server:
            wanted = {"option.max_rolling_batch_size": 64, **options}
            model, environ = tensorrt_llm_model(tmp_path / "model", script, **wanted)
            return stack.enter_context(serving(model, **environ))

        yield start_one


def worker(server: Server) -> psutil.Process:
    """The engine's worker process."""
    (found,) = worker_processes(server.process.pid)
    return found


def message_of(answer: bytes) -> str:
    """The error message of a whole answer or of a stream's last line."""
    head, _, content = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 424"):
        return str(json.loads(content)["error"])
    assert head.startswith(b"HTTP/1.1 200")
    assert content.endswith(b"\r\n0\r\n\r\n")
    last = json.loads([line for line in content.split(b"\r\n") if line.startswith(b"{")][-1])
    assert last["details"]["finish_reason"] == "error"
    return str(last["token"]["error_msg"])


@pytest.mark.parametrize(
    ("number", "hang_timeout", "cause"),
    [(signal.SIGKILL, 600, "worker process"), (signal.SIGSTOP, HANG_TIMEOUT, "silent for")],
    ids=["killed", "silent"],
)
def test_all_of_64_clients_are_reported_when_the_worker_is_lost(
    start: Callable[..., Server], number: signal.Signals, hang_timeout: float, cause: str
) -> None:
    server = start(
        {"steps_per_second": 30},
        **{"option.executor_hang_timeout": hang_timeout, "option.resume_after_restart": "false"},
    )
    before = server.descendants()
    with contextlib.ExitStack() as stack:
        clients: list[tuple[socket.socket, bytes]] = []
        for client in range(64):
            connection = stack.enter_context(server.connect())
            connection.sendall(raw_post(body(100_000, stream=client % 2 == 0), "Connection: close"))
            clients.append((connection, read_until(connection, b"token") if client % 2 == 0 else b""))
        wait_until(lambda: server.metric("running") == 64)
        with Pinging(server) as pinging:
            os.kill(worker(server).pid, number)
            connection, begun = clients.pop()
            answers = [begun + read_all(connection)]
            answered = time.monotonic()
            answers += [begun + read_all(connection) for connection, begun in clients]
            # Nobody waits for the new engine to hear of the old one's end.
            assert answered < pinging.recovered()
    for answer in answers:
        assert cause in message_of(answer)
        assert "the request may be repeated" in message_of(answer)
    assert survivors(before) == []
    assert server.generate(3).status_code == 200
    assert worker(server) not in before
    assert server.metric("executor_restarts_total") == 1


@pytest.mark.parametrize(
    ("error", "message"), [("oom", "insufficient GPU memory"), ("hang", "option.model_loading_timeout")]
)
def test_an_engine_that_does_not_come_up_ends_the_server_with_the_reason(
    tmp_path: Path, error: str, message: str
) -> None:
    model, environ = tensorrt_llm_model(
        tmp_path / "model", {"load_error": error}, **{"option.model_loading_timeout": 4 if error == "hang" else 600}
    )
    with Server(model, environ) as server:
        wait_until(lambda: bool(worker_processes(server.process.pid)) or server.process.poll() is not None)
        server.descendants()
        assert server.wait() == 1
        assert server.says(message)


# -- what the PyTorch backends of TensorRT-LLM's versions want of requests with beams and seeds, on the fake -----------


def details(server: Server, **parameters: object) -> list[float | None]:
    tokens = server.answer(PROMPT, max_new_tokens=4, **parameters)["details"]["tokens"]
    return [token["log_prob"] for token in tokens]


@pytest.mark.parametrize("version", ["1.2.0", "1.3.0"])
def test_beams(tmp_path: Path, version: str) -> None:
    """Another number of beams ends the engine's loop up to 1.2.0, and `logprobs` other than 0 is refused by 1.3."""
    model, _ = tensorrt_llm_model(tmp_path / "model", **{"option.max_beam_width": 2})
    with serving(model, **fake_tensorrt_llm(tmp_path / "fake", version=version)) as server:
        plain = server.answer(PROMPT, max_new_tokens=4)
        beams = server.answer(PROMPT, max_new_tokens=4, num_beams=2)
        assert plain["generated_text"] == beams["generated_text"]
        assert details(server) == details(server, num_beams=2) == 4 * [-0.5]
        stream = server.post(PROMPT, stream=True, max_new_tokens=4).text.splitlines()
        assert json.loads(stream[-1])["generated_text"] == plain["generated_text"]
        for refused in ({"do_sample": True}, {"num_beams": 3}, {"n": 3}):
            answer = server.post(PROMPT, max_new_tokens=4, **refused)
            assert answer.status_code == 424 and "this engine runs every request with 2 beams" in answer.text
        assert server.answer(PROMPT, max_new_tokens=4) == plain
        assert server.metric("executor_restarts_total") == 0


def test_images_are_tokens_of_prompts(tmp_path: Path) -> None:
    model, environ = seeing_model_on_tensorrt_llm(tmp_path / "model")
    pictures = [image_part(data_url(encoded(picture(84, 56, colour)))) for colour in (1, 2)]
    with serving(model, **environ) as server:
        plain, seen = (usage(server, *parts) for parts in ([], pictures))
        assert seen == plain + 12
        wait_until(lambda: server.says(f"prompt_tokens={seen} images=2 image_tokens=12 "))


def usage(server: Server, *parts: dict[str, object]) -> int:
    """The tokens of a prompt with these images."""
    answer = server.http.post("/v1/chat/completions", json=chat(*parts))
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens"])


def chat(*parts: dict[str, object]) -> dict[str, object]:
    text = {"type": "text", "text": PROMPT}
    return {"messages": [{"role": "user", "content": [*parts, text]}], "max_tokens": 4, "temperature": 0}
