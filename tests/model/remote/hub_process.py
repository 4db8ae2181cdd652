"""A process that has the hub's library loaded, and runs each task that it receives in a fork of itself.

The library reads its settings when it is imported, which takes seconds.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote.fetch import fetch


@dataclass(frozen=True)
class Fetched:
    """What `fetch` did: where the model is, or the message of its DownloadError; what it told, and the log."""

    path: Path | None
    error: str
    told: list[str]
    log: str


class HubProcess:
    """Downloads from the hub at one endpoint."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self._answer = folder / "answer.json"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environ |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
        environ |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HF_HUB_ETAG_TIMEOUT": "60"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.model.remote.hub_process"],
            cwd=Path(__file__).parents[3],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fetch(
        self,
        text: str,
        cache: Path,
        *,
        revision: str | None = None,
        before: str = "",
        environ: Mapping[str, str] = {},
        tokenizer_only: bool = False,
        token: str | None = None,
    ) -> Fetched:
        """Fetch a model into a cache of the hub's, after the Python in `before`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request: dict[str, Any] = {"text": text, "cache": str(cache), "revision": revision, "before": before}
        request |= {"environ": dict(environ), "tokenizer_only": tokenizer_only, "answer": str(self._answer)}
        request["token"] = token
        self._answer.unlink(missing_ok=True)
        print(json.dumps(request), file=self._process.stdin, flush=True)
        self._process.stdout.readline()
        answer = json.loads(self._answer.read_text())
        assert "failed" not in answer, answer["failed"]
        path = Path(answer["path"]) if answer["path"] else None
        return Fetched(path, answer["error"], answer["told"], answer["log"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    told: list[str] = []
    path, error = "", ""
    sys.stderr = log = io.StringIO()
    os.environ.update(request["environ"])
    try:
        exec(request["before"], {})
        cache = Path(request["cache"])
        found = fetch(
            request["text"],
            cache / "downloads",
            told.append,
            revision=request["revision"],
            hub_cache=cache,
            hub_token=request["token"],
            tokenizer_only=request["tokenizer_only"],
        )
        path = str(found)
    except DownloadError as raised:
        error = str(raised)
    except BaseException:
        return {"failed": traceback.format_exc()}
    return {"path": path, "error": error, "told": told, "log": log.getvalue()}


def main() -> None:
    """Answer lines until there are no more."""
    import huggingface_hub.errors
    import huggingface_hub.hf_api

    huggingface_hub.snapshot_download  # noqa: B018 - it is loaded when it is looked up
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            Path(request["answer"]).write_text(json.dumps(_answer(request)))
            os._exit(0)
        os.waitpid(pid, 0)
        print("done", flush=True)


if __name__ == "__main__":
    main()
