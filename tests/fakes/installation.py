"""Makes the site directory and the environment of a fake TensorRT-LLM."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import psutil
from packaging.version import Version

from djl_trtllm.backends.tensorrt_llm.names import REQUIRED, members, module_of, owners

_HERE = Path(__file__).parent

_OBJECTS = {
    "LLM": ("LLM", "llm", "LLM"),
    "BaseLlmArgs": ("BaseLlmArgs", "configs", "BaseLlmArgs"),
    "LLM.tensorrt": ("LLM", "llm", "_TrtLLM"),
    "LLM.pytorch": ("LLM", "llm", "LLM"),
    "LLM.autodeploy": ("LLM", "llm", "AutoDeployLLM"),
    "SamplingParams": ("SamplingParams", "sampling", "SamplingParams"),
    "GuidedDecodingParams": ("GuidedDecodingParams", "sampling", "GuidedDecodingParams"),
    "LoRARequest": ("LoRARequest", "sampling", "LoRARequest"),
    "RequestOutput": ("RequestOutput", "results", "RequestOutput"),
    "CompletionOutput": ("CompletionOutput", "results", "CompletionOutput"),
    "Logprob": ("Logprob", "results", "Logprob"),
    "EncoderOutput": ("EncoderOutput", "results", "EncoderOutput"),
    "TextPrompt": ("TextPrompt", "inputs", "TextPrompt"),
    "BaseMultimodalInputProcessor": (
        "BaseMultimodalInputProcessor",
        "inputs",
        "BaseMultimodalInputProcessor",
    ),
    "RequestError": ("RequestError", "settings", "RequestError"),
    "CppExecutorError": ("CppExecutorError", "settings", "CppExecutorError"),
}
"""Owner in the table -> public name, module inside the fake, name there; the others are configuration classes."""

MODULES = ("pynvml.py", "xgrammar.py", *(["torch.py"] if shutil.which("nvidia-smi") is None else []))
"""Modules beside the fake. On a GPU what the fake does there needs torch, as transformers does where torch is."""
_ARGUMENTS = {"LLM.tensorrt": "TrtLlmArgs", "LLM.pytorch": "TorchLlmArgs", "LLM.autodeploy": "AutoDeployLlmArgs"}

_MODULE = '''"""Generated: what this version has here."""

_NAMES = {names!r}


def __getattr__(name):
    if name not in _NAMES:
        raise AttributeError(f"module {{__name__!r}} has no attribute {{name!r}}")
    from importlib import import_module

    module, attribute = _NAMES[name]
    return getattr(import_module(f"tensorrt_llm._fake.{{module}}"), attribute)
'''
"""A module's text. As in the later versions, names are loaded when they are used: a rank needs few of them."""


def fake_tensorrt_llm(
    directory: Path,
    *,
    version: str = "1.2.1",
    gpus: int = 1,
    gpu_name: str = "NVIDIA H200",
    compute_capability: tuple[int, int] = (9, 0),
    memory: int = 141 << 30,
    driver: str = "580.65.06",
    script: dict[str, Any] | None = None,
    log: Path | None = None,
) -> dict[str, str]:
    """Environment variables for a subprocess that is to see TensorRT-LLM `version` on `gpus` GPUs of `memory` bytes.

    `script` is the behaviour (see `tensorrt_llm/settings.py` for its keys and defaults); `faults` in it are like those
    of the scripted executor. `log` gets a JSON line for every LLM constructor and generate_async call.
    """
    site = directory / f"site-{version}"
    if not site.exists():
        _install(site, version)
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "FAKE_TENSORRT_LLM_TABLE": str(site / "names.json"),
        "FAKE_TENSORRT_LLM_SCRIPT": json.dumps(script or {}),
        "FAKE_GPUS": str(gpus),
        "FAKE_GPU_NAME": gpu_name,
        "FAKE_GPU_COMPUTE_CAPABILITY": "{}.{}".format(*compute_capability),
        "FAKE_GPU_MEMORY": str(memory),
        "FAKE_GPU_DRIVER": driver,
    }
    if log is not None:
        environment["FAKE_TENSORRT_LLM_LOG"] = str(log)
    return environment


def worker_processes(pid: int) -> list[psutil.Process]:
    """The ranks that live below a process, in order."""
    ranks = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = process.cmdline()
            if "tensorrt_llm._fake.mpi" in command:
                ranks[int(command[command.index("--rank") + 1])] = process
            elif "mpi4py.futures.server" in command:
                environment = process.environ()
                ranks[int(environment.get("OMPI_COMM_WORLD_RANK", environment["PMIX_RANK"]))] = process
    return [ranks[rank] for rank in sorted(ranks)]


def _install(site: Path, version: str) -> None:
    table = _table(version)
    package = site / "tensorrt_llm"
    package.mkdir(parents=True)
    (package / "_fake").symlink_to(_HERE / "tensorrt_llm", target_is_directory=True)
    (package / "version.py").write_text(f'__version__ = "{version}"\n')
    for module in MODULES:
        (site / module).symlink_to(_HERE / module)
    (site / "names.json").write_text(json.dumps(table, indent=1))
    exports: dict[str, dict[str, tuple[str, str]]] = collections.defaultdict(dict)
    for owner, description in table["owners"].items():
        if owners()[owner].kind != "function":
            public, module, attribute = _OBJECTS.get(owner, (owner, "configs", owner))
            exports[description["module"]][public] = (module, attribute)
        if (declared := owners()[owner].declared) is not None:
            module, _, public = declared.partition(":")
            exports[module][public] = ("configs", _ARGUMENTS[owner])
    for module, names in sorted(exports.items()):
        _write_module(site, module, names)
    if Version(version) >= Version("1.4.0rc0"):
        # Requests' seeds (#17172, August 2026); the version is about that of the time.
        _write_module(site, "tensorrt_llm._torch.pyexecutor.sampler.seed_manager", {})
    single = "enable_worker_single_process_for_tp1"
    _write_module(site, "tensorrt_llm.llmapi.utils", {single: ("settings", single)})
    _write_module(
        site, "tensorrt_llm.llmapi.mpi_session", {"RemoteMpiCommSessionClient": ("real_mpi", "RemoteSession")}
    )
    banner = "TensorRT LLM" if Version(version) >= Version("1.1") else "TensorRT-LLM"
    initial = (package / "__init__.py").read_text()
    (package / "__init__.py").write_text(
        f'{initial}\n\nfrom .version import __version__\n\nprint(f"[TensorRT-LLM] {banner} version: '
        '{__version__}", flush=True)\n'
    )
    _write_distribution(site, "tensorrt-llm", version)
    if Version(version) < Version("1.3.0rc21"):
        _write_distribution(site, "tensorrt", "10.13.3.9" if Version(version) >= Version("1.1") else "10.11.0.33")


def _write_module(site: Path, module: str, names: dict[str, tuple[str, str]]) -> None:
    """Write a module as a package, and so the modules above it."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        directory = site.joinpath(*parts[:depth])
        directory.mkdir(exist_ok=True)
        init = directory / "__init__.py"
        if depth == len(parts) or not init.exists():
            init.write_text(_MODULE.format(names=names if depth == len(parts) else {}))


def _write_distribution(site: Path, name: str, version: str) -> None:
    directory = site / f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (directory / "RECORD").write_text("")
    (directory / "INSTALLER").write_text("fake\n")


def _table(version: str) -> dict[str, Any]:
    """The names of this version, as JSON: owner -> module, and its members."""
    described = {}
    for name in owners():
        try:
            module = module_of(name, version)
        except KeyError:
            continue
        described[name] = {
            "module": module,
            "members": {
                member.name: {
                    "type": member.type,
                    "kind": member.kind,
                    "required": member.default is REQUIRED,
                    "default": None if member.default is REQUIRED else member.default,
                }
                for member in members(name, version).values()
            },
        }
    return {"version": version, "owners": described}
