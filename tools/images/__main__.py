"""Build and measure the images, as scripts/images says."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.images import contents, stand_ins
from tools.images.engine import Built, Engine, EngineError, find_engine, find_podman
from tools.images.source import served_source

ROOT = Path(__file__).resolve().parents[2]
IMAGES = {"cpu": "djl-trtllm-cpu", "trtllm": "djl-trtllm", "djl": "djl-trtllm-djl"}
"""Dockerfile -> the image's name."""
MODEL = ROOT / "serving" / "models" / "tiny-stories"
_CHANGED = Path("djl_trtllm") / "version.py"
_START_SECONDS = 600
_HEAD = """\
| image | files | added to the base | built in | with a source line changed | ready after |
|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Builder:
    """What builds, and from what."""

    engine: Engine
    stand_in: bool
    source: str | None = None

    def build(self, name: str, context: Path = ROOT) -> Built:
        """Build one of `IMAGES`."""
        dockerfile = ROOT / "docker" / f"{name}.Dockerfile"
        options = []
        if self.stand_in:
            stand_ins.make(self.engine, dockerfile)
            options += stand_ins.options(dockerfile)
        if name == "djl" and self.source:
            # The network of the machine, where it is served.
            options += ["--build-arg", f"DJL_SERVING_SOURCE={self.source}", "--network=host"]
        return self.engine.build(dockerfile, IMAGES[name], context, *options)

    def rebuild(self, name: str) -> Built:
        """Build it again with a line of the sources changed. The image then is of these."""
        with tempfile.TemporaryDirectory(prefix="changed-") as folder:
            listed = subprocess.run(
                ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for file in filter(None, listed.split("\0")):
                to = Path(folder, file)
                to.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / file).is_file():
                    shutil.copy2(ROOT / file, to)
            with Path(folder, _CHANGED).open("a") as changed:
                # Another line each time.
                changed.write(f"\n# {time.time_ns()}\n")
            return self.build(name, Path(folder))


def measure(builder: Builder, name: str, built: Built) -> str:
    """A row of the table of `docs/deploying.md`, and what it found on standard error."""
    engine, image = builder.engine, IMAGES[name]
    described = engine.inspect(image)
    base = described["Config"]["Labels"]["org.opencontainers.image.base.name"]
    files, below = engine.files(image), engine.files(base)
    own = contents.added(files, below)
    for path, kind in contents.unwanted(own).items():
        print(f"{image}: {path} is {kind}", file=sys.stderr)
    for path, size in contents.largest(own):
        print(f"{image}: {size / 1e6:6.1f} MB {path}", file=sys.stderr)
    layers = len(described["RootFS"]["Layers"])
    own_layers = layers - len(engine.inspect(base)["RootFS"]["Layers"])
    ready = f"{start_up(engine, image):.1f} s" if name == "cpu" else "-"
    again = builder.rebuild(name)
    builder.build(name)
    cells = [
        f"`{image}`",
        f"{sum(files.values()) / 1e6:.0f} MB",
        f"{sum(own.values()) / 1e6:.0f} MB in {own_layers} of {layers} layers",
        # What the cache had takes no time.
        f"{built.seconds:.0f} s" if not built.cached else "-",
        f"{again.seconds:.0f} s, {again.cached} of {again.steps} steps cached",
        ready,
    ]
    return f"| {' | '.join(cells)} |"


def start_up(engine: Engine, image: str) -> float:
    """Seconds from `run` to the first /ping with 200, with the bundled model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = (f"--publish=127.0.0.1:{port}:8080", f"--volume={MODEL}:/opt/ml/model:ro", "--read-only", "--tmpfs=/tmp")
    began = time.monotonic()
    with engine.started(image, options=options) as container:
        while time.monotonic() - began < _START_SECONDS and container.running():
            with contextlib.suppress(OSError, urllib.error.URLError):
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                if opener.open(f"http://127.0.0.1:{port}/ping", timeout=5).status == 200:
                    return time.monotonic() - began
            time.sleep(0.05)
        raise EngineError(f"{image} did not become ready:\n{container.log()[-3000:]}")


@contextlib.contextmanager
def stored(stand_in: bool, store: Path | None) -> Iterator[Engine]:
    """The engine. The images on stand-ins are in `store`, or are removed at the end."""
    if not stand_in:
        yield find_engine() if store is None else find_podman(store)
        return
    if reason := stand_ins.missing():
        raise EngineError(f"--stand-in: {reason}")
    folder = store or Path(tempfile.mkdtemp(prefix="images-"))
    engine = find_podman(folder)
    try:
        yield engine
    finally:
        if store is None:
            remove(engine, folder)


def remove(engine: Engine, store: Path) -> None:
    """Remove a store with all that is in it."""
    engine.run("rm", "--all", "--force", check=False)
    engine.run("rmi", "--all", "--force", check=False)
    shutil.rmtree(store, ignore_errors=True)


def main() -> int:
    """0 when all were built; 1 with the reason."""
    parser = argparse.ArgumentParser(prog="scripts/images")
    parser.add_argument("names", nargs="*", metavar="cpu|trtllm|djl", help="default: cpu")
    parser.add_argument("--stand-in", action="store_true", help="on bases that are made here")
    parser.add_argument("--measure", action="store_true", help="print sizes, layers, times, the largest files")
    parser.add_argument("--store", type=Path, metavar="DIR", help="where podman keeps the images")
    parser.add_argument("--djl-serving", type=Path, metavar="CHECKOUT", help="build DJL Serving from this checkout")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in IMAGES:
            parser.error(f"{name} is no image: expected {', '.join(IMAGES)}")
    try:
        with stored(arguments.stand_in, arguments.store) as engine, served_source(arguments.djl_serving) as source:
            builder = Builder(engine, arguments.stand_in, source)
            rows = []
            for name in arguments.names or ["cpu"]:
                built = builder.build(name)
                print(f"{IMAGES[name]}: built in {built.seconds:.0f} s, {built.cached} of {built.steps} steps cached")
                if arguments.measure:
                    rows.append(measure(builder, name, built))
            if rows:
                print(_HEAD, *rows, sep="\n")
    except EngineError as error:
        print(f"scripts/images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
