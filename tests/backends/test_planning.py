"""Which backends there are, which one runs a model, with which plan, and an engine's own limits."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from djl_trtllm.backends import installed as installed_module, planning
from djl_trtllm.backends.base import Bound, Built, backend_named, backends
from djl_trtllm.backends.installed import classes_of, folder_of, is_of_transformers, tables_of, version_of
from djl_trtllm.backends.planning import (
    choose_backend,
    compiled_quantization,
    describe_limits,
    likely_backend,
    plan_engine,
    served_as_built,
    suppose_machine,
)
from djl_trtllm.config import Backend, Config
from djl_trtllm.engines.cache import Manifest
from djl_trtllm.engines.hardware import Gpu
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Layout, ModelKind, inspect
from tests.backends.echo.backend import EchoBackend
from tests.engines.helpers import CPU_ONLY, configured, gpu_machine
from tests.support.plugin import installed
from tests.support.tables import by_table

GPU = gpu_machine("1.2.1")
ENGINE = Layout(ModelKind.TENSORRT_ENGINE, Path("/engine"), {}, (), None)


@pytest.fixture
def hf(checkpoint: Path) -> Layout:
    return inspect(checkpoint)


# -- the prefix cache --------------------------------------------------------------------------------------------------


@by_table("backend", "version", "keys", "given", "on", "origin")
def test_the_prefix_cache_is_on_where_the_engines_is_unless_keys_would_share_it(
    hf: Layout, backend: str, version: str, keys: bool, given: str | None, on: bool, origin: str
) -> None:
    options = {"backend": backend} | ({"enable_prefix_caching": given} if given else {})
    environ = {"SERVING_API_KEYS_FILE": "/keys.yaml"} if keys else {}
    config = planning.fitted_to_memory(configured(environ, **options), hf, gpu_machine(version))
    assert config.options.enable_kv_cache_reuse is on
    assert str(config.origin("enable_kv_cache_reuse")).startswith(origin)


# -- which there are ---------------------------------------------------------------------------------------------------


def test_every_value_of_the_option_has_one_backend_and_auto_asks_tensorrt_llm_first() -> None:
    names = [name for backend in backends() for name in backend.effects]
    assert sorted(names) == sorted(set(Backend.all_values()) - {"auto"})
    assert all(name in backend_named(Backend(name)).effects for name in names)
    assert [next(iter(backend.effects)) for backend in backends()] == ["tensorrt", "vllm", "openvino", "scripted"]


_ASK = """
from djl_trtllm.backends.base import backend_named, backends, option_maps
from djl_trtllm.config import Backend, load
config = load(None, {"OPTION_BACKEND": "echo"})
echo = config.options.backend
print(echo, repr(echo), Backend("echo") is echo, Backend.all_values()[-1], backend_named(echo) is backends()[-1])
print(type(backends()[-1]).__module__, sorted(option_maps()[echo]))
print(backend_named(Backend("openvino")).effects.keys())
"""


def ask(folder: Path, *points: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | installed(folder, "djl_trtllm.backends", *points)
    return subprocess.run([sys.executable, "-c", _ASK], env=environ, capture_output=True, text=True, timeout=120)


def test_an_installed_package_adds_a_backend(tmp_path: Path) -> None:
    path = "tests.backends.echo.backend:EchoBackend"
    done = ask(tmp_path, f"echo = {path}", f"openvino = {path}")
    assert done.stdout.splitlines() == [
        "echo <Backend.ECHO: 'echo'> True echo True",
        # Its map is empty: this is what admission honours.
        "tests.backends.echo.backend "
        "['max_input_len', 'max_num_sequences', 'max_output_len', 'max_rolling_batch_size', 'max_seq_len']",
        "dict_keys(['openvino'])",
    ], done.stderr


def test_a_backend_that_cannot_be_imported_is_named_with_its_entry_point(tmp_path: Path) -> None:
    done = ask(tmp_path, "echo = echo_engine.missing:Backend")
    (line,) = done.stderr.splitlines()[-1:]
    for word in ("echo_engine.missing:Backend", "djl_trtllm.backends", "No module named", "update or uninstall"):
        assert word in line


def test_a_backend_is_not_selected_by_auto_unless_it_says_so(hf: Layout) -> None:
    assert (EchoBackend().offer(hf, CPU_ONLY), EchoBackend().usual(CPU_ONLY)) == ((None, ""), None)


# -- which one runs a model --------------------------------------------------------------------------------------------


@by_table("version", "gpus", "backend", "reason")
def test_auto_takes_the_best_backend_that_is_here(
    hf: Layout, version: str, gpus: int, backend: str, reason: str
) -> None:
    hardware = gpu_machine(version or None, gpus)
    assert choose_backend(configured(), hf, hardware) == (backend, reason)
    assert likely_backend(configured(), hardware) == backend


@pytest.mark.parametrize("asked", ["tensorrt", "pytorch", "autodeploy", "openvino", "scripted"])
def test_what_was_asked_for_is_the_reason(hf: Layout, asked: str) -> None:
    reason = f"option.backend={asked} (environment variable OPTION_BACKEND)"
    config = configured(backend=asked)
    backend, found = choose_backend(config, hf, GPU)
    assert (backend, found.partition(";")[0]) == (asked, reason)
    assert likely_backend(config, CPU_ONLY) == asked
    plan = plan_engine(config, hf, GPU)
    assert (plan.backend, plan.reason) == (asked, found)
    assert plan.executor.startswith(backend_named(backend).__module__.removesuffix("backend"))


def test_without_a_backend_for_the_files_every_reason_is_named(hf: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    some = (backend_named(Backend.TENSORRT), backend_named(Backend.SCRIPTED))
    monkeypatch.setattr(planning, "backends", lambda: some)
    with pytest.raises(EngineError, match=r"no backend runs .*: TensorRT-LLM is not installed, and there is no GPU$"):
        choose_backend(configured(), hf, CPU_ONLY)


def test_a_machine_is_supposed_to_have_what_this_one_does_not_say_otherwise() -> None:
    gpus = (Gpu("NVIDIA H100", (9, 0)),) * 2
    there = suppose_machine(CPU_ONLY, gpus)
    assert (there.gpus, there.tensorrt_llm, there.has_engine_backend) == (gpus, "1.2.1", True)
    assert there.available_memory == CPU_ONLY.available_memory
    assert suppose_machine(gpu_machine("1.3.0"), gpus).tensorrt_llm == "1.3.0"


# -- an engine's own limits --------------------------------------------------------------------------------------------

BUILT = Built(
    "build_config in /engine/config.json",
    {"max_rolling_batch_size": 16, "max_seq_len": 3072},
    {name: Bound(16, "max_batch_size") for name in ("max_rolling_batch_size", "max_num_sequences")},
    ("a note",),
)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> ServedAsBuilt:
    return ServedAsBuilt(monkeypatch)


class ServedAsBuilt:
    """`served_as_built` for an engine of which the first backend knows nothing, and the second what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.built: Built | None = BUILT
        outer = self

        class Knowing(EchoBackend):
            def built(self, config: Config, layout: Layout) -> Built | None:
                return outer.built

            def quantize_of(self, layout: Layout) -> str | None:
                return "int8"

        monkeypatch.setattr(planning, "backends", lambda: (EchoBackend(), Knowing()))

    def __call__(self, config: Config, layout: Layout = ENGINE) -> Config:
        return served_as_built(config, layout)


def limits(config: Config) -> tuple[int, int | None]:
    return config.options.max_rolling_batch_size, config.options.max_seq_len


def test_what_nobody_set_is_the_engines_and_says_so(serve: ServedAsBuilt, hf: Layout) -> None:
    config = serve(configured())
    assert limits(config) == (16, 3072), "32 sequences, which are the default, are no wish of the user"
    assert str(config.origin("max_seq_len")) == "derived from build_config in /engine/config.json"
    assert not config.is_set("max_seq_len") and config.warnings == () and config.notes == ("a note",)
    asked = configured()
    assert serve(asked, hf) is asked, "a checkpoint has no limits"
    serve.built = None
    assert serve(asked) is asked


def test_what_the_user_set_above_a_bound_is_lowered_to_it_and_reported(serve: ServedAsBuilt) -> None:
    asked = configured(max_rolling_batch_size=512, max_num_sequences="none", max_seq_len=9000)
    config = serve(asked)
    assert limits(config) == (16, 9000), "nothing bounds the second"
    assert config.options.max_num_sequences is None
    (warning,) = config.warnings
    setting = "option.max_rolling_batch_size=512 (environment variable OPTION_MAX_ROLLING_BATCH_SIZE): "
    assert warning.startswith(f"{setting}the engine was compiled with max_batch_size 16")
    assert str(config.origin("max_rolling_batch_size")) == (
        "derived from build_config in /engine/config.json, which lowers 512 (environment variable "
        "OPTION_MAX_ROLLING_BATCH_SIZE)"
    )
    assert config.is_set("max_rolling_batch_size")
    assert serve(configured(max_rolling_batch_size=16)).warnings == ()


def test_what_another_option_of_the_user_bounds_is_not_said_of_the_engine(serve: ServedAsBuilt) -> None:
    bound = Bound(1024, "a longest prompt of", "max_num_tokens")
    serve.built = Built("build_config", {}, {"max_input_len": bound})
    config = serve(configured(max_num_tokens=1024, max_input_len=3000))
    assert config.options.max_input_len == 1024
    cause = "option.max_num_tokens=1024 (environment variable OPTION_MAX_NUM_TOKENS)"
    set_here = "(environment variable OPTION_MAX_INPUT_LEN)"
    assert config.warnings[-1].startswith(
        f"option.max_input_len=3000 {set_here}: {cause} leaves a longest prompt of 1024"
    )
    assert str(config.origin("max_input_len")) == f"derived from {cause}, which lowers 3000 {set_here}"


def test_limits_are_reported_with_their_origins(serve: ServedAsBuilt) -> None:
    config = serve(configured(max_num_tokens=4096, max_input_len=100))
    cause = "option.max_num_tokens=4096 (environment variable OPTION_MAX_NUM_TOKENS)"
    assert describe_limits(config) == (
        "limits: option.max_rolling_batch_size=16, option.max_seq_len=3072 (derived from build_config in "
        f"/engine/config.json); option.max_input_len=4096 (derived from {cause}, which raises 100 (environment "
        f"variable OPTION_MAX_INPUT_LEN)); option.max_output_len=4096 (derived from {cause}); {cause}; "
        "option.max_beam_width=1 (default)"
    )


def test_the_quantisation_of_an_engine_is_in_its_manifest_or_its_own_files(
    serve: ServedAsBuilt, hf: Layout, tmp_path: Path
) -> None:
    engine = replace(ENGINE, path=tmp_path)
    assert compiled_quantization(engine) == "int8"
    assert compiled_quantization(hf) is None
    Manifest.of(
        tmp_path, backend="openvino", checkpoint="", options={"quantize": "int4"}, versions={}, platform=""
    ).write(tmp_path)
    assert compiled_quantization(engine) == "int4"


# -- what an installed package has -------------------------------------------------------------------------------------

PACKAGE = """
import os
TABLE = {"a": 1, "b": 2, 3: 4}
TYPED: dict = {"c": 1}
x, y = {"d": 1}, {}
NUMBER = 3

class Base:
    size: int = 1
    kind: ClassVar[str] = "x"
    _hidden: int = 0
    def method(self): ...

class Own(other.Base, Unknown):
    size: Optional[int] = None
    name: str

class Circle(Circle):
    own: int
"""


def test_classes_and_tables_of_a_package_are_read_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(PACKAGE)
    (tmp_path / "more.py").write_text("class More(Own):\n    last: 'More'\n")
    assert classes_of(tmp_path / "module.py", tmp_path / "more.py") == {
        "Base": {"size": "int"},
        "Own": {"size": "Optional[int]", "name": "str"},
        "Circle": {"own": "int"},
        "More": {"size": "Optional[int]", "name": "str", "last": "'More'"},
    }
    assert tables_of(tmp_path / "module.py") == {"TABLE": {"a", "b"}, "TYPED": {"c"}}
    for content in (b"class A(:", b"\xff\xfe", b"\0"):
        (tmp_path / "broken.py").write_bytes(content)
        assert classes_of(tmp_path / "broken.py") == {}
        assert tables_of(tmp_path / "broken.py") == {}
    assert classes_of(tmp_path / "missing.py") == {}


def test_the_types_that_a_package_names_are_written_out(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "Device = Literal['cpu', 'no-Device-here', \"Kind's Kind\"]\nKind: TypeAlias = Literal[Device, 3]\n"
        "class Own:\n    device: Device | None\n    kind: other.Kind\n    devices: Devices\n"
    )
    device = "Literal['cpu', 'no-Device-here', \"Kind's Kind\"]"
    assert classes_of(tmp_path / "module.py")["Own"] == {
        "device": f"{device} | None",
        "kind": f"other.Literal[{device}, 3]",
        "devices": "Devices",
    }


def test_transformers_is_asked_for_causal_models_by_their_quoted_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path | None] = [None, tmp_path, tmp_path]
    monkeypatch.setattr(installed_module, "folder_of", lambda name: folders.pop(0) if name == "transformers" else 1 / 0)
    assert not is_of_transformers("WolfForCausalLM"), "not installed"
    assert not is_of_transformers("WolfForCausalLM"), "no such file"
    auto = tmp_path / "models" / "auto"
    auto.mkdir(parents=True)
    (auto / "modeling_auto.py").write_text('("wolf", "WolfForCausalLM"), ("dog", "DogForMasks")')
    assert is_of_transformers("WolfForCausalLM")
    folders += [tmp_path] * 2
    assert not is_of_transformers("DogForMasks") and not is_of_transformers("olfForCausalLM")


def test_a_package_has_a_folder_and_the_version_of_the_first_name_that_is_installed() -> None:
    assert version_of("no-such-package", "pytest", "msgspec") == ("pytest", pytest.__version__)
    assert version_of("no-such-package") is None
    assert folder_of("no_such_package") is None and folder_of("ast") is None
    assert folder_of("pytest") == Path(pytest.__file__).parent
