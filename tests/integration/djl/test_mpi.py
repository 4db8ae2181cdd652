"""Workers that mpirun starts, as DJL does for `engine=MPI` and for `option.rolling_batch=trtllm` (0.36)."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from tests.integration.djl.models import djl_model
from tests.integration.djl.socket_engine import SocketEngine
from tests.support.client import body


def test_the_first_rank_serves_and_the_others_stay_idle(mode: str, tmp_path: Path) -> None:
    with SocketEngine(djl_model(tmp_path / "model", mode), mode, ranks=2) as engine:
        answers = [engine.request(body(20, stream=True)) for _ in range(8)]
        for answer in answers:
            lines = answer.wait().body.splitlines()
            assert (answer.code, len(lines)) == (200, 20), engine.log()
            assert json.loads(lines[-1])["generated_text"]
        # One engine process, and it is no part of the MPI world.
        host = engine.host()
        assert not [name for name in host.environ() if name.startswith(("OMPI_", "PMIX_", "PMI_", "PRTE_"))]
        ranks = [
            process
            for process in psutil.Process(engine.pid).children(recursive=True)
            if "djl_python_engine.py" in " ".join(process.cmdline())
        ]
        assert len(ranks) == 2
        assert host.ppid() in {rank.pid for rank in ranks}
