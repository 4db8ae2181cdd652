"""What a model would be served as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.openvino.plan import OpenVinoPlan
from djl_trtllm.engines.gpu_models import gpus_named
from djl_trtllm.errors import ConfigError, DownloadError, ModelError
from djl_trtllm.service import model
from djl_trtllm.service import preview as preview_module
from djl_trtllm.service.preview import preview
from tests.engines.helpers import CPU_ONLY, gpu_machine, write_checkpoint


@pytest.fixture(autouse=True)
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""
    monkeypatch.setattr(preview_module, "this_machine", lambda: CPU_ONLY)
    monkeypatch.delenv("DJL_SERVING_HOME", raising=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the hub has of a model: its description, which is all that may be fetched."""
    path = write_checkpoint(tmp_path / "hub")
    for weights in path.glob("*.safetensors"):
        weights.unlink()

    def fetch(text: str, *given: object, **options: Any) -> Path:
        assert options["config_only"] and not options["tokenizer_only"]
        if text != "acme/story":
            raise DownloadError(f"cannot download {text}: there is no such model")
        return path

    monkeypatch.setattr(model, "fetch", fetch)
    return path


def properties(path: Path, *lines: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "serving.properties").write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_local_model_is_planned_for_this_machine(checkpoint: Path) -> None:
    found = preview(str(checkpoint), {})
    assert isinstance(found.plan, OpenVinoPlan)
    assert (found.refusal, found.remarks) == (None, ())


def test_what_is_not_there_or_wrong_is_an_error(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        preview(str(checkpoint / "nowhere"), {})
    with pytest.raises(ConfigError, match="OPTION_MAX_INPUT_LEN"):
        preview(str(properties(checkpoint, "option.dtype=x")), {"OPTION_MAX_INPUT_LEN": "many"})


def test_what_cannot_be_served_has_the_reason(tmp_path: Path) -> None:
    found = preview(str(properties(tmp_path / "empty", "option.max_input_len=77")), {})
    assert found.config.options.max_input_len == 77
    assert found.plan is None and "is not a model that can be served" in str(found.refusal)


def test_the_tokenizer_of_another_model_cannot_be_served(checkpoint: Path) -> None:
    path = checkpoint / "tokenizer.json"
    described = json.loads(path.read_text())
    described["model"]["vocab"] |= {f"word {number}": 10_000 + number for number in range(3)}
    path.write_text(json.dumps(described))
    assert "it is the tokenizer of another model" in str(preview(str(checkpoint), {}).refusal)
    path.write_text("{")
    assert str(path) in str(preview(str(checkpoint), {}).refusal)


def test_a_backend_that_a_file_names_has_to_be_there(checkpoint: Path) -> None:
    found = preview(str(properties(checkpoint, "option.backend=tensorrt")), {})
    assert "TensorRT-LLM is not installed" in str(found.refusal)


@pytest.mark.parametrize("backend", ["tensorrt", "pytorch", "autodeploy"])
def test_a_backend_that_is_asked_for_is_supposed_to_be_there(checkpoint: Path, backend: str) -> None:
    found = preview(str(properties(checkpoint, "option.tensor_parallel_degree=2")), {}, backend)
    assert found.plan is not None and (found.plan.backend.value, found.plan.gpus) == (backend, 2)
    assert found.remarks == ("planned for 2 x any NVIDIA GPU with TensorRT-LLM 1.2.1, not for this machine",)


def test_gpus_that_are_given_are_those_of_the_plan(checkpoint: Path) -> None:
    found = preview(str(properties(checkpoint, "option.tensor_parallel_degree=max")), {}, gpus=gpus_named("h100:4"))
    assert found.plan is not None and (found.plan.backend.value, found.plan.gpus) == ("tensorrt", 4)
    assert found.plan.platform == "sm_90"
    assert found.remarks == ("planned for 4 x NVIDIA H100 with TensorRT-LLM 1.2.1, not for this machine",)
    many = properties(checkpoint, "option.tensor_parallel_degree=8")
    assert "8 GPUs, and 4 can be used" in str(preview(str(many), {}, gpus=gpus_named("h100:4")).refusal)


def test_a_backend_without_gpus_says_that_it_uses_none(checkpoint: Path) -> None:
    found = preview(str(checkpoint), {}, "openvino", gpus_named("h100"))
    assert found.plan is not None and found.refusal is None
    assert found.remarks == ("no GPU is used: the backend is openvino",)
    assert preview(str(checkpoint), {}, "openvino").remarks == ()


def test_a_machine_that_has_all_of_it_is_not_supposed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview_module, "this_machine", gpu_machine)
    found = preview(str(checkpoint), {}, "pytorch")
    assert found.plan is not None and found.remarks == ()


@pytest.mark.parametrize("named", [True, False])
def test_options_of_a_remote_model_are_checked_as_local_ones(hub: Path, tmp_path: Path, named: bool) -> None:
    folder = properties(tmp_path / "story", "option.model_id=acme/story", "option.quantize=fp8")
    found = preview(str(folder) if named else None, {} if named else {"OPTION_MODEL_ID": "acme/story"})
    if named:
        assert "option.quantize=fp8" in str(found.refusal) and "not available with OpenVINO" in str(found.refusal)
    else:
        assert found.plan is not None
        assert found.remarks == ("the weights are fetched and checked when the model is served",)


def test_the_file_that_comes_with_a_remote_model_counts(hub: Path) -> None:
    properties(hub, "option.max_input_len=77", "option.rotary_base=1000000")
    found = preview("acme/story", {})
    assert (found.config.options.max_input_len, found.refusal) == (77, None)
    (hub / "tokenizer_config.json").unlink(missing_ok=True)
    (hub / "tokenizer.json").unlink(missing_ok=True)
    assert preview("acme/story", {}).refusal is None


def test_a_remote_model_that_is_no_checkpoint_is_not_planned(hub: Path) -> None:
    properties(hub, "option.max_input_len=77")
    for text in ('{"pretrained_config": {}, "build_config": {}}', "{}"):
        (hub / "config.json").write_text(text)
        found = preview("acme/story", {})
        assert (found.config.options.max_input_len, found.plan, found.refusal) == (77, None, None)
        assert found.remarks == ("not planned: its files are looked at when the model is served",)


def test_a_remote_model_that_is_not_there_cannot_be_served(hub: Path) -> None:
    found = preview("acme/other", {"OPTION_MAX_INPUT_LEN": "77"})
    assert found.config.options.max_input_len == 77
    assert found.refusal == "cannot download acme/other: there is no such model"


def test_a_local_model_has_its_weights_checked(checkpoint: Path, tmp_path: Path) -> None:
    for weights in checkpoint.glob("*.safetensors"):
        weights.write_bytes(b"")
    for path in (checkpoint, properties(tmp_path / "story", f"option.model_id={checkpoint}")):
        assert "safetensors" in str(preview(str(path), {}).refusal)


def test_an_archive_in_s3_is_looked_for_and_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []
    monkeypatch.setattr("djl_trtllm.model.remote.s3_download.list_objects", asked.append)
    folder = properties(tmp_path / "story", "option.model_id=s3://models/story.tar.gz")
    for named in ("s3://models/story.tar.gz", str(folder)):
        found = preview(named, {})
        assert (found.plan, found.refusal) == (None, None)
        assert "not planned: s3://models/story.tar.gz is opened when it is served" in found.remarks[0]
    assert [str(address) for address in asked] == ["s3://models/story.tar.gz"] * 2


def test_without_a_model_there_is_the_environment() -> None:
    found = preview(None, {"OPTION_MAX_INPUT_LEN": "77"})
    assert (found.plan, found.refusal, found.config.options.max_input_len) == (None, None, 77)


def test_what_djl_serving_runs_is_known_by_its_container_and_by_our_handlers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not preview(str(checkpoint), {}).under_djl
    assert preview(str(checkpoint), {"OPTION_ENTRYPOINT": "djl_trtllm.async_handler"}).under_djl
    monkeypatch.setenv("DJL_SERVING_HOME", "/opt/djl")
    assert preview(str(checkpoint), {}).under_djl
