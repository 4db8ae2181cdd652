"""One of several machines on one engine cache in S3: `fleet_process.py race|half ROOT NAME LEASE_SECONDS`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from djl_trtllm.engines.cache import EngineCache
from djl_trtllm.engines.fleet_cache import FleetCache
from djl_trtllm.engines.manifest import Manifest
from djl_trtllm.engines.staging import staged
from djl_trtllm.model.remote.s3 import S3Address
from tests.engines.cache_entries import KEY, seal

ADDRESS = S3Address.parse("s3://fleet-bucket/engines")


def main(what: str, root: Path, name: str, lease_seconds: float) -> None:
    """Wait for the start, then get the engine; say who built it, and who has it whole."""

    def build(out: Path) -> None:
        (root / f"built-by-{name}").touch()
        with staged(out) as partial:
            (partial / "model.bin").write_bytes(b"half")
            time.sleep(600 if what == "half" else 0.5)
            (partial / "model.bin").write_bytes(b"the whole engine")
            seal(partial)

    fleet = FleetCache(ADDRESS, lease_seconds=lease_seconds)
    (root / f"ready-{name}").touch()
    while not (root / "go").exists():
        time.sleep(0.01)
    # Every machine has its own disk.
    entry = EngineCache(root / name).get_or_build(KEY, lambda out: fleet.provide(KEY, out, build, print), print)
    manifest = Manifest.read(entry)
    if manifest is not None and not manifest.verify(entry):
        (root / f"served-by-{name}").touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
