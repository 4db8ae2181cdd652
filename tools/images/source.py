"""DJL Serving's source from a checkout, for a builder that cannot reach the public one."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tools.images.engine import EngineError

_DOCKERFILE = Path(__file__).resolve().parents[2] / "docker" / "djl.Dockerfile"


@contextlib.contextmanager
def served_source(checkout: Path | None) -> Iterator[str | None]:
    """The address of an archive of the Dockerfile's commit, while the block runs; None without a checkout."""
    if checkout is None:
        yield None
        return
    (commit,) = re.findall(r"^ARG DJL_SERVING_COMMIT=(\w+)$", _DOCKERFILE.read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory(prefix="source-") as folder:
        archive = Path(folder) / f"{commit}.tar.gz"
        command = ["git", "-C", str(checkout), "archive", "--prefix=djl-serving/", f"--output={archive}", commit]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise EngineError(f"{checkout} has no commit {commit} of djl-serving: {done.stderr.strip()}")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/{archive.name}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
