"""Which models TensorRT-LLM runs, on which machine, and what it refuses in a checkpoint or on a GPU."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.base import this_machine
from djl_trtllm.backends.planning import choose_backend
from djl_trtllm.backends.tensorrt_llm.checkpoints import converter_alias
from djl_trtllm.config import Backend
from djl_trtllm.engines.hardware import Gpu, Hardware
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Layout, ModelKind, inspect
from tests.backends.tensorrt_llm.kit import planned, problems
from tests.config.helpers import from_text
from tests.engines.helpers import CPU_ONLY, H200, configured, gpu_machine
from tests.support.tables import by_rows, by_table

GPU = gpu_machine("1.2.1")
NO_ENGINES = gpu_machine("1.3.0")
TENSORRT_KINDS = (ModelKind.TENSORRT_ENGINE, ModelKind.LMI_REPOSITORY, ModelKind.TENSORRT_CHECKPOINT)


@pytest.fixture
def hf(checkpoint: Path) -> Layout:
    return inspect(checkpoint)


def of_kind(kind: ModelKind, version: str | None = "1.2.0") -> Layout:
    return Layout(kind, Path("/models/it"), {} if version is None else {"version": version}, (), None)


@pytest.mark.parametrize(("files", "backend"), [(True, Backend.TENSORRT), (False, Backend.PYTORCH)])
@pytest.mark.parametrize("version", ["1.2.1", "1.3.0"])
def test_the_files_of_tensorrt_llm_count_before_its_version(
    hf: Layout, version: str, files: bool, backend: Backend
) -> None:
    hardware = Hardware((H200,), version, 1, engine_backend=files)
    assert choose_backend(configured(), hf, hardware)[0] is backend


def test_auto_does_not_fall_back_to_the_cpu_because_tensorrt_llm_is_too_old(hf: Layout) -> None:
    with pytest.raises(EngineError, match=r"TensorRT-LLM 0\.21\.0 is too old: 1\.0"):
        choose_backend(configured(), hf, gpu_machine("0.21.0"))
    assert choose_backend(configured(backend="openvino"), hf, gpu_machine("0.21.0"))[0] is Backend.OPENVINO


@pytest.mark.parametrize("asked", ["tensorrt", "pytorch", "autodeploy"])
def test_tensorrt_llm_asked_for_where_it_is_not_says_what_is_missing_and_what_to_do(hf: Layout, asked: str) -> None:
    with pytest.raises(EngineError) as caught:
        choose_backend(configured(backend=asked), hf, CPU_ONLY)
    message = str(caught.value)
    assert message.startswith(f"option.backend={asked} (environment variable OPTION_BACKEND)")
    assert "TensorRT-LLM is not installed (pip install 'djl-trtllm[trtllm]'" in message
    assert "no NVIDIA GPU is visible" in message
    assert "option.backend=openvino" in message


def test_the_engine_backend_asked_for_where_tensorrt_llm_has_none_is_explained(hf: Layout) -> None:
    with pytest.raises(EngineError) as caught:
        choose_backend(configured(backend="tensorrt"), hf, NO_ENGINES)
    message = str(caught.value)
    assert "TensorRT-LLM 1.3.0 is installed: 1.3.0rc21 removed the backend" in message
    assert "option.backend=pytorch" in message and "TensorRT-LLM 1.2" in message
    for asked in ("pytorch", "autodeploy"):
        assert choose_backend(configured(backend=asked), hf, NO_ENGINES)[0] == asked


def test_autodeploy_asked_for_where_tensorrt_llm_has_none_is_explained(hf: Layout) -> None:
    asked = configured(backend="autodeploy")
    with pytest.raises(EngineError, match=r"TensorRT-LLM 1\.4\.0 is installed, which has no AutoDeploy"):
        choose_backend(asked, hf, Hardware((H200,), "1.4.0", 1, autodeploy=False))
    for there in (True, None):
        assert choose_backend(asked, hf, Hardware((H200,), "1.4.0", 1, autodeploy=there))[0] is Backend.AUTODEPLOY


@by_rows("kind", TENSORRT_KINDS)
def test_tensorrt_llms_own_files_need_it_and_never_openvino(kind: ModelKind) -> None:
    layout = of_kind(kind)
    assert choose_backend(configured(), layout, GPU) == (Backend.TENSORRT, f"/models/it is a {kind.value}")
    assert choose_backend(configured(backend="tensorrt"), layout, GPU)[0] is Backend.TENSORRT
    with pytest.raises(EngineError, match=f"{kind.value}, which needs TensorRT-LLM and a GPU"):
        choose_backend(configured(), layout, CPU_ONLY)
    with pytest.raises(EngineError, match="OpenVINO cannot load it"):
        choose_backend(configured(backend="openvino"), layout, GPU)


@by_rows("kind", TENSORRT_KINDS)
@by_rows("asked", ["pytorch", "autodeploy"])
@by_rows("hardware", [GPU, NO_ENGINES])
def test_the_python_backends_read_hugging_face_checkpoints_only(
    kind: ModelKind, asked: str, hardware: Hardware
) -> None:
    with pytest.raises(EngineError, match=rf"option\.backend={asked} .*TensorRT-LLM's {asked} backend reads Hugging"):
        choose_backend(configured(backend=asked), of_kind(kind), hardware)


@by_rows("asked", ["auto", "tensorrt"])
@by_rows(
    ("layout", "says"),
    [
        (of_kind(ModelKind.TENSORRT_ENGINE, "1.2.0"), "Serve it with TensorRT-LLM 1.2.0, which compiled it"),
        (of_kind(ModelKind.LMI_REPOSITORY, "0.11.0"), "Serve it with TensorRT-LLM 0.11.0, which compiled it"),
        (of_kind(ModelKind.TENSORRT_ENGINE, None), "Serve it with the TensorRT-LLM that compiled it, 1.2 or earlier"),
        (of_kind(ModelKind.TENSORRT_CHECKPOINT), "Compile and serve it with TensorRT-LLM 1.2 or 1.0"),
    ],
)
def test_an_engine_without_the_engine_backend_names_the_version_that_reads_it_and_the_alternative(
    layout: Layout, says: str, asked: str
) -> None:
    with pytest.raises(EngineError) as caught:
        choose_backend(configured(backend=asked), layout, NO_ENGINES)
    message = str(caught.value)
    assert "TensorRT-LLM 1.3.0 is installed: 1.3.0rc21 removed the backend" in message
    assert says in message
    assert "quantised by ModelOpt) with option.backend=pytorch" in message


def files(directory: Path, **contents: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (directory / name.replace("__", ".")).write_text(content)
    return directory


Probe = Callable[[Path], list[Any]]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    """What a process sees that has a folder on its path; importing TensorRT-LLM there would fail."""

    def look(site: Path) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(site), *sys.path])
            importlib.invalidate_caches()
            found = this_machine()
        assert "tensorrt_llm" not in sys.modules
        return [found.tensorrt_llm, found.tensorrt, found.engine_backend, found.has_engine_backend]

    return look


def install(site: Path, *, engine_backend: bool, **versions: str) -> Path:
    """A TensorRT-LLM that cannot be imported, and the metadata of distributions, `_` for `-` in their names."""
    package = site / "tensorrt_llm"
    files(package, version__py='__version__ = "1.2.0rc8"\n')
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    if engine_backend:
        (package / "_tensorrt_engine").mkdir()
    for name, version in versions.items():
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        files(site / f"{name}-{version}.dist-info", METADATA=metadata)
    return site


def test_tensorrt_llm_is_found_without_importing_it(tmp_path: Path, probe: Probe) -> None:
    site = install(tmp_path, engine_backend=True, tensorrt_llm="1.2.1", tensorrt="10.14.1.48")
    assert probe(site) == ["1.2.1", "10.14.1.48", True, True]


def test_autodeploy_is_found_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = install(tmp_path, engine_backend=False, tensorrt_llm="1.4.0") / "tensorrt_llm"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert this_machine().autodeploy is False
    (package / "_torch" / "auto_deploy").mkdir(parents=True)
    assert this_machine().autodeploy is True


def test_a_source_checkout_tells_its_version_in_a_file(tmp_path: Path, probe: Probe) -> None:
    assert probe(install(tmp_path, engine_backend=True, tensorrt_cu13="10.13"))[:2] == [
        "1.2.0rc8",
        "10.13",
    ]
    files(tmp_path / "tensorrt_cu12-10.12.dist-info", METADATA="Name: tensorrt-cu12\nVersion: 10.12\n")
    assert probe(tmp_path)[1] == "10.13"
    (tmp_path / "tensorrt_cu13-10.13.dist-info" / "METADATA").unlink()
    (tmp_path / "tensorrt_cu13-10.13.dist-info").rmdir()
    assert probe(tmp_path)[1] == "10.12"
    (tmp_path / "tensorrt_llm" / "version.py").unlink()
    assert probe(tmp_path)[0] == "of unknown version"


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LLM_COMPRESSOR = {"num_bits": 8, "type": "float"}


def compressed(strategy: str, inputs: dict[str, Any], **weights: Any) -> dict[str, Any]:
    group = {"weights": {**LLM_COMPRESSOR, "strategy": strategy, **weights}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


CHANNELS = compressed("channel", {"strategy": "token"})
BLOCKS = compressed("block", {"strategy": "group", "group_size": 128})
NVFP4 = compressed("tensor_group", {"strategy": "tensor_group"}, num_bits=4)


@pytest.fixture
def quantised(roomy: Path, tmp_path: Path) -> Any:
    """`quantised(quantization_config)`: a checkpoint that says so."""

    def make(stored: dict[str, Any] | None, **config: Any) -> Path:
        path = Path(shutil.copytree(roomy, tmp_path / "m", dirs_exist_ok=True))
        given = json.loads((path / "config.json").read_text()) | {"quantization_config": stored} | config
        (path / "config.json").write_text(json.dumps(given))
        return path

    return make


@by_rows("backend", ["tensorrt", "pytorch"])
@by_rows("version", ["1.0.0", "1.2.1"])
@by_table("stored")
def test_what_tensorrt_llm_does_not_load_is_refused(
    quantised: Any, stored: dict[str, Any], version: str, backend: str
) -> None:
    with pytest.raises(EngineError, match=f"which TensorRT-LLM {version} does not load with option.backend={backend}"):
        planned(quantised(stored), version, 1, backend=backend)


def test_the_error_says_what_to_serve_instead(quantised: Any) -> None:
    path = quantised({"quant_method": "awq", "bits": 4})
    for backend, rest in (("tensorrt", [" with option.quantize=awq"]), ("pytorch", [" and mxfp4. Serve a checkpoint"])):
        with pytest.raises(EngineError) as caught:
            planned(path, "1.2.1", 1, backend=backend)
        for words in (f"{path}/config.json", "quant_method=awq, bits=4", "ModelOpt quantised", "[128, 128]", *rest):
            assert words in str(caught.value)


@by_rows(("method", "quantize"), [("gptq", "int4"), ("fp8", "fp8"), ("compressed-tensors", "fp8"), ("x", "int8")])
def test_what_is_not_loaded_may_be_quantised_alike_for_an_engine(quantised: Any, method: str, quantize: str) -> None:
    with pytest.raises(EngineError, match=f"with option.quantize={quantize}(;|$)"):
        planned(quantised({"quant_method": method, "bits": 8}), "1.0.0", 1, backend="tensorrt")


def test_mxfp4_is_for_the_pytorch_backend(quantised: Any) -> None:
    path = quantised({"quant_method": "mxfp4"})
    with pytest.raises(EngineError, match=r"Set option\.backend=pytorch, which loads it; or serve the checkpoint befo"):
        planned(path, "1.2.1", 1)
    assert planned(path, "1.2.1", 1, backend="pytorch").notes == ()


@by_table("stored", "version")
def test_what_it_loads_is_planned_without_a_word(quantised: Any, stored: dict[str, Any] | None, version: str) -> None:
    assert planned(quantised(stored), version, 1, backend="pytorch").notes == ()


@by_table("stored", "version", "since")
def test_versions_that_may_or_may_not_are_reported(
    quantised: Any, stored: dict[str, Any], version: str, since: str
) -> None:
    (note,) = planned(quantised(stored), version, 1, backend="pytorch").notes
    assert f'TensorRT-LLM loads it from {since} on; {version} may end with "Unsupported quantization_config"' in note


# -- what TensorRT-LLM refuses on some GPUs is refused when planning ---------------------------------------------------


T4 = Gpu("Tesla T4", (7, 5), 16 * 10**9)
A100 = Gpu("NVIDIA A100", (8, 0), 80 * 10**9)
A10 = Gpu("NVIDIA A10G", (8, 6), 24 * 10**9)
B200 = Gpu("NVIDIA B200", (10, 0), 180 * 10**9)
B300 = Gpu("NVIDIA B300", (10, 3), 280 * 10**9)
RTX = Gpu("NVIDIA RTX PRO 6000", (12, 0), 96 * 10**9)
UNKNOWN = Gpu()


@pytest.mark.parametrize("backend", ["tensorrt", "pytorch"])
def test_bfloat16_needs_ampere(roomy: Path, backend: str) -> None:
    (problem,) = problems(roomy, gpu=T4, backend=backend, dtype="bf16")
    assert problem == (
        "option.dtype=bf16 (environment variable OPTION_DTYPE): Tesla T4 (sm_75) has no bfloat16; set "
        "option.dtype=fp16, or leave it out"
    )
    for gpu in (A100, UNKNOWN):
        assert planned(roomy, gpu=gpu, backend=backend, dtype="bf16").inputs.dtype == "bfloat16"


@by_rows("gpu", [B200, B300])
@by_table("option", "value", "algorithm")
def test_blackwell_has_no_engines_with_integers(roomy: Path, gpu: Gpu, option: str, value: str, algorithm: str) -> None:
    (problem,) = problems(roomy, gpu=gpu, **{option: value})
    assert problem == (
        f"option.{option}={value} (environment variable OPTION_{option.upper()}): the weights are quantised with "
        f"{algorithm}, and TensorRT-LLM compiles no such engine for {gpu.name} ({gpu.architecture}); take FP8 or NVFP4 "
        "(option.quantize=fp8), or option.backend=pytorch"
    )
    for other in (A10, RTX, UNKNOWN):
        planned(roomy, gpu=other, **{option: value})
    planned(roomy, gpu=gpu, quantize="fp8", kv_cache_dtype="fp8")


_GLM3 = {"model_type": "chatglm", "padded_vocab_size": 65024}


@by_table("path", "raw", "options", "name")
def test_versions_are_reported_by_option_path_and_configuration(
    path: str, raw: dict[str, object], options: str, name: str | None
) -> None:
    assert converter_alias(Path(path), raw, from_text(options)) == name
