"""What is measured, and among which numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.backends.base import this_machine
from djl_trtllm.config import Backend
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.finder.measure import LOWEST, open_subject, refuse_built
from djl_trtllm.finder.trial import TrialLoad
from tests.finder.conftest import model_with


def test_larger_numbers_than_a_batch_of_longest_prompts_make_no_difference(tmp_path: Path) -> None:
    assert open_subject(str(model_with(tmp_path / "a")), {}, TrialLoad()).highest == 256 * 4096
    larger = model_with(tmp_path / "b", **{"option.max_rolling_batch_size": 300, "option.max_input_len": 4150})
    assert open_subject(str(larger), {}, TrialLoad()).highest == 300 * 4150


def test_on_openvino_a_step_has_no_more_tokens_than_the_requests(tiny_stories: Path) -> None:
    subject = open_subject(str(tiny_stories), {}, TrialLoad(8, 1000))
    assert subject.backend is Backend.OPENVINO and subject.on_host
    assert subject.highest == 8000
    assert open_subject(str(tiny_stories), {}, TrialLoad(1000, 9000)).load.tokens == 4096 - 8
    assert open_subject(str(tiny_stories), {}, TrialLoad(1, 9)).highest == LOWEST


def test_options_are_checked_as_everywhere(tiny_stories: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_subject(
            str(tiny_stories), {"tensor_paralel_degree": 2, "option.max_num_tokens": 5, "dtype": None}, TrialLoad()
        )
    assert caught.value.problems == (
        "tensor_paralel_degree is not an option; did you mean tensor_parallel_degree?",
        "option.max_num_tokens is what is measured: leave it out",
    )
    with pytest.raises(ConfigError, match="max_input_len"):
        open_subject(str(tiny_stories), {"max_input_len": "many"}, TrialLoad())


def test_what_tp_4_means_on_one_cpu_is_said(tiny_stories: Path) -> None:
    (remark,) = open_subject(str(tiny_stories), {"tensor_parallel_degree": 4}, TrialLoad()).remarks
    assert remark.startswith("option.tensor_parallel_degree=4")
    assert "has no effect with openvino" in remark and "not 4 GPUs" in remark
    assert open_subject(str(tiny_stories), {"tensor_parallel_degree": 1}, TrialLoad()).remarks == ()
    assert open_subject(str(tiny_stories), {}, TrialLoad()).remarks == ()


def test_an_engine_in_host_memory_has_a_bound(tiny_stories: Path, tmp_path: Path) -> None:
    subject = open_subject(str(tiny_stories), {}, TrialLoad())
    bound = subject.default_bound()
    assert bound is not None and 0 < bound < this_machine().available_memory * 1.5
    scripted = open_subject(str(model_with(tmp_path / "model")), {}, TrialLoad())
    assert scripted.default_bound() is scripted.guess() is None


def test_conditions_are_what_affects_the_result(tiny_stories: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_stories, tmp_path / "model"))

    def conditions(memory: int | None = None, **options: object) -> dict[str, Any]:
        return open_subject(str(model), options, TrialLoad()).conditions(memory, 0.01)

    before = conditions()
    (model / "notes").mkdir()
    assert before == conditions() == conditions(engine_cache_dir=str(tmp_path), model_name="other")
    assert before != conditions(kv_cache_dtype="int8") and conditions(5) == {**before, "memory": 5}
    files = sorted(path.name for path in model.iterdir() if path.is_file())
    assert sorted(name for name, *_ in before["files"]) == files
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    assert before != conditions()


def test_a_compiled_engine_has_its_number_already() -> None:
    layout: Any = SimpleNamespace(kind=SimpleNamespace(is_engine=True), path="engine")
    with pytest.raises(DjlTrtllmError, match="measure the checkpoint that it was compiled from"):
        refuse_built(layout, Backend.TENSORRT)
    # OpenVINO's engines take any number.
    refuse_built(layout, Backend.OPENVINO)
    layout.kind.is_engine = False
    refuse_built(layout, Backend.TENSORRT)
