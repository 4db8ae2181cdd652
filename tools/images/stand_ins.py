"""Bases of the images that are made here, where the real ones are not available: no registry, no 20 GB of disk.

They have the real ones' names, so that the Dockerfiles are built unchanged, and therefore a store of their own. They
show that the Dockerfiles work, not that the images do on their real bases.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.images.engine import Engine, EngineError

_DOCKERFILE = Path(__file__).with_name("stand-ins.Dockerfile")
_DEBIAN = "debian-stand-in"
_RELEASE = "bookworm"
_VERSION = (3, 12)
_LIBRARIES = "ca-certificates,libbz2-1.0,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,zlib1g"
"""What a Python is linked with."""
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n", re.DOTALL)
_NOT_COPIED = ("__pycache__", "test", "idlelib", "tkinter", "turtledemo", "_tkinter*", "config-*")
_TARGETS = {"python": "python", "tensorrt-llm/release": "tensorrt-llm", "maven": "maven", "eclipse-temurin": "java"}
"""What a base's name ends with -> target of the stand-ins' Dockerfile."""


def bases(dockerfile: Path) -> list[str]:
    """The images that a Dockerfile builds on, with the defaults of its arguments."""
    text = dockerfile.read_text(encoding="utf-8")
    return list(dict.fromkeys(filled(text, r"^FROM (\S+)")))


def arguments(text: str) -> dict[str, str]:
    """The defaults of a Dockerfile's arguments, without the digests of bases: a stand-in has another one."""
    return {
        name: value.partition("@sha256:")[0] for name, value in re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE)
    }


def options(dockerfile: Path) -> list[str]:
    """Options of a build on stand-ins: bases by tag, and none from a registry."""
    text = dockerfile.read_text(encoding="utf-8")
    pinned = re.findall(r"^ARG (\w+)=\S+@sha256:", text, re.MULTILINE)
    return ["--pull-never", *(f"--build-arg={name}={arguments(text)[name]}" for name in pinned)]


def filled(text: str, pattern: str) -> list[str]:
    """What a pattern finds in a Dockerfile, with the defaults of its arguments."""
    values = arguments(text)
    found = re.findall(pattern, text, re.MULTILINE)
    return [re.sub(r"\$\{(\w+)\}", lambda name: values[name[1]], each) for each in found]


def missing() -> str | None:
    """Why no stand-in can be made here; None if they can."""
    if os.geteuid() != 0:
        return "debootstrap needs root"
    for program in ("podman", "debootstrap"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return None if find_python() else "no Python 3.12 in a folder of its own (pyenv, uv) was found; PYTHON may name it"


def make(engine: Engine, dockerfile: Path) -> None:
    """Make the stand-ins that a Dockerfile needs and that are not there yet."""
    for base in bases(dockerfile):
        if not engine.has(base):
            _make(engine, base)


def target_of(base: str) -> str:
    """The target of the stand-ins' Dockerfile for a base. Raises EngineError if there is none."""
    for end, target in _TARGETS.items():
        if base.rpartition(":")[0].endswith(end):
            return target
    raise EngineError(f"there is no stand-in for {base}: add one to {_DOCKERFILE.name}")


def full_name(base: str) -> str:
    """A base's name with its registry, as the images' labels have it. The dots of a version are none of a registry."""
    registry, slash, _ = base.partition("/")
    return base if slash and "." in registry else f"docker.io/library/{base}"


def _make(engine: Engine, base: str) -> None:
    target = target_of(base)
    with tempfile.TemporaryDirectory(prefix="stand-in-") as folder:
        context = Path(folder)
        if not engine.has(_DEBIAN):
            _make_debian(engine, context / "debian")
        if target in ("python", "tensorrt-llm"):
            _copy_python(context / "python")
        if target == "tensorrt-llm":
            _copy_fake(context)
        engine.build(_DOCKERFILE, full_name(base), context, "--target", target, "--pull-never")


def _make_debian(engine: Engine, root: Path) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={_LIBRARIES}", _RELEASE, str(root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise EngineError(f"{' '.join(command)}:\n{done.stdout[-2000:]}")
    _trust(root)
    # What apt has fetched is no part of an image.
    for leftover in (root / "var" / "cache" / "apt" / "archives", root / "var" / "lib" / "apt" / "lists"):
        for path in leftover.glob("*"):
            path.unlink() if path.is_file() else None
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packing:
        engine.run("import", "-", f"{_DEBIAN}:latest", stdin=packing.stdout)


def _trust(root: Path) -> None:
    """Trust the certificates that this machine trusts: a network may have one of its own."""
    file = ssl.get_default_verify_paths().cafile
    bundle = root / "etc" / "ssl" / "certs" / "ca-certificates.crt"
    usual = set(_CERTIFICATE.findall(bundle.read_text()))
    here = _CERTIFICATE.findall(Path(file).read_text()) if file else []
    for number, certificate in enumerate(found for found in here if found not in usual):
        (root / "usr" / "local" / "share" / "ca-certificates" / f"{number}.crt").write_text(certificate)
    inside = {name: value for name, value in os.environ.items() if name != "TMPDIR"}  # a folder that is not in there
    subprocess.run(["chroot", str(root), "update-ca-certificates"], env=inside, capture_output=True, check=True)
    # pip has a list of its own. A slow index is no reason to begin again.
    settings = ("[global]", "cert = /etc/ssl/certs/ca-certificates.crt", "timeout = 120", "retries = 10", "")
    (root / "etc" / "pip.conf").write_text("\n".join(settings))


@functools.cache
def find_python() -> Path | None:
    """The folder of a Python that can be copied: not the system's, whose files lie among others."""
    pyenv = shutil.which("pyenv")
    root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False).stdout.strip() if pyenv else ""
    found = [os.environ.get("PYTHON"), sys.executable, shutil.which("python3.12")]
    for candidate in filter(None, [*found, *sorted(map(str, Path(root, "versions").glob("3.12*/bin/python3.12")))]):
        program = "import sys; print(*sys.version_info[:2], sys.base_prefix)"
        done = subprocess.run([candidate, "-c", program], capture_output=True, text=True, check=False)
        major, minor, prefix = done.stdout.strip().split(" ", 2) if done.returncode == 0 else ("0", "0", "/usr")
        if (int(major), int(minor)) == _VERSION and prefix not in ("/usr", "/usr/local"):
            return Path(prefix)
    return None


def _copy_python(to: Path) -> None:
    prefix = find_python()
    if prefix is None:
        raise EngineError(missing() or "no Python 3.12")
    library = Path("lib") / "python3.12"
    ignored = shutil.ignore_patterns(*_NOT_COPIED)
    shutil.copytree(prefix / library, to / library, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    # Its own packages are not those of the base.
    shutil.rmtree(to / library / "site-packages")
    (to / library / "site-packages").mkdir()
    (to / "bin").mkdir()
    shutil.copy(prefix / "bin" / "python3.12", to / "bin")
    for shared in (prefix / "lib").glob("libpython3*"):
        shutil.copy(shared, to / "lib", follow_symlinks=False)


def _copy_fake(context: Path) -> None:
    """The tests' TensorRT-LLM, as an installed package."""
    try:
        from tests.fakes.installation import fake_tensorrt_llm
    except ImportError as error:
        raise EngineError(f"the stand-in for TensorRT-LLM needs the environment of scripts/test: {error}") from error
    environment = fake_tensorrt_llm(context / "made")
    site = Path(environment["FAKE_TENSORRT_LLM_TABLE"]).parent
    shutil.copytree(site, context / "tensorrt-llm", ignore=shutil.ignore_patterns("__pycache__"))
    # The fake's pynvml is a package, or the real one would be installed over it.
    info = context / "tensorrt-llm" / "nvidia_ml_py-13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-ml-py\nVersion: 13.0\n")
