"""option.extra_llm_api_options: arguments of TensorRT-LLM by its own names."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.backends.extra_options import kinds_of, not_of
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.backends.tensorrt_llm import plan
from djl_trtllm.backends.tensorrt_llm.names import build_arguments
from djl_trtllm.backends.tensorrt_llm.plan import TensorRtLlmPlan
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import inspect
from tests.backends.tensorrt_llm.kit import flat
from tests.engines.helpers import configured, gpu_machine
from tests.support.tables import by_table

LLM_ARGS = """
class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")

class KvCacheConfig(StrictBaseModel):
    dtype: str = "auto"
    free_gpu_memory_fraction: Optional[float] = 0.9
    pool_ratio: Optional[List[float]] = None
    _private: int = 0

class NewConfig(StrictBaseModel):
    size: PositiveInt = 1
    mode: Literal["slow", "fast"] = "slow"
    kind: ClassVar[str] = "new"
    loader_cls: Optional[str] = None

class BaseLlmArgs(StrictBaseModel):
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    max_num_tokens: Optional[int] = 8192
    custom_tokenizer: Optional[str] = None

class TorchLlmArgs(BaseLlmArgs):
    stream_interval: PositiveInt = 1
    brand_new: Optional["NewConfig"] = None
    rate: float = 1.0
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TensorRT-LLM with arguments that the table of names does not have."""
    package = tmp_path / "site" / "tensorrt_llm"
    (package / "llmapi").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the server imports it')")
    (package / "llmapi" / "llm_args.py").write_text(LLM_ARGS)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "tensorrt_llm", raising=False)
    plan._installed.cache_clear()
    monkeypatch.setattr(plan, "_installed", plan._installed.__wrapped__)


def planned(model: Path, given: Any, version: str = "1.4.0rc1", **options: object) -> TensorRtLlmPlan:
    text = given if isinstance(given, str) else json.dumps(given)
    config = configured(backend="pytorch", extra_llm_api_options=text, **options)
    plan = plan_engine(config, inspect(model), gpu_machine(version, gpus=1))
    assert isinstance(plan, TensorRtLlmPlan)
    return plan


def refused(model: Path, given: Any, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        planned(model, given, **options)
    return [str(problem) for problem in caught.value.problems]


def test_any_argument_of_the_installed_version_is_passed(roomy: Path, installed: None) -> None:
    given = {"brand_new": {"size": 4, "mode": "fast"}, "kv_cache_config": {"pool_ratio": [0.5, 0.5]}, "rate": 2}
    plan = planned(roomy, given)
    assert plan.running["brand_new"] == {"size": 4, "mode": "fast"} and plan.running["rate"] == 2
    # The object keeps what the server says of it.
    cache = plan.running["kv_cache_config"]
    assert cache["class"] == "KvCacheConfig" and cache["pool_ratio"] == [0.5, 0.5]
    assert cache["free_gpu_memory_fraction"] == 0.95
    assert any("brand_new" in note and "line 1" in note for note in plan.notes), "where it comes from"


def test_an_argument_that_has_an_option_is_that_option(roomy: Path) -> None:
    plan = planned(roomy, {"max_num_tokens": 4096, "kv_cache_config": {"free_gpu_memory_fraction": 0.5}}, "1.2.1")
    assert plan.inputs.max_num_tokens == 4096 and flat(plan.running)["KvCacheConfig.free_gpu_memory_fraction"] == 0.5
    assert "option.max_num_tokens=4096 (option.extra_llm_api_options, line 1)" in plan.notes
    same = planned(roomy, {"max_num_tokens": 4096}, "1.2.1", max_num_tokens=4096)
    assert same.inputs.max_num_tokens == 4096
    (problem,) = refused(roomy, {"max_num_tokens": 4096}, version="1.2.1", max_num_tokens=8192)
    assert "line 1: max_num_tokens: 4096 here" in problem
    assert "option.max_num_tokens=8192 (environment variable OPTION_MAX_NUM_TOKENS)" in problem


@by_table("given", "options", "named")
def test_what_options_make_something_else_is_refused_by_both_names(
    roomy: Path, monkeypatch: pytest.MonkeyPatch, given: Any, options: dict[str, str], named: str | None
) -> None:
    # An argument of a later version, which is no option.
    known = plan._tabled("LLM.pytorch", "1.2.1")
    cuda = {**known["CudaGraphConfig"], "capture": "int"}
    monkeypatch.setattr(plan, "_tabled", lambda *_: {**known, "CudaGraphConfig": cuda})
    if named is None:
        planned(roomy, given, "1.2.1", **options)
    else:
        (problem,) = refused(roomy, given, version="1.2.1", **options)
        assert "option.extra_llm_api_options, line 1" in problem and f"{named} (environment variable" in problem


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"stream_intervall": 4}, ["TensorRT-LLM 1.4.0rc1 has no such argument", "did you mean stream_interval?"]),
        ({"free_gpu_memory_fraction": 0.5}, ["did you mean kv_cache_config.free_gpu_memory_fraction?"]),
        ({"brand_new": {"sise": 4}}, ["brand_new.sise: ", "did you mean size?"]),
        ({"brand_new": 4}, ["brand_new: expected a mapping or null, not 4"]),
        ({"brand_new": {"size": [4]}}, ["brand_new.size: expected a whole number, not a list"]),
        ({"brand_new": {"mode": "quick"}}, ["expected 'slow' or 'fast', not 'quick'"]),
        ({"rate": True}, ["rate: expected a number, not true"]),
        ({"stream_interval": "4 tokens"}, ["stream_interval: expected a whole number, not '4 tokens'"]),
        ("{rate: 2026-01-01}", ["rate: expected a number, not '2026-01-01'"]),
        ("{rate: .inf}", ["rate: expected a number, not '.inf'"]),
        ("{rate: %s}" % ("9" * 6000), ["rate: expected a number, not '999"]),
        ({"kv_cache_config": {"_private": 1}}, ["no such argument"]),
        ({"brand_new": {"kind": "x"}}, ["no such argument"]),
        ({"model": "/other"}, ["model: the server sets this argument: set option.model_id"]),
        ({"trust_remote_code": True}, ["trust_remote_code: the server sets this argument"]),
        (
            {"num_postprocess_workers": 4},
            ["the server sets this argument: it reads token ids and makes the text itself"],
        ),
        ({"generation_config": "auto"}, ["the server sets this argument: requests say how they are sampled"]),
        ({"custom_tokenizer": "pkg.Class"}, ["custom_tokenizer: it brings code", "option.trust_remote_code=true"]),
        ({"brand_new": {"loader_cls": "pkg.Class"}}, ["brand_new.loader_cls: it brings code"]),
        ("{stream_interval: 4, stream_interval: 5}", ["stream_interval: it is there twice"]),
        ("{stream_interval: 4", ["line 1: expected YAML or JSON"]),
        ("{stream_interval: !!python/object:os.system [ls]}", ["expected a whole number, not a list"]),
        ("/no/such/file.yaml", ["/no/such/file.yaml cannot be read: No such file or directory; expected a YAML file"]),
    ],
    ids=repr,
)
def test_what_is_wrong_is_one_line_that_says_what_was_expected(
    roomy: Path, installed: None, given: Any, expected: list[str]
) -> None:
    (problem,) = refused(roomy, given)
    assert problem.startswith("option.extra_llm_api_options (environment variable OPTION_EXTRA_LLM_API_OPTIONS)")
    assert [part for part in expected if part not in problem] == [] and "\n" not in problem, problem


def test_a_file_is_named_with_its_line(roomy: Path, installed: None, tmp_path: Path) -> None:
    file = tmp_path / "extra.yaml"
    file.write_text(
        "# comment\nstream_interval: 2\nbrand_new:\n  size:\n    [1]\n  sise:\n    1\nrates:\n  1\nmodel:\n  x\n"
        "custom_tokenizer:\n  a.b\nstream_interval:\n  3\n"
    )
    problems = refused(roomy, str(file))
    lines = [int(problem.partition(f"{file} line ")[2].partition(":")[0]) for problem in problems]
    assert lines == [5, 6, 8, 10, 12, 14], "a value's own line where it is wrong, else its name's"
    file.write_text("- 1\n")
    assert "expected a mapping of arguments" in refused(roomy, str(file))[0]
    file.write_bytes(b"\xff")
    assert f"{file} cannot be read" in refused(roomy, str(file))[0]
    file.write_text("")
    assert planned(roomy, str(file)).inputs.extra == ()


def test_work_for_a_file_is_bounded(roomy: Path, installed: None, tmp_path: Path) -> None:
    doubled = "".join(f"  {b}: &{b} [*{a}, *{a}]\n" for a, b in itertools.pairwise("abcdefghijklmno"))
    laughs, nested = f"rate:\n  a: &a [x, x]\n{doubled}", "rate: " + "[" * 500 + "]" * 500
    mappings = "rate: " + "{a: " * 30 + "1" + "}" * 30
    for text in (laughs, nested, mappings, "#" * 2_000_000):
        (tmp_path / "extra.yaml").write_text(text)
        assert len(refused(roomy, str(tmp_path / "extra.yaml"))) == 1


def test_code_runs_where_the_operator_allowed_it(roomy: Path, installed: None) -> None:
    plan = planned(roomy, {"custom_tokenizer": "pkg.Class"}, trust_remote_code="true")
    assert plan.running["custom_tokenizer"] == "pkg.Class"


def test_objects_take_fields_that_the_table_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", SimpleNamespace(__version__="1.4.0rc1"))
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", SimpleNamespace(KvCacheConfig=dict))
    given = {"kv_cache_config": {"class": "KvCacheConfig", "pool_ratio": [1.0]}}
    assert build_arguments(given) == {"kv_cache_config": {"pool_ratio": [1.0]}}


@by_table("annotation", "kinds")
def test_an_annotation_says_what_may_be_written(annotation: str, kinds: list[str] | None) -> None:
    assert kinds_of(annotation, {"KvCacheConfig": {}}) == kinds


@pytest.mark.parametrize(
    ("annotation", "taken", "refused"),
    [
        ("Literal['a', 2, False, None]", ["a", 2, False, None], ["b", 3, True, 0, 2.0, [], {}]),
        ("float", [1, 1.5], ["1", True, None]),
        ("bool | None", [True, None], [1, "true"]),
        ("list[int] | str", [[1], "a"], [{}, 1]),
        ("Anything", ["a", 1, None, []], []),
    ],
)
def test_a_value_is_one_of_those_that_an_annotation_names(
    annotation: str, taken: list[object], refused: list[object]
) -> None:
    kinds = kinds_of(annotation, {})
    assert [value for value in (*taken, *refused) if not_of(kinds, value)] == refused
