#!/usr/bin/env python3
"""Serve a Triton model repository, with the arguments of tensorrtllm_backend's script of this name.

    python3 scripts/launch_triton_server.py --world_size=1 --model_repo=/tensorrtllm_backend/triton_model_repo

It does what `djl-trtllm serve MODEL_REPO` does, in the foreground, on Triton's ports alone. One process serves all
ranks, without mpirun. It needs nothing but Python: where `djl-trtllm` is not installed, `scripts/serve` beside it makes
an environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

_PORTS = {
    "http_port": "SERVING_TRITON_HTTP_PORT",
    "grpc_port": "SERVING_TRITON_GRPC_PORT",
    "metrics_port": "SERVING_TRITON_METRICS_PORT",
}
_OWN_PORT = ("SERVING_INFERENCE_PORT", "SERVING_INFERENCE_ADDRESS", "SAGEMAKER_BIND_TO_PORT")
_TRITONS = (("SERVING_TRITON_HTTP_PORT", "8000"), ("SERVING_TRITON_METRICS_PORT", "8002"))
_WITHOUT_EFFECT = {
    "--tritonserver": "the server is djl-trtllm",
    "--tensorrt_llm_model_name": "the engine is that of tensorrt_llm",
    "--exit-timeout-secs": "set SERVING_SHUTDOWN_TIMEOUT",
}
_FLAGS_WITHOUT_EFFECT = (
    ("--force", "-f"),
    ("--multi-model",),
    ("--no-mpi",),
    ("--disable-spawn-processes",),
    ("--oversubscribe",),
    ("--trtllm_llmapi_launch",),
)
_DEGREE = "OPTION_TENSOR_PARALLEL_DEGREE"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--world_size", type=int, default=1, help="GPUs that the engine was compiled for; default 1")
    parser.add_argument("--model_repo", type=Path, required=True, metavar="DIR", help="the model repository")
    for name, variable in _PORTS.items():
        parser.add_argument(f"--{name}", type=int, metavar="PORT", help=f"as {variable}; 0: none")
    parser.add_argument("--log", action="store_true", help="write the log to the file")
    parser.add_argument("--log-file", type=Path, default=Path("triton_log.txt"), metavar="FILE")
    for name, instead in _WITHOUT_EFFECT.items():
        parser.add_argument(name, help=f"without effect: {instead}")
    for names in _FLAGS_WITHOUT_EFFECT:
        parser.add_argument(*names, action="store_true", dest="ignored", help="without effect")
    arguments = parser.parse_args()
    if arguments.world_size < 1:
        parser.error(f"--world_size={arguments.world_size}: expected at least 1")
    if not arguments.model_repo.is_dir():
        parser.error(f"--model_repo={arguments.model_repo}: there is no such folder")
    ranks = _ranks(arguments.model_repo)
    if ranks not in (None, arguments.world_size):
        parser.error(
            f"--world_size={arguments.world_size}: the engine in {arguments.model_repo} was compiled for {ranks}"
        )
    return arguments


def _ranks(repository: Path) -> int | None:
    """For how many GPUs the repository's engine was compiled; None if no file says it."""
    for path in sorted(repository.glob("tensorrt_llm/[0-9]*/config.json")):
        try:
            config: Any = json.loads(path.read_text())
            if "pretrained_config" in config:
                return int(config["pretrained_config"]["mapping"]["world_size"])
            built = config["builder_config"]
            return int(built["tensor_parallel"]) * int(built["pipeline_parallel"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    environment = dict(os.environ)
    for name, variable in _PORTS.items():
        port = getattr(arguments, name)
        if port is not None:
            environment[variable] = str(port)
    # djl-trtllm serve opens its own port too, and Triton has none but these.
    ports = (environment.get(name, preset) for name, preset in _TRITONS)
    if (port := next((port for port in ports if port != "0"), None)) and not any(map(environment.get, _OWN_PORT)):
        environment["SERVING_INFERENCE_PORT"] = port
    if arguments.world_size > 1 and _ranks(arguments.model_repo) is None:
        environment.setdefault(_DEGREE, str(arguments.world_size))
    return environment


def main() -> None:
    arguments = _arguments()
    installed = shutil.which("djl-trtllm")
    program = [installed, "serve"] if installed else [str(Path(__file__).resolve().parent / "serve")]
    environment = _environment(arguments)
    if arguments.log:
        with arguments.log_file.open("ab") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
    os.execve(program[0], [*program, str(arguments.model_repo)], environment)  # noqa: S606


if __name__ == "__main__":
    main()
