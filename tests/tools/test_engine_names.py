"""The table of engines' names is what their argument classes declare, and a package that differs is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import engine_names

VLLM = """
class EngineArgs:
    model: str = "x"
    tensor_parallel_size: int = 1
parser.add_argument("--tensor-parallel-size", "-tp", type=int)
"""
FRONTEND = """
class FrontendArgs:
    port: int = 8000
parser.add_argument("--headless", action="store_true")
"""
SGLANG = """
class Parallel:
    tp_size: A[int, Arg(help="GPUs", aliases=["--tensor-parallel-size"])] = 1
    hidden: A[bool, Arg(no_cli=True)] = False
"""
TRUSS = """
class Repository: repo: str
class Build:
    checkpoint_repository: Optional[Repository] = None
    max_seq_len: int = 1
class TRTLLMConfigurationV2:
    build: Build
    def check(self): allowed_modify_fields = ["checkpoint_repository"]
"""
DYNAMO = 'add_argument(g, flag_name="--max-seq-len", arg_type=int)\nadd_negatable_bool_argument(g, flag_name="--quick")'


def package(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def vllm(folder: Path, frontend: str = FRONTEND) -> Path:
    return package(folder, {"engine/arg_utils.py": VLLM, "entrypoints/cli_args.py": frontend})


def test_flags_have_their_types_and_spellings_without_those_of_another_table(tmp_path: Path) -> None:
    found = engine_names.rows("vllm", {"1.0": vllm(tmp_path)})
    assert found["names"] == {"headless": "bool", "port": "int"}
    assert found["aliases"] == {"tp": "tensor_parallel_size"}


def test_a_name_that_the_newest_version_lacks_is_dropped_between_two_versions(tmp_path: Path) -> None:
    old = vllm(tmp_path / "old", FRONTEND + 'parser.add_argument("--swap-space", type=float)')
    found = engine_names.rows("vllm", {"1.0": old, "2.0": vllm(tmp_path / "new")})
    assert found["dropped"] == {"swap_space": ["1.0", "2.0"]}


def test_annotated_fields_without_a_flag_are_left_out(tmp_path: Path) -> None:
    folder = package(tmp_path, {"srt/arg_groups/fields/parallel.py": SGLANG})
    found = engine_names.rows("sglang", {"1.0": folder})
    assert (found["names"], found["aliases"]) == ({"tp_size": "int"}, {"tensor_parallel_size": "tp_size"})


def test_nested_models_are_paths_and_fields_that_a_stack_refuses_are_left_out(tmp_path: Path) -> None:
    folder = package(tmp_path, {"base/trt_llm_config.py": TRUSS})
    assert engine_names.rows("truss", {"1.0": folder})["names"] == {"trt_llm.build.checkpoint_repository.repo": "str"}


def test_a_worker_has_the_flags_of_all_workers_and_its_own(tmp_path: Path) -> None:
    shared = 'add_argument(g, flag_name="--namespace", obsolete_flag="--space")'
    files = {"trtllm/backend_args.py": DYNAMO, "vllm/backend_args.py": 'add_argument(g, flag_name="--other")'}
    folder = package(tmp_path, files | {"common/configuration/groups/runtime_args.py": shared})
    found = engine_names.rows("dynamo.trtllm", {"1.0": folder})
    assert found["names"] == {"namespace": "str", "max_seq_len": "int", "quick": "bool"}
    assert found["aliases"]["space"] == "namespace"


def test_what_is_written_is_laid_out_as_the_table_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine_names.TABLE.read_text()
    monkeypatch.setattr(engine_names, "TABLE", tmp_path / "names.json")
    engine_names.TABLE.write_text(before)
    reference = Path(engine_names.__file__).parent / "tensorrt_llm"
    assert engine_names.main(["--write", f"trtllm-serve=1.4.0rc1={reference}"]) == 0
    assert engine_names.TABLE.read_text() == before


def test_the_table_is_that_of_the_stored_reference_and_a_difference_has_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = Path(engine_names.__file__).parent / "tensorrt_llm"
    assert engine_names.main([f"trtllm-serve=1.4.0rc1={reference}"]) == 0
    text = (reference / "trtllm_serve_cli.yaml").read_text().replace("report_addr", "report_address")
    (tmp_path / "trtllm_serve_cli.yaml").write_text(text)
    assert engine_names.main([f"trtllm-serve=1.4.0rc1={tmp_path}"]) == 1
    assert "report_address" in capsys.readouterr().out
