"""The engines of a comparison, with programs in the place of the Pythons that have them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from djl_trtllm.engines.hardware import GpuState
from djl_trtllm.errors import BenchmarkError
from djl_trtllm.versus.engines import Engine, common_limits, differences, read_engines, resolve, serving
from tests.support.processes import survivors

READY = """
import http.server, subprocess, sys
print("engine", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)

class Ping(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(b'# HELP djl_trtllm_executor_restarts_total 7\\nx 1\\n')
            self.wfile.write(b'djl_trtllm_executor_restarts_total{model="a"} 2.0\\n')
            self.wfile.write(b'djl_trtllm_executor_restarts_total{model="b"} 1.0\\nx_restarts_total 9\\n')

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ping)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""


def program(path: Path, text: str) -> Engine:
    """An engine whose Python is a program that runs `text` whatever it is asked for."""
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return Engine(path.name, str(path))


def option(value: Any, *, is_set: bool = False, effect: str = "x") -> dict[str, Any]:
    return {"key": "option.x", "value": value, "set": is_set, "effect": effect}


def test_engines_have_a_python_each_and_tensorrt_llm_is_its_pytorch_backend() -> None:
    assert read_engines(f"vllm={sys.executable} , tensorrt_llm") == [
        Engine("vllm", sys.executable),
        Engine("pytorch", sys.executable),
    ]


def test_limits_that_differ_are_the_smallest_and_others_are_left_alone() -> None:
    one = {"max_rolling_batch_size": 256, "max_input_len": 1024, "max_output_len": 512, "max_seq_len": 4096}
    other = {"max_rolling_batch_size": 32, "max_input_len": 1024, "max_output_len": 600, "max_seq_len": None}
    resolved = [{name: option(value) for name, value in each.items()} for each in (one, other)]
    assert common_limits(resolved) == {"max_rolling_batch_size": 32, "max_output_len": 512}


def test_options_differ_by_value_or_where_one_engine_does_nothing_with_them() -> None:
    nothing = "no effect on b"
    assert differences([{"x": option(4)}, {"x": option(5)}]) == {"option.x": ["4", "5"]}
    both = [{"x": option(True, is_set=True)}, {"x": option(True, is_set=True, effect=nothing)}]
    assert differences(both) == {"option.x": ["true", "no effect"]}
    same = [{"x": option(4)}, {"x": option(4, effect=nothing)}]
    assert differences(same) == {}, "nobody has set it"
    assert differences([{"backend": option("a")}, {"backend": option("b")}]) == {}
    words = [{"x": option(value, is_set=True)} for value in ("auto", "fp8", None)]
    assert differences(words) == {"option.x": ["auto", "fp8", "null"]}
    assert differences([{"x": option(4, is_set=True)}] * 2) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise SystemExit('No module named typer')", "cannot run djl-trtllm: No module named typer; install"),
        ('print(\'{"served": false, "summary": ["x", "cannot be served: no vLLM"]}\')', "cannot be served: no vLLM"),
    ],
    ids=["no server", "no engine"],
)
def test_an_engine_that_cannot_serve_the_model_says_why(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError) as failure:
        resolve(program(tmp_path / "vllm", text), "story", {})
    assert said in str(failure.value) and str(failure.value).startswith("vllm")


def test_a_python_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine, said in (
        (Engine("vllm", str(tmp_path / "missing")), "No such file"),
        (program(tmp_path / "silent", "raise SystemExit(1)"), "it wrote nothing"),
        (
            program(tmp_path / "text", "print('no JSON'); import sys; sys.stderr.write('first\\n\\n  last  \\n')"),
            ": last;",
        ),
    ):
        with pytest.raises(BenchmarkError) as failure:
            resolve(engine, "story", {})
        assert said in str(failure.value) and engine.python in str(failure.value)
    own = program(tmp_path / "own", "import sys; sys.exit('error: no model at story')")
    with pytest.raises(BenchmarkError, match=r"^own: no model at story$"):
        resolve(own, "story", {})
    monkeypatch.setattr("djl_trtllm.versus.engines._CONFIG_SECONDS", 0.2)
    with pytest.raises(BenchmarkError, match=r"^slow: .*did not end within 0.2 s"):
        resolve(program(tmp_path / "slow", "import time; time.sleep(60)"), "story", {})


def test_a_server_that_ends_while_it_starts_is_quoted(tmp_path: Path) -> None:
    text = "import sys; print('2026-01-01 10:00:00,5 ERROR a.b: no memory for ' + sys.argv[4]); raise SystemExit(3)"
    engine = program(tmp_path / "vllm", text)
    with (
        pytest.raises(BenchmarkError, match=r"^vllm: .*\(status 3\): no memory for story$"),
        serving(engine, "story", {}, tmp_path / "log"),
    ):
        pass


def test_a_server_that_ends_while_it_is_measured_is_quoted_in_place_of_what_its_client_noticed(tmp_path: Path) -> None:
    text = READY.replace("self.end_headers()", "self.end_headers(); print('no memory', flush=True); os._exit(9)")
    engine = program(tmp_path / "vllm", f"import os{text}")
    with (
        pytest.raises(BenchmarkError, match=r"^vllm: the server ended while .*\(status 9\): no memory$"),
        serving(engine, "story", {}, tmp_path / "log") as server,
    ):
        server.process.wait()
        raise BenchmarkError("connection refused")


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_no_process_of_a_server_is_left(error: type[BaseException] | None, tmp_path: Path) -> None:
    def use() -> None:
        with serving(program(tmp_path / "vllm", READY), "story", {}, tmp_path / "log") as server:
            assert (server.memory()["memory_bytes"] or 0) > 1_000_000 and server.seconds > 0 and server.restarts() == 3
            if error is not None:
                raise error

    if error is None:
        use()
    else:
        with pytest.raises(error):
            use()
    engine = int((tmp_path / "log").read_text().split()[1])
    assert not psutil.pid_exists(engine) or survivors([psutil.Process(engine)]) == []


def test_the_memory_of_gpus_is_what_came_into_use_since_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter([(GpuState(100, 90), GpuState(100, 100)), (GpuState(100, 30), GpuState(100, 60)), ()])
    monkeypatch.setattr("djl_trtllm.versus.engines.read_states", lambda: next(states))
    with serving(program(tmp_path / "vllm", READY), "story", {}, tmp_path / "log") as server:
        assert [server.memory()["gpu_memory_bytes"] for _ in range(2)] == [100, None]


def test_a_measured_server_has_nothing_of_a_server_in_production(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVING_API_KEY", "secret")
    monkeypatch.setenv("OPTION_DTYPE", "fp32")
    engine = program(
        tmp_path / "vllm", "import os, json; print(json.dumps({'served': True, 'options': dict(os.environ)}))"
    )
    found = resolve(engine, "story", {})
    assert found["OPTION_DTYPE"] == "fp32" and "SERVING_API_KEY" not in found
    assert found["SERVING_LOG_LEVEL"] == "info", "which says where it listens"
    text = READY.replace("import http", "import os; print(sorted(os.environ)); import http", 1)
    with serving(program(tmp_path / "vllm", text), "story", {}, tmp_path / "log"):
        environ = (tmp_path / "log").read_text().splitlines()[0]
    assert "'OPTION_DTYPE'" in environ and "SERVING_API_KEY" not in environ


def test_the_commands_of_an_engine_have_its_backend_the_limits_and_no_other_clients(tmp_path: Path) -> None:
    shown = "import json, sys; print(json.dumps({'served': True, 'options': {'argv': sys.argv[1:]}}))"
    limits, given = {"max_input_len": 7}, ["--option=backend=vllm", "--option=max_input_len=7"]
    assert resolve(program(tmp_path / "vllm", shown), "story", limits) == {
        "argv": ["-m", "djl_trtllm.cli", "config", "story", "--json", "--all", *given]
    }
    text = READY.replace("import http", "import sys; print(sys.argv[1:]); import http", 1)
    with serving(program(tmp_path / "vllm", text), "story", limits, tmp_path / "log"):
        words = ["-m", "djl_trtllm.cli", "serve", "story", "--host", "127.0.0.1", "--port", "0", *given]
        assert (tmp_path / "log").read_text().splitlines()[0] == str(words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (",", "nothing is no engine"),
        ("vllm", "expected two or more"),
        ("vllm,nothing", "nothing is no engine; expected tensorrt"),
        ("vllm,auto", "auto is no engine"),
        ("vllm,vllm", "vllm is named twice"),
        ("tensorrt_llm,pytorch", "pytorch is named twice"),
        ("vllm=/nowhere/python,openvino", "/nowhere/python is no program"),
    ],
)
def test_engines_that_cannot_be_compared_are_refused(text: str, said: str) -> None:
    with pytest.raises(BenchmarkError) as refused:
        read_engines(text)
    assert str(refused.value).startswith(f"--engines {text}: {said}")
