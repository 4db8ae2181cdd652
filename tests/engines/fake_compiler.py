"""A compiler for tests: `fake_compiler.py BEHAVIOUR... SPEC`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    behaviour, *arguments, spec_path = sys.argv[1:]
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
        from djl_trtllm.engines.parent_watchdog import die_with_parent

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
        from djl_trtllm.engines.parent_watchdog import die_with_parent

        die_with_parent()
        Path(os.environ["TMPDIR"], "work").touch()
        time.sleep(0.2)
    for phase in ("convert", "tokenizer", "save"):
        print(f"@@phase {phase}", flush=True)
    if behaviour == "half":
        return
    (out / "openvino_model.xml").write_text("<?xml version='1.0'?><net></net>")
    (out / "openvino_model.bin").write_bytes(b"weights")


if __name__ == "__main__":
    main()
