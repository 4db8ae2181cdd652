"""The finder document's own program."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import ConfigError, DjlTrtllmError, SizingError
from djl_trtllm.finder import max_token_finder
from djl_trtllm.finder.trial import TrialLoad
from tests.finder.conftest import Played, model_with
from tests.support.stub_http import Hub, hub_server
from tests.support.tables import by_table

ROOT = Path(__file__).parents[2]
FINDER = """from tensorrt_llm_toolkit.utils.utils import max_token_finder

tensor_parallel_degree = 4
model_id = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"

properties = {
    "model_id": model_id,
    "tensor_parallel_degree": tensor_parallel_degree,
}


model, tp, max_tokens = max_token_finder(properties)
print(f"Summary:\\nmodel: {model}\\n tp: {tp}\\n max_tokens: {max_tokens}")
"""
"""The program of the finder document, as it is there."""


def test_the_maximum_is_not_halved_and_progress_is_no_output(
    tmp_path: Path, trials: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(model_with(tmp_path / "model"))
    assert max_token_finder({"model_id": model, "tensor_parallel_degree": "1"}) == (model, "1", 24_000)
    assert max_token_finder({"model_id": model, "dtype": "bfloat16"}) == (model, 1, 24_000)
    options = trials.specs[-1].options
    assert options["dtype"] == "bfloat16" and not [name for name in options if "model_id" in name]
    output = capsys.readouterr()
    assert output.out == "" and "trial 1 of at most" in output.err
    trials.bound = 1
    with pytest.raises(DjlTrtllmError, match="out of memory with every max_num_tokens down to 64: std::bad_alloc"):
        max_token_finder({"model_id": model, "dtype": "float16"})


def test_the_commands_bounds_are_keyword_arguments(tmp_path: Path, trials: Played) -> None:
    model = str(model_with(tmp_path / "model"))
    assert (
        max_token_finder({"model_id": model}, requests=7, request_tokens=300, memory="5GB", precision=0.5)[2] <= 24_000
    )
    spec, tried = trials.specs[0], len(trials.tried)
    assert (spec.load, spec.memory) == (TrialLoad(7, 300), 5 * 10**9)
    max_token_finder({"model_id": model}, requests=7, request_tokens=300, memory=5 * 10**9, precision=0.5)
    assert len(trials.tried) == tried
    max_token_finder({"model_id": model}, requests=7, request_tokens=300, memory="5GB", precision=0.5, fresh=True)
    assert len(trials.tried) == 2 * tried


@pytest.mark.parametrize("bound", [{"requests": 0}, {"request_tokens": -1}, {"memory": "much"}])
def test_an_impossible_bound_is_refused_by_name(tmp_path: Path, trials: Played, bound: dict[str, Any]) -> None:
    with pytest.raises(SizingError, match=next(iter(bound))):
        max_token_finder({"model_id": str(model_with(tmp_path / "model"))}, **bound)
    assert trials.tried == []


@by_table("properties", "message")
def test_keys_are_options_or_are_refused(tmp_path: Path, properties: dict[str, object], message: str) -> None:
    model = str(model_with(tmp_path / "model"))
    given = {key: model if value == "DIR" else value for key, value in properties.items()}
    with pytest.raises(ConfigError, match=re.escape(message)):
        max_token_finder(given)


def run_finder(folder: Path, program: str = FINDER, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "finder.py").write_text(program)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(
        [sys.executable, "finder.py"], cwd=folder, env=variables, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_the_documents_program_runs_as_it_is(tiny_stories: Path, tmp_path: Path) -> None:
    paths = (path for path in tiny_stories.rglob("*") if path.is_file() and path.name != "serving.properties")
    files = {path.relative_to(tiny_stories).as_posix(): path.read_bytes() for path in paths}
    with hub_server(Hub({"TinyLlama/TinyLlama-1.1B-Chat-v1.0": files})) as endpoint:
        done = run_finder(
            tmp_path,
            HF_ENDPOINT=endpoint,
            HF_HOME=str(tmp_path / "hf"),
            HF_HUB_OFFLINE="0",
            HF_HUB_DISABLE_XET="1",
            DJL_CACHE_DIR=str(tmp_path / "cache"),
            # As a model with few positions: 128 requests of 3,700 tokens take minutes on a CPU.
            OPTION_MAX_SEQ_LEN="64",
        )
    assert done.returncode == 0, done.stderr
    summary = re.fullmatch(
        r"Summary:\nmodel: TinyLlama/TinyLlama-1\.1B-Chat-v1\.0\n tp: 4\n max_tokens: (\d+)\n", done.stdout
    )
    assert summary is not None, done.stdout
    assert int(summary[1]) == 128 * 56
    assert "option.tensor_parallel_degree=4 (command line) has no effect with openvino" in done.stderr
    assert "trial 1 of at most" in done.stderr


@by_table("name", "instead")
def test_each_other_name_of_the_real_toolkit_says_what_to_use_instead(name: str, instead: str) -> None:
    module, _, member = f"tensorrt_llm_toolkit.{name}".rpartition(".")
    for program in (f"from {module} import {member}", f"import {module} as module; module.{member}"):
        with pytest.raises(ImportError, match=rf"^{module}\.{member} .*{re.escape(instead)}"):
            exec(program, {})


@pytest.mark.parametrize(
    "module", ["tensorrt_llm_toolkit", "tensorrt_llm_toolkit.utils", "tensorrt_llm_toolkit.utils.utils"]
)
def test_names_and_modules_that_no_toolkit_is_known_to_have_say_what_there_is(module: str) -> None:
    for program in (f"from {module} import other", f"import {module}.other", f"import {module}.other.more"):
        with pytest.raises(ImportError, match=rf"^{module}\.other .*utils\.utils\.max_token_finder"):
            exec(program, {})
    assert not hasattr(importlib.import_module(module), "other")


def test_modules_of_other_packages_that_are_not_there_are_not_found_as_ever() -> None:
    importlib.import_module("tensorrt_llm_toolkit")
    assert importlib.util.find_spec("tensorrt_llm_toolkits") is None


def test_the_real_toolkit_wins_wherever_it_is_and_what_is_left_of_one_does_not(tmp_path: Path) -> None:
    package = tmp_path / "elsewhere" / "tensorrt_llm_toolkit"
    places = f"{package.parent}{os.pathsep}{ROOT}", f"{ROOT}{os.pathsep}{package.parent}"
    (package / "__pycache__").mkdir(parents=True)
    program = "from tensorrt_llm_toolkit.utils.utils import max_token_finder; print(max_token_finder.__module__)\n"
    for path in places:
        assert run_finder(tmp_path, program, PYTHONPATH=path).stdout == "djl_trtllm.finder\n"
    (package / "utils").mkdir()
    (package / "__init__.py").write_text("def create_model_repo(): pass\n")
    (package / "utils" / "__init__.py").write_text("")
    (package / "utils" / "utils.py").write_text('def max_token_finder(properties): return "real", 0, 1\n')
    program = FINDER + "\nfrom tensorrt_llm_toolkit import create_model_repo\nimport tensorrt_llm_toolkit.utils\n"
    for path in places:
        done = run_finder(tmp_path, program, PYTHONPATH=path)
        assert done.stdout == "Summary:\nmodel: real\n tp: 0\n max_tokens: 1\n", done.stderr
