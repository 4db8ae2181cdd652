"""vLLM's engine on a GPU behind four front ends: no HTTP, vLLM's Python and Rust servers, and this server.

    python -m benchmarks.gpu MODEL [--kinds alone ceiling lmi openai rust python djl] [--djl CHECKOUT]
                             [--loads 1 64 256 256x1 600@60] [--rounds 5] [--memory 0.2] [--one-at-a-time]
                             [--tensor-parallel 1 2]

MODEL is what `python -m benchmarks.gpu_model DIRECTORY` makes: a Llama with random weights. All servers are started
first, each with its share `--memory` of the GPU, and then loaded in turns, so that each meets the same machine;
where the model is too large for that, `--one-at-a-time` starts each for its own rounds. With several degrees of
`--tensor-parallel` each kind is there once for each. A load is a number of streams, each with a prompt of its own of
about 114 tokens and exactly 256 tokens of output: `64` are 64 streams at once, `256x1` are 256 of one token, and of
`600@60` 60 arrive per second, at random (a Poisson process).

`alone` is vLLM's EngineCore in a loop, without HTTP and with idle neighbours; `ceiling` is the same beside three busy
processes, as a server and a client are, which is what a front end can reach at best. `djl` is DJL Serving with its own
handler for vLLM, as LMI's container starts them, from the checkout `--djl` (see scripts/djl-serving). CPU seconds are
those of a server's process tree but for its engine, per 65,536 tokens: its engine are the processes that hold GPU
memory and, of several, the process that started them. First tokens and intervals between chunks are the client's. The
figures are medians over the rounds, the lowest and highest in brackets; the first round of each is left out. The last
table has the memory that each server holds on each GPU after its rounds, the tokens that this server's KV cache holds,
and what `djl-trtllm size` says of both.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml
from rich.console import Console
from rich.table import Table

from benchmarks.load import percentile, post, run_streams, time_to_first_token, wall_seconds
from benchmarks.servers import free_port, started
from djl_trtllm.bench.client import EventReader, Reader, Stream, TokenReader

_PROMPT = "def main(argv): return open(argv[0]).read() + str({number})"
_REPEATED = 6
_MODEL_LENGTH = 2048
_CPU_TOKENS = 65536
_TOKENS = 256
_NEIGHBOURS = 3
_LONGEST_SECONDS = 300
_RESULT = "tokens per second: "
Body = Callable[[str, int], dict[str, Any]]


def lmi(prompt: str, tokens: int) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "ignore_eos_token": True}, "stream": True}


def openai(prompt: str, tokens: int) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return {**body, "ignore_eos": True, "stream": True}


APIS: dict[str, tuple[str, Body, Callable[[Stream], Reader]]] = {
    "lmi": ("/invocations", lmi, TokenReader),
    "openai": ("/v1/completions", openai, EventReader),
}
"""Path, body, and how the stream is read."""


@dataclass(frozen=True)
class Load:
    """`streams` streams of `tokens` tokens each: at once, or `rate` of them per second."""

    streams: int
    tokens: int
    rate: float | None

    @classmethod
    def of(cls, text: str) -> Load:
        """Read `STREAMS[xTOKENS][@RATE]`. Raises ValueError."""
        found = re.fullmatch(r"(\d+)(?:x(\d+))?(?:@([\d.]+))?", text)
        if found is None:
            raise ValueError(text)
        streams, tokens, rate = found.groups()
        return cls(int(streams), int(tokens or _TOKENS), None if rate is None else float(rate))

    def __str__(self) -> str:
        arriving = "at once" if self.rate is None else f"that arrive at {self.rate:g} per second"
        return f"{self.streams} streams of {self.tokens} tokens {arriving}"


@dataclass(frozen=True)
class Setup:
    """What all servers have in common; `degree` is the number of GPUs, `checkout` one of djl-serving."""

    model: Path
    memory: float
    degree: int
    checkout: Path | None = None


@dataclass
class Round:
    """What a client saw of one load; times in seconds."""

    tokens_per_second: float
    cpu_seconds: float = 0.0
    first_token: float = 0.0
    late_token: float = 0.0
    interval: float = 0.0


def sent(port: int, api: str, load: Load) -> Round:
    """Send the streams, and read them to their ends. Ends the program if one fails."""
    path, body, reader = APIS[api]
    requests = [post(path, body(prompt, load.tokens), reader) for prompt in prompts(load.streams)]
    streams = run_streams(port, requests, timeout=_LONGEST_SECONDS, rate=load.rate)
    # The time between chunks, whatever is in them.
    between = [later - earlier for stream in streams for earlier, later in itertools.pairwise(stream.times)]
    first = [time_to_first_token(stream) for stream in streams]
    speed = load.streams * load.tokens / wall_seconds(streams)
    return Round(speed, 0.0, percentile(first, 0.5), percentile(first, 0.99), percentile(between, 0.99))


_numbers = itertools.count()


def prompts(streams: int) -> list[str]:
    """Prompts that no request had before: no prefix of one is in a cache."""
    return [_PROMPT.format(number=next(_numbers)) * _REPEATED for _ in range(streams)]


def users_of_gpus() -> list[dict[int, int]]:
    """The bytes that each process holds, by GPU."""
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    users = map(pynvml.nvmlDeviceGetComputeRunningProcesses, handles)
    return [{each.pid: each.usedGpuMemory or 0 for each in found} for found in users]


def memory_of(process: psutil.Process) -> list[int]:
    """The bytes that a server's processes hold on each GPU."""
    own = {each.pid for each in (process, *process.children(recursive=True))}
    return [sum(held for pid, held in users.items() if pid in own) for users in users_of_gpus()]


def front_end_seconds(process: psutil.Process, degree: int) -> float:
    """CPU time of a server's processes but for those of its engine."""
    processes = [process, *process.children(recursive=True)]
    users = {pid for found in users_of_gpus() for pid in found}
    total = 0.0
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            # With several GPUs the engine's own process is above those that hold their memory.
            is_engine = each.pid in users or (degree > 1 and any(child.pid in users for child in each.children()))
            if not is_engine or (each == process and each.pid not in users):
                times = each.cpu_times()
                total += times.user + times.system
    return total


# -- the engine without HTTP -------------------------------------------------------------------------------------------


def engine_alone(model: str, memory: float, degree: int) -> None:
    """A process with vLLM's EngineCore: reads `STREAMS TOKENS` lines, and prints the tokens per second of each load."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from tokenizers import Tokenizer
    from vllm import EngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    arguments = EngineArgs(model=model, tokenizer=model, max_num_seqs=512, max_model_len=_MODEL_LENGTH)
    given = {"load_format": "dummy", "gpu_memory_utilization": memory, "tensor_parallel_size": degree}
    for name, value in {**given, "disable_log_stats": True}.items():
        setattr(arguments, name, value)
    engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
    print("ready", flush=True)
    for line in sys.stdin:
        streams, tokens = map(int, line.split())
        ids = [tokenizer.encode(prompt).ids for prompt in prompts(streams)]
        parameters = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        begun, left = time.perf_counter(), streams
        for each in ids:
            number = str(next(_numbers))
            prompt = {"type": "token", "prompt_token_ids": each}
            request = engine.input_processor.process_inputs(number, prompt, parameters, ("generate",))
            if request.external_req_id is None:
                request.external_req_id = number
            engine.engine_core.add_request(request)
        while left:
            outputs = engine.engine_core.get_output().outputs
            left -= sum(output.finish_reason is not None for output in outputs)
        print(f"{_RESULT}{streams * tokens / (time.perf_counter() - begun)}", flush=True)


def _spin() -> None:
    while True:
        pass


class Alone:
    """The process of `engine_alone`."""

    def __init__(self, process: subprocess.Popen[str], neighbours: int) -> None:
        self._process, self._neighbours = process, neighbours

    def measure(self, load: Load) -> Round:
        assert self._process.stdin is not None and self._process.stdout is not None
        busy = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(self._neighbours)]
        for each in busy:
            each.start()
        try:
            self._process.stdin.write(f"{load.streams} {load.tokens}\n")
            self._process.stdin.flush()
            for line in self._process.stdout:  # vLLM's log is there, too
                if line.startswith(_RESULT):
                    return Round(float(line.removeprefix(_RESULT)))
            sys.exit("vLLM's engine has ended")
        finally:
            for each in busy:
                each.kill()
                each.join()


@contextlib.contextmanager
def alone(setup: Setup) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.gpu", str(setup.model), "--memory", str(setup.memory), "--engine"]
    command += ["--tensor-parallel", str(setup.degree)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "ready\n":
                break
        else:
            sys.exit("vLLM's engine did not start")
        yield process
    finally:
        process.kill()
        process.wait()


# -- servers -----------------------------------------------------------------------------------------------------------


class Served:
    """A server that is loaded through one of its APIs."""

    def __init__(self, process: psutil.Process, port: int, degree: int, api: str) -> None:
        self.process, self.port, self._degree, self._api = process, port, degree, api

    def measure(self, load: Load) -> Round:
        before = front_end_seconds(self.process, self._degree)
        found = sent(self.port, self._api, load)
        used = front_end_seconds(self.process, self._degree) - before
        found.cpu_seconds = used * _CPU_TOKENS / (load.streams * load.tokens)
        return found


def ours(setup: Setup) -> tuple[list[str], str, dict[str, str]]:
    """The command of this server, the path that says whether it is ready, and its environment."""
    command = [sys.executable, "-m", "djl_trtllm", "serve", str(setup.model), "--log-level", "warning"]
    return command, "/ping", options(setup)


def options(setup: Setup) -> dict[str, str]:
    """The variables of this server's options."""
    given = {
        "BACKEND": "vllm",
        "LOAD_FORMAT": "dummy",
        "GPU_MEMORY_UTILIZATION": str(setup.memory),
        "MAX_ROLLING_BATCH_SIZE": "512",
        "MAX_MODEL_LEN": str(_MODEL_LENGTH),
        "MODEL_NAME": "m",
        "TENSOR_PARALLEL_DEGREE": str(setup.degree),
    }
    return {f"OPTION_{name}": value for name, value in given.items()}


def estimated(setup: Setup) -> tuple[int, int]:
    """The bytes of each GPU that `djl-trtllm size` says this server takes, and the tokens of its KV cache.

    Of config.json alone, because the checkpoint has no weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(setup.model / "config.json", Path(folder) / "config.json")
        command = [sys.executable, "-m", "djl_trtllm", "size", folder, "--json"]
        done = subprocess.run(command, env={**os.environ, **options(setup)}, capture_output=True, check=True)
    found = json.loads(done.stdout)
    parts: dict[str, int] = found["memory_per_gpu"]
    total = sum(size for name, size in parts.items() if name != "unused")
    return total, parts["kv_cache"] // found["kv_bytes_per_token"]


def kv_tokens(port: int) -> int:
    """The tokens that this server's KV cache holds, by its metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        text = page.read().decode()
    blocks, tokens = (
        float(re.findall(rf"^djl_trtllm_kv_cache_{name}{{.*}} (.*)$", text, re.MULTILINE)[0])
        for name in ("blocks", "tokens_per_block")
    )
    return int(blocks * tokens)


def theirs(setup: Setup) -> tuple[list[str], str, dict[str, str]]:
    """The command of vLLM's server."""
    flags = {
        "served-model-name": "m",
        "load-format": "dummy",
        "gpu-memory-utilization": setup.memory,
        "max-model-len": _MODEL_LENGTH,
        "max-num-seqs": 512,
        "tensor-parallel-size": setup.degree,
    }
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(setup.model), *arguments], "/health", {}


def rust(setup: Setup) -> tuple[list[str], str, dict[str, str]]:
    """The command of vLLM's server with its Rust front end."""
    return *theirs(setup)[:2], {"VLLM_USE_RUST_FRONTEND": "1"}


def djl(setup: Setup) -> tuple[list[str], str, dict[str, str]]:
    """The command of DJL Serving with its own handler for vLLM. Makes a directory beside the model."""
    directory = setup.model.with_name(f"{setup.model.name}-djl")
    directory.mkdir(exist_ok=True)
    lines = {
        "engine": "Python",
        "minWorkers": 1,
        "maxWorkers": 1,
        "job_queue_size": 2048,
        "option.model_id": setup.model,
        "option.entryPoint": "djl_python.lmi_vllm.vllm_async_service",
        "option.rolling_batch": "disable",
        "option.async_mode": "true",
        "option.load_format": "dummy",
        "option.gpu_memory_utilization": setup.memory,
        "option.max_model_len": _MODEL_LENGTH,
        "option.max_rolling_batch_size": 512,
        "option.tensor_parallel_degree": setup.degree,
    }
    (directory / "serving.properties").write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    command = [str(Path(__file__).parents[1] / "scripts" / "djl-serving"), str(setup.checkout), str(directory)]
    # The handler makes a client of S3 for its sessions, whatever model it serves.
    return command, "/ping", {"PYTHON_EXECUTABLE": sys.executable, "AWS_DEFAULT_REGION": "us-east-1"}


SERVERS = {
    "lmi": (ours, "lmi"),
    "openai": (ours, "openai"),
    "rust": (rust, "openai"),
    "python": (theirs, "openai"),
    "djl": (djl, "lmi"),
}
"""How each kind of measurement is served, and through which API it is loaded."""
KINDS = ("alone", "ceiling", *SERVERS)
OURS = ("lmi", "openai")


class Running:
    """Starts what is measured, each once."""

    def __init__(self, stack: ExitStack, setup: Setup) -> None:
        self._stack, self._setup = stack, setup
        self._engine: subprocess.Popen[str] | None = None
        self._servers: dict[Any, tuple[psutil.Process, int]] = {}

    def start(self, kind: str) -> Alone | Served:
        if kind not in SERVERS:
            if self._engine is None:
                self._engine = self._stack.enter_context(alone(self._setup))
            return Alone(self._engine, _NEIGHBOURS if kind == "ceiling" else 0)
        command, api = SERVERS[kind]
        if command not in self._servers:
            port = free_port()
            arguments, ready, environ = command(self._setup)
            process = self._stack.enter_context(started([*arguments, "--port", str(port)], port, ready, **environ))
            self._servers[command] = (process, port)
        return Served(*self._servers[command], self._setup.degree, api)


# -- the table ---------------------------------------------------------------------------------------------------------


def shown(values: list[float], unit: float = 1.0, digits: int = 0) -> str:
    """Median, and the lowest and highest in brackets."""
    middle, low, high = (unit * each for each in (statistics.median(values), min(values), max(values)))
    return f"{middle:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})" if middle > 0 else ""


def print_table(title: str, found: dict[str, list[Round]]) -> None:
    table = Table(*("", "tok/s", "CPU-s per 65,536", "TTFT p50 ms", "TTFT p99 ms", "ITL p99 ms"), title=title)
    for kind, rounds in found.items():
        columns = (
            shown([each.tokens_per_second for each in rounds]),
            shown([each.cpu_seconds for each in rounds], digits=2),
            shown([each.first_token for each in rounds], 1000),
            shown([each.late_token for each in rounds], 1000),
            shown([each.interval for each in rounds], 1000, 1),
        )
        table.add_row(kind, *columns)
    Console(width=140).print(table)


def print_memory(measured: dict[str, list[int]], tokens: dict[str, int], estimates: dict[str, tuple[int, int]]) -> None:
    gpus = [f"GPU {number}, MiB" for number in range(pynvml.nvmlDeviceGetCount())]
    table = Table("", *gpus, "size says", "tokens of KV cache", "size says")
    for name, held in measured.items():
        row = [f"{each >> 20:,}" for each in held]
        if name in estimates:
            total, kv = estimates[name]
            row += [f"{total >> 20:,}", f"{tokens[name]:,}", f"{kv:,}"]
        table.add_row(name, *row)
    Console(width=120).print(table)


def main() -> None:
    """Measure, and print a table for each number of streams, and one of the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[kind for kind in KINDS if kind != "djl"])
    parser.add_argument(
        "--loads", nargs="+", type=Load.of, default=[Load.of(streams) for streams in ("1", "64", "256")]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.2, help="each engine's share of the GPU's memory")
    parser.add_argument("--one-at-a-time", action="store_true", help="start each server for its own rounds")
    parser.add_argument("--tensor-parallel", nargs="+", type=int, default=[1], help="GPUs of each engine")
    parser.add_argument("--djl", type=Path, metavar="CHECKOUT", help="a checkout of djl-serving")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    model, memory, degrees = options.model, options.memory, options.tensor_parallel
    if "djl" in options.kinds and options.djl is None:
        parser.error("the kind djl needs --djl CHECKOUT")
    if options.engine:
        engine_alone(str(model), memory, *degrees)
        return
    pynvml.nvmlInit()
    found: dict[Load, dict[str, list[Round]]] = {load: {} for load in options.loads}
    held: dict[str, list[int]] = {}
    tokens: dict[str, int] = {}
    estimates: dict[str, tuple[int, int]] = {}
    all_kinds = [(kind, degree) for kind in options.kinds for degree in degrees]
    setups = {degree: Setup(model, memory, degree, options.djl) for degree in degrees}
    for group in [[each] for each in all_kinds] if options.one_at_a_time else [all_kinds]:
        with ExitStack() as stack:
            running = {degree: Running(stack, setup) for degree, setup in setups.items()}
            measured = {label(*each, degrees): running[each[1]].start(each[0]) for each in group}
            for load in options.loads:
                for number in range(options.rounds + 1):
                    for name, each in measured.items():
                        if load.rate is not None and isinstance(each, Alone):
                            continue
                        result = each.measure(load)
                        if number:
                            found[load].setdefault(name, []).append(result)
                if not options.one_at_a_time:
                    print_table(f"{model.name}: {load}", found[load])
            servers = {name: each for name, each in measured.items() if isinstance(each, Served)}
            held |= {name: memory_of(each.process) for name, each in servers.items()}
            ours_here = [label(*each, degrees) for each in group if each[0] in OURS]
            tokens |= {name: kv_tokens(servers[name].port) for name in ours_here}
        estimates |= {label(*each, degrees): estimated(setups[each[1]]) for each in group if each[0] in OURS}
    if options.one_at_a_time:
        for load, rounds in found.items():
            print_table(f"{model.name}: {load}", rounds)
    print_memory(held, tokens, estimates)


def label(kind: str, degree: int, degrees: list[int]) -> str:
    return f"{kind}, {degree} GPU{'s' if degree > 1 else ''}" if len(degrees) > 1 else kind


if __name__ == "__main__":
    main()
