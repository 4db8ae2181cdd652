"""A model's `requirements.txt`, which is installed only if the operator allows it."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import subprocess
import sys
from pathlib import Path

from djl_trtllm.errors import ModelError

logger = logging.getLogger(__name__)

SWITCH = "SERVING_INSTALL_REQUIREMENTS"
TIMEOUT = 1800.0
"""Time limit of an installation, in seconds."""


def handle_requirements(model_dir: Path, allowed: bool) -> None:
    """Install the `requirements.txt` of a model directory into this Python, if it exists and is `allowed`.

    If it is not allowed, log that once. Raises `ModelError` with the installer's last lines if it fails.
    """
    file = model_dir / "requirements.txt"
    if not file.is_file():
        return
    if not allowed:
        logger.warning(
            "%s is not installed: packages run code on installation and import. Set %s=true to install them",
            file, SWITCH,
        )  # fmt: skip
        return
    command = _installer(file)
    logger.info("installing %s", file)
    try:
        done = subprocess.run(
            command,
            cwd=model_dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"installing {file} took longer than {TIMEOUT:.0f} s; install the packages beforehand"
        ) from error
    if done.returncode != 0:
        tail = "\n".join(f"  | {line}" for line in done.stdout.splitlines()[-15:])
        raise ModelError(
            f"installing {file} failed (exit status {done.returncode}); correct it, or unset {SWITCH}. "
            f"Last lines of the installer:\n{tail}"
        )
    importlib.invalidate_caches()


def _installer(file: Path) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "-r", str(file)]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable, "-r", str(file)]
    raise ModelError(
        f"{file} cannot be installed: this Python ({sys.executable}) has no pip, and there is no uv on PATH"
    )
