from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import javaproperties
import msgspec
import pytest

from djl_trtllm.backends import planning
from djl_trtllm.backends.planning import compile_checkpoint
from djl_trtllm.config import Config, Task, load
from djl_trtllm.engines.cache import Manifest
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import BuildError, EngineError
from djl_trtllm.model import Layout, ModelKind, inspect
from djl_trtllm.model.chat_template import source_of
from tests.engines.helpers import CONTEXT, CPU_ONLY, built, configured, write_engine_files


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler that is quick, and leaves a log; the list's one word is what it does."""
    behaviour = ["succeed"]

    def build(plan: EnginePlan, out: Path, progress: Callable[[str], None]) -> None:
        out.with_name(f"{out.name}.log").write_text("the log")
        if behaviour[0] == "fail":
            raise BuildError("no", out)
        progress(f"compiled for {plan.platform}")
        built(plan, out)

    monkeypatch.setattr("djl_trtllm.backends.planning.build_engine", build)
    return behaviour


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, and without memory for anything: compiling needs what fits where it is served."""
    monkeypatch.setattr(Hardware, "probe", lambda: replace(CPU_ONLY, available_memory=0))


@pytest.mark.usefixtures("compiler")
def test_what_serves_the_engine_is_carried_over_and_nothing_else(model: Path, tmp_path: Path) -> None:
    carried = {
        "max_seq_len": "200", "max_rolling_batch_size": "8", "enable_kv_cache_reuse": "true",
        "batch_scheduler_policy": "guaranteed_no_evict", "pipeline_parallel_degree": "1", "max_beam_width": "2",
        "max_lora_rank": "16", "trust_remote_code": "true", "model_name": "größe", "executor_hang_timeout": "70",
        "guided_decoding_backend": "none",
    }  # fmt: skip
    left_out = {"engine_cache_max_gb": "3", "calib_size": "64"}
    compile_checkpoint(configured(**carried, **left_out), model, tmp_path / "out", template=lambda: "größe\r\n{{ a }}")
    assert source_of("option_chat_template.jinja", tmp_path / "out", "") == "größe\r\n{{ a }}"
    text = (tmp_path / "out" / "serving.properties").read_text(encoding="utf-8")
    assert text.splitlines()[0] == "#Serves the engine in this directory."
    assert javaproperties.loads(text) == {
        "engine": "Python",
        "option.backend": "openvino",
        "option.dtype": "fp16",
        "option.chat_template": "option_chat_template.jinja",
        **{f"option.{name}": value for name, value in carried.items()},
    }


@pytest.mark.usefixtures("compiler")
def test_an_engine_is_reported_and_leaves_no_log_and_nothing_of_earlier_attempts(model: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.1.abc.partial").mkdir()
    (tmp_path / ".out.1.ab.partial.log").write_text("failed")
    (tmp_path / "..out.1.ab.partial.2.abc.partial").mkdir()
    told: list[str] = []
    compile_checkpoint(configured(), model, tmp_path / "out", told.append)
    assert Manifest.read(tmp_path / "out") is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert len(told) == 1


def test_an_empty_directory_is_taken_also_where_a_link_leads_to_it(
    model: Path, tmp_path: Path, compiler: list[str]
) -> None:
    (tmp_path / "out").mkdir()
    compiler[0] = "fail"
    with pytest.raises(BuildError):
        compile_checkpoint(configured(), model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def with_backend(out: Path) -> None:
    manifest = Manifest.read(out)
    assert manifest is not None
    msgspec.structs.replace(manifest, backend="tensorrt").write(out)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model, out: out.write_text("dear"), "is not empty and is not an engine"),
        (lambda model, out: shutil.copytree(model, out), "is not empty and is not an engine"),
        (lambda model, out: (out / "manifest.json").write_text("{"), "is not an engine this program compiled"),
        (lambda model, out: with_backend(out), r"holds another engine \(option\.backend: engine has tensorrt"),
        (
            lambda model, out: (model / "generation_config.json").write_text("{}"),
            r"holds another engine \(checkpoint: engine was made from",
        ),
    ],
    ids=["file", "directory", "manifest", "backend", "checkpoint"],
)
@pytest.mark.usefixtures("compiler")
def test_what_is_not_an_engine_of_this_checkpoint_is_not_replaced(
    model: Path, tmp_path: Path, request: pytest.FixtureRequest, change: Callable[[Path, Path], object], reason: str
) -> None:
    out = tmp_path / "out"
    if request.node.callspec.id not in ("file", "directory"):
        compile_checkpoint(configured(), model, out)
    change(model, out)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(EngineError, match=reason):
        compile_checkpoint(configured(quantize="int8"), model, out)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_same_engine_is_kept(model: Path, tmp_path: Path, compiler: list[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    compile_checkpoint(configured(), model, out)
    (out / "serving.properties").write_text("option.max_rolling_batch_size=4")
    compiler[0] = "fail"
    told: list[str] = []
    compile_checkpoint(configured(), model, out, told.append)
    assert told == [f"{out} is up to date"]
    assert (out / "serving.properties").read_text() == "option.max_rolling_batch_size=4"


def test_other_limits_need_no_compiling_where_the_engine_has_none_itself(
    model: Path, tmp_path: Path, compiler: list[str]
) -> None:
    out = tmp_path / "out"
    compile_checkpoint(configured(max_rolling_batch_size=8, max_seq_len=128), model, out)
    manifest = Manifest.read(out)
    assert manifest is not None
    assert manifest.limits == {
        "max_rolling_batch_size": 8,
        "max_input_len": 127,
        "max_output_len": 127,
        "max_seq_len": 128,
    }
    compiler[0] = "fail"
    compile_checkpoint(configured(max_rolling_batch_size=4), model, out)
    manifest = Manifest.read(out)
    assert manifest is not None
    assert (manifest.limits["max_rolling_batch_size"], manifest.limits["max_seq_len"]) == (4, CONTEXT)
    assert load(out, {}).options.max_rolling_batch_size == 4


@pytest.mark.usefixtures("compiler")
def test_an_engine_is_swapped_and_not_removed_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed while it removes the old engine leaves the new one."""
    out = tmp_path / "out"
    compile_checkpoint(configured(), model, out)
    there: list[object] = []

    def remove(path: Path, *, ignore_errors: bool) -> None:
        manifest = Manifest.read(out)
        there.append(None if manifest is None else manifest.options["quantize"])

    monkeypatch.setattr("shutil.rmtree", remove)
    compile_checkpoint(configured(quantize="int8"), model, out)
    assert there == ["int8"]


def test_other_options_or_damage_replace_the_engine_and_a_failure_leaves_it(
    model: Path, tmp_path: Path, compiler: list[str]
) -> None:
    out = tmp_path / "out"
    compile_checkpoint(configured(), model, out)
    compiler[0] = "fail"
    with pytest.raises(BuildError):
        compile_checkpoint(configured(quantize="int8"), model, out)
    manifest = Manifest.read(out)
    assert manifest is not None and manifest.verify(out) == []
    compiler[0] = "succeed"
    compile_checkpoint(configured(quantize="int8"), model, out)
    manifest = Manifest.read(out)
    assert manifest is not None and manifest.options["quantize"] == "int8"
    assert load(out, {}).options.quantize == "int8"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".out", "out"))) == ["out"]
    for damage in (b"", b"x" * 1000):
        (out / "openvino_model.bin").write_bytes(damage)
        compile_checkpoint(configured(quantize="int8"), model, out)
        assert manifest.verify(out) == []


def test_an_engine_is_not_compiled_again(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is a compiled OpenVINO engine: there is nothing to compile"):
        compile_checkpoint(configured(), write_engine_files(tmp_path / "engine"), tmp_path / "out")


@pytest.mark.parametrize("served", [False, True], ids=["checkpoint", "engine"])
@pytest.mark.usefixtures("compiler")
def test_a_draft_model_is_compiled_beside_the_engine_that_it_drafts_for(
    model: Path, tmp_path: Path, served: bool
) -> None:
    out, draft = tmp_path / "out", Path(shutil.copytree(model, tmp_path / "small"))
    if served:
        compile_checkpoint(configured(), draft, tmp_path / "compiled")
        draft = tmp_path / "compiled"
        (draft / "note").write_text("as it is")
    config = configured(speculative_config=f'{{"model": "{draft}", "num_speculative_tokens": 3}}')
    for _ in range(2):
        compile_checkpoint(config, model, out, draft_dir=draft)
        found = load(out, {}).options
        assert (found.speculative_draft_model, found.speculative_length, found.speculative_config) == ("draft", 3, None)
        assert inspect(out / "draft").kind is ModelKind.OPENVINO_ENGINE
        assert Manifest.read(out / "draft") is not None
        assert (out / "draft" / "note").is_file() == served, "an engine is copied"


@pytest.mark.usefixtures("compiler")
def test_warnings_of_the_plan_are_told_and_those_of_the_options_are_not_repeated(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_fitted, told = planning.plan_fitted, list[str]()

    def lowering(config: Config, layout: Layout, *, compile_only: bool) -> tuple[Config, EnginePlan]:
        found, plan = plan_fitted(config, layout, compile_only=compile_only)
        return replace(found, warnings=(*found.warnings, "max_seq_len is lowered")), plan

    monkeypatch.setattr(planning, "plan_fitted", lowering)
    asked = replace(configured(), warnings=("the user's own",))
    compile_checkpoint(asked, model, tmp_path / "out", told.append)
    assert [line for line in told if line.startswith("warning: ")] == ["warning: max_seq_len is lowered"]


@pytest.mark.usefixtures("compiler")
def test_speculation_without_a_model_is_carried_over(model: Path, tmp_path: Path) -> None:
    compile_checkpoint(configured(speculative_decoding_mode="ngram", speculative_length=5), model, tmp_path / "out")
    found = load(tmp_path / "out", {}).options
    assert (found.speculative_decoding_mode, found.speculative_length) == ("ngram", 5)


@pytest.mark.usefixtures("compiler")
def test_a_draft_model_inside_the_engine_that_may_be_replaced_is_refused(model: Path, tmp_path: Path) -> None:
    out, draft = tmp_path / "out", Path(shutil.copytree(model, tmp_path / "small"))
    compile_checkpoint(configured(speculative_draft_model=str(draft)), model, out, draft_dir=draft)
    again = configured(speculative_draft_model=str(out / "draft"))
    with pytest.raises(EngineError, match="name the draft model's checkpoint"):
        compile_checkpoint(again, model, out, draft_dir=out / "draft")
    assert Manifest.read(out / "draft") is not None


@pytest.mark.usefixtures("compiler")
def test_an_engine_is_served_for_the_task_that_it_was_compiled_for(model: Path, tmp_path: Path) -> None:
    compile_checkpoint(configured(task="embed"), model, tmp_path / "out")
    assert load(tmp_path / "out", {}).options.task is Task.EMBED
