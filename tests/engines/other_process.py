"""What other processes do: `other_process.py compile BEHAVIOUR... SPEC`, `cache WHAT ROOT NAME [LEASE_SECONDS]`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def compile_(behaviour: str, *further: str) -> None:
    """Do what a compiler does, or one thing that it should not do."""
    *arguments, spec_path = further
    out = Path(json.loads(Path(spec_path).read_text())["out"])
    (out / "openvino_model.xml").write_text("<net>half")
    print("@@phase load", flush=True)
    if behaviour == "fail":
        for number in range(60):
            print(f"line {number}")
        print("@@phase convert")
        print("Loading:   0%\rLoading: 100%")
        raise SystemExit("ValueError: this architecture is not supported")
    if behaviour == "hang":
        # A child that outlives its parent unless the whole group is killed.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(arguments[0]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    if behaviour == "orphan":
        from djl_trtllm.engines.compiler import die_with_parent

        die_with_parent()
        Path(arguments[0]).write_text(str(os.getpid()))
        time.sleep(600)
    if behaviour == "fill":
        # As a library that hides the reason.
        with (out / "openvino_model.bin").open("wb") as weights:
            try:
                while True:
                    weights.write(bytes(1 << 16))
            except OSError:
                raise SystemExit("RuntimeError: writing failed") from None
    if behaviour == "killed":
        os.kill(os.getpid(), 9)
    if behaviour == "slow":
        from djl_trtllm.engines.compiler import die_with_parent

        die_with_parent()
        Path(os.environ["TMPDIR"], "work").touch()
        time.sleep(0.2)
    for phase in ("convert", "tokenizer", "save"):
        print(f"@@phase {phase}", flush=True)
    if behaviour == "half":
        return
    (out / "openvino_model.xml").write_text("<?xml version='1.0'?><net></net>")
    (out / "openvino_model.bin").write_bytes(b"weights")


def cache(what: str, root: Path, name: str, lease_seconds: float | None = None) -> None:
    """Wait for the start, then get the engine; files in `root` say who built it, and who has it whole.

    With a lease the process is a machine of a fleet, whose engines are in S3 too.
    """
    from djl_trtllm.engines.cache import EngineCache, Manifest
    from djl_trtllm.engines.fleet_cache import FleetCache
    from djl_trtllm.model.remote.s3 import S3Address
    from djl_trtllm.model.work_directory import staged
    from tests.engines.helpers import KEY, seal

    def fill(directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "model.bin").write_bytes(b"half")
        (root / f"built-by-{name}").touch()
        time.sleep(0.5 if what == "race" else 600)
        (directory / "model.bin").write_bytes(b"the whole engine")
        seal(directory)

    def build(out: Path) -> None:
        if what == "half-in-place":
            fill(out)
        else:
            with staged(out) as partial:
                fill(partial)

    if what == "use":
        assert EngineCache(root / "cache").lookup(KEY) is not None
        (root / "using").touch()
        time.sleep(600)
    (root / f"ready-{name}").touch()
    while not (root / "go").exists():
        time.sleep(0.01)
    if lease_seconds is None:
        entry = EngineCache(root / "cache").get_or_build(KEY, build, print)
    else:  # every machine has its own disk
        fleet = FleetCache(S3Address.parse("s3://fleet-bucket/engines"), lease_seconds=lease_seconds)
        entry = EngineCache(root / name).get_or_build(KEY, lambda out: fleet.provide(KEY, out, build, print), print)
    manifest = Manifest.read(entry)
    if manifest is not None and not manifest.verify(entry):
        (root / f"served-by-{name}").touch()


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_(*sys.argv[2:])
    else:
        cache(sys.argv[2], Path(sys.argv[3]), sys.argv[4], *map(float, sys.argv[5:]))
