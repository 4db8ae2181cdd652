"""The OpenVINO compiler: what it refuses, its steps and files, and that its output generates as the checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from djl_trtllm.backends.openvino import compile as openvino
from djl_trtllm.backends.openvino.backend import OpenVinoPlan
from djl_trtllm.backends.openvino.compile import COMPILER, NO_ATTENTION, OpenVinoSpec, check_engine, compress
from djl_trtllm.backends.openvino.executor import OpenVinoExecutor
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.engines.build import build_engine, prepare_engine
from djl_trtllm.engines.cache import Manifest
from djl_trtllm.errors import EngineMismatchError
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.model import inspect
from djl_trtllm.request import Sampling
from tests.engines.helpers import CPU_ONLY, VOCABULARY, configured, write_checkpoint, write_engine_files
from tests.support.steps import deltas_of
from tests.support.tables import by_table

NEW_TOKENS = 32
NEAR_TIE = 2e-3
"""Difference of two logits (their spread is 0.6) below which rounding to f16 may decide between them."""


def plan_of(checkpoint: Path, **options: object) -> OpenVinoPlan:
    plan = plan_engine(configured(max_rolling_batch_size=8, **options), inspect(checkpoint), CPU_ONLY)
    assert isinstance(plan, OpenVinoPlan)
    return plan


def generate(executor: OpenVinoExecutor, prompts: list[list[int]]) -> list[list[int]]:
    for number, ids in enumerate(prompts):
        executor.submit(Submit(number, ids, Sampling(NEW_TOKENS, ignore_eos=True)))
    generated: list[list[int]] = [[] for _ in prompts]
    while executor.busy:
        for delta in deltas_of(executor.step()):
            generated[delta.request_id] += delta.token_ids
    return generated


@dataclass(frozen=True)
class Reference:
    """Prompts, and what transformers makes of them in float32."""

    prompts: list[list[int]]
    generated: list[list[int]]


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    """Random weights now and then put two tokens first; prompts that lead there say nothing and are left out."""
    import numpy as np
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)  # several are slower: the model is tiny

    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    random = np.random.default_rng(1)
    prompts, generated = [], []
    for _ in range(12):
        prompt = random.integers(3, VOCABULARY, size=int(random.integers(2, 40))).tolist()
        tokens, margin = list(prompt), float("inf")
        for _ in range(NEW_TOKENS):
            with torch.inference_mode():
                best = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
        if margin > NEAR_TIE:
            prompts.append(prompt)
            generated.append(tokens[len(prompt) :])
    return Reference(prompts, generated)


@pytest.mark.slow
def test_greedy_output_is_that_of_transformers(checkpoint: Path, engine: Path, reference: Reference) -> None:
    options = plan_of(checkpoint).at(engine).executor_options()
    assert len(reference.prompts) >= 6
    assert generate(OpenVinoExecutor(**options), reference.prompts) == reference.generated
    assert len({token for tokens in reference.generated for token in tokens}) > 20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_planned_block_size_is_the_engines_own(checkpoint: Path, engine: Path, dtype: str) -> None:
    plan = plan_of(checkpoint, kv_cache_dtype=dtype)
    executor = OpenVinoExecutor(**plan.at(engine).executor_options())
    generate(executor, [[3, 4, 5]])
    assert plan.kv_cache is not None and plan.kv_cache.block_bytes is not None
    # Only the engine itself reports what it has taken.
    assert executor._pipeline.get_metrics().kv_cache_size_in_bytes == plan.kv_cache.blocks * plan.kv_cache.block_bytes


@pytest.mark.slow
def test_a_compiled_directory_is_complete_for_serving(checkpoint: Path, engine: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (engine / name).read_bytes() == (checkpoint / name).read_bytes()
    names = {path.name for path in engine.iterdir()}
    assert names >= {"openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "openvino_detokenizer.xml"}
    assert not any(name.endswith((".safetensors", ".partial")) or name == "spec.json" for name in names)
    manifest = Manifest.read(engine)
    assert manifest is not None
    assert manifest.files.keys() == names - {"manifest.json"}
    alone = inspect(engine)
    assert alone.tokenizer_dir == engine
    assert prepare_engine(configured(), alone, print, plan=plan_engine(configured(), alone)) == engine


@pytest.mark.slow
def test_int8_is_compressed_by_the_compiler_and_generates(
    checkpoint: Path, engine: Path, reference: Reference, tmp_path: Path
) -> None:
    told: list[str] = []
    plan = plan_of(checkpoint, quantize="int8")
    compiled = tmp_path / "int8"
    build_engine(plan, compiled, told.append)
    assert any(line.startswith("compiling: compress") for line in told)
    manifest = Manifest.read(compiled)
    assert manifest is not None and manifest.options["quantize"] == "int8"
    assert weights_of(compiled) < weights_of(engine) * 0.6
    generated = generate(OpenVinoExecutor(**plan.at(compiled).executor_options()), reference.prompts)
    assert agreement(generated, reference.generated) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int4", "awq"])
def test_4_bit_weights_are_smaller_and_generate(checkpoint: Path, engine: Path, tmp_path: Path, quantize: str) -> None:
    path = Path(shutil.copytree(engine, tmp_path / quantize))
    compress(path / "openvino_model.xml", quantize)
    assert not list(path.glob("compressed_*"))
    assert weights_of(path) < weights_of(engine) * 0.45
    (generated,) = generate(OpenVinoExecutor(**plan_of(checkpoint).at(path).executor_options()), [[3, 4, 5]])
    assert len(generated) == NEW_TOKENS


def weights_of(path: Path) -> int:
    return (path / "openvino_model.bin").stat().st_size


def agreement(some: list[list[int]], others: list[list[int]]) -> float:
    """The share of first tokens that agree: later ones follow from different texts."""
    return sum(a[0] == b[0] for a, b in zip(some, others, strict=True)) / len(some)


STEPS = ("die_with_parent", "export", "require_attention", "compress", "convert_tokenizer", "copy_identity_files")


def spec_of(root: Path, *, quantize: str = "none", method: str | None = None) -> OpenVinoSpec:
    """What the compiler is asked for: a checkpoint in FP16, of weights that are quantised with `method`."""
    checkpoint = write_checkpoint(root / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    if method is not None:
        config["quantization_config"] = {"quant_method": method, "bits": 4}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (root / "out").mkdir()
    return OpenVinoSpec(
        checkpoint=str(checkpoint),
        tokenizer_dir=str(checkpoint),
        out=str(root / "out"),
        dtype="fp16",
        quantize=quantize,
        trust_remote_code=False,
    )


def run(spec: OpenVinoSpec, folder: Path) -> int:
    spec.save(folder / "spec.json")
    return openvino.main(["openvino", str(folder / "spec.json")])


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_the_steps_are_reported_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quantize: str
) -> None:
    steps: list[object] = []
    for name in STEPS:
        monkeypatch.setattr(openvino, name, lambda *arguments, name=name: steps.append((name, *arguments)))
    spec, out = spec_of(tmp_path, quantize=quantize), tmp_path / "out"
    assert run(spec, tmp_path) == 0
    compressed = [] if quantize == "none" else [("compress", out / "openvino_model.xml", "int8")]
    assert steps == [
        ("die_with_parent",),
        ("export", spec, out),
        ("require_attention", out / "openvino_model.xml"),
        *compressed,
        ("convert_tokenizer", spec, out),
        ("copy_identity_files", Path(spec.checkpoint), Path(spec.tokenizer_dir), out),
    ]
    phases = [line.removeprefix("@@phase ") for line in capsys.readouterr().out.splitlines()]
    assert phases == [*(["compress"] if compressed else []), "tokenizer", "save"]


@by_table("method", "package")
def test_a_quantised_checkpoint_whose_loader_is_missing_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str | None,
    package: str | None,
) -> None:
    installed: set[str] = set()
    monkeypatch.setattr(openvino, "find_spec", lambda name: name if name in installed else None)
    for name in STEPS:
        monkeypatch.setattr(openvino, name, lambda *arguments: None)
    spec = spec_of(tmp_path, method=method)
    if package is not None:
        assert run(spec, tmp_path) == 1
        (line,) = capsys.readouterr().out.splitlines()
        assert f"{method} (quantization_config in" in line and f"with {package}, which is not installed" in line
        found = COMPILER.cause_of([line])
        assert found is not None and found[0].name == "quantised checkpoint"
        assert "before quantisation" in found[0].advice
        installed.add(package)
    assert run(spec, tmp_path) == 0


def modules(monkeypatch: pytest.MonkeyPatch, **members: dict[str, Any]) -> None:
    """Libraries of the compiler with these members; `__` in a name stands for a dot."""
    for name, values in members.items():
        path = name.replace("__", ".")
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), module := ModuleType(".".join(parts[:end])))
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        vars(module).update(values)


@pytest.mark.parametrize(
    ("purpose", "task"), [("generate", "text-generation-with-past"), ("embed", "feature-extraction")]
)
def test_the_export_keeps_the_weights_as_they_are_and_reports_when_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], purpose: str, task: str
) -> None:
    calls: list[Any] = []

    def export_from_model(*given: Any, **named: Any) -> str:
        calls.append((given, named))
        return "made"

    convert = SimpleNamespace(export_from_model=export_from_model)

    def main_export(*given: Any, **named: Any) -> None:
        calls.append((given, named))
        assert convert.export_from_model(1, of=2) == "made"
        raise KeyError("a failure leaves nothing changed")

    exporters = {"main_export": main_export, "convert": convert}
    modules(
        monkeypatch,
        torch={"float32": "f32", "float16": "f16", "bfloat16": "b16"},
        optimum__exporters__openvino=exporters,
    )
    monkeypatch.setitem(sys.modules, "optimum.intel", made := ModuleType("optimum.intel"))
    vars(made).update(OVConfig=lambda **given: given)
    spec = replace(spec_of(tmp_path), purpose=purpose, trust_remote_code=True)
    for dtype, loaded in {"fp32": "f32", "fp16": "f16", "bf16": "b16"}.items():
        calls.clear()
        with pytest.raises(KeyError):
            openvino.export(replace(spec, dtype=dtype), tmp_path / "out")
        assert calls == [
            (
                (spec.checkpoint, tmp_path / "out"),
                {
                    "task": task,
                    "stateful": purpose == "generate",
                    "library_name": "transformers",
                    "trust_remote_code": True,
                    "local_files_only": True,
                    "model_loading_kwargs": {"torch_dtype": loaded},
                    "ov_config": {"dtype": "fp32"},
                },
            ),
            ((1,), {"of": 2}),
        ]
    assert convert.export_from_model is export_from_model
    assert capsys.readouterr().out.split("@@phase ")[1:] == ["load\n", "convert\n"] * 3


@pytest.mark.parametrize("quantize", ["int8", "int4", "awq"])
def test_weights_are_compressed_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantize: str) -> None:
    asked: list[Any] = []

    def compress_weights(model: Path, **given: Any) -> str:
        asked.append((model, given))
        return "compressed"

    def save_model(model: str, path: Path, *, compress_to_fp16: bool) -> None:
        assert (model, compress_to_fp16) == ("compressed", False)
        path.write_text("new xml")
        path.with_suffix(".bin").write_text("new bin")

    modules(
        monkeypatch,
        nncf={
            "CompressWeightsMode": SimpleNamespace(INT8_ASYM="int8", INT4_ASYM="int4"),
            "GroupSizeFallbackMode": SimpleNamespace(ADJUST="adjust"),
            "AdvancedCompressionParameters": lambda **given: given,
            "compress_weights": compress_weights,
        },
        openvino={"Core": lambda: SimpleNamespace(read_model=lambda path: path), "save_model": save_model},
    )
    xml = tmp_path / "openvino_model.xml"
    xml.write_text("old xml")
    xml.with_suffix(".bin").write_text("old bin")
    compress(xml, quantize)
    groups = {"group_size": 128, "ratio": 1.0, "advanced_parameters": {"group_size_fallback_mode": "adjust"}}
    expected = {"mode": "int8"} if quantize == "int8" else {"mode": "int4", "awq": quantize == "awq", **groups}
    assert asked == [(xml, expected)]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "openvino_model.xml": "new xml",
        "openvino_model.bin": "new bin",
    }


@pytest.mark.parametrize("converts", [True, False])
def test_a_tokenizer_without_a_counterpart_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], converts: bool
) -> None:
    calls: list[Any] = []

    class Tokenizer:
        @classmethod
        def from_pretrained(cls, *given: Any, **named: Any) -> Tokenizer:
            calls.append((given, named))
            return cls()

        def save_pretrained(self, out: Path) -> None:
            calls.append(out)

    def export_tokenizer(tokenizer: Tokenizer, out: Path, *, task: str) -> None:
        calls.append((out, task))
        if converts:
            (out / "openvino_tokenizer.xml").touch()

    modules(
        monkeypatch,
        optimum__exporters__openvino__convert={"export_tokenizer": export_tokenizer},
        transformers={"AutoTokenizer": Tokenizer},
    )
    spec = spec_of(tmp_path)
    openvino.convert_tokenizer(spec, tmp_path / "out")
    assert calls == [
        ((spec.tokenizer_dir,), {"trust_remote_code": False, "local_files_only": True}),
        tmp_path / "out",
        (tmp_path / "out", "text-generation-with-past"),
    ]
    assert ("warning: Tokenizer has no OpenVINO counterpart" in capsys.readouterr().out) != converts


def test_a_model_without_attention_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    xml = tmp_path / "out" / "openvino_model.xml"
    text = "<net></net>"
    for name in STEPS:
        if name != "require_attention":
            monkeypatch.setattr(openvino, name, lambda *arguments: None)
    monkeypatch.setattr(openvino, "export", lambda *arguments: xml.write_text(text))
    spec = spec_of(tmp_path)
    assert run(spec, tmp_path) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{NO_ATTENTION}: openvino_model.xml has no attention layer")
    found = COMPILER.cause_of([line])
    assert found is not None and found[0].name == "unsupported architecture"
    text = '<net><layer type="ScaledDotProductAttention" /></net>'
    assert run(spec, tmp_path) == 0


@by_table("line", "cause")
def test_a_failure_of_openvinos_export_is_classified(line: str, cause: str) -> None:
    found = COMPILER.cause_of([line])
    assert found is not None and found[0].name == cause


# -- the files of an engine --------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write_engine_files(tmp_path / "engine")


def problem_of(written: Path) -> str:
    with pytest.raises(EngineMismatchError) as caught:
        check_engine(written)
    assert "copy it again, or compile it again" in str(caught.value)
    return str(caught.value).partition("\n  - ")[2].splitlines()[0]


def test_a_whole_engine_is_its_manifest_and_needs_none(written: Path) -> None:
    assert check_engine(written) is None
    manifest = Manifest.of(written, backend="openvino", checkpoint="x", options={}, versions={}, platform="x86_64")
    manifest.write(written)
    assert check_engine(written) == manifest
    (written / "openvino_model.bin").write_bytes(bytes(999))
    assert problem_of(written).startswith("openvino_model.bin: truncated, 999 of 1000 bytes")


@pytest.mark.parametrize(
    ("constants", "needed"),
    [([(0, 10), (500, 100), (20, 30)], 600), ([], 1)],
)
def test_the_weights_reach_as_far_as_the_furthest_constant_and_are_never_empty(
    written: Path, constants: list[tuple[int, int]], needed: int
) -> None:
    data = "".join(f'<data element_type="f16" offset="{at}" size="{size}" />' for at, size in constants)
    (written / "openvino_model.xml").write_text(f"<net>{data}</net>\n")
    (written / "openvino_model.bin").write_bytes(bytes(needed))
    assert check_engine(written) is None
    (written / "openvino_model.bin").write_bytes(bytes(needed - 1))
    expected = f"openvino_model.bin: truncated, {needed - 1} bytes where openvino_model.xml refers to {needed}"
    assert problem_of(written) == expected


def test_files_that_are_missing_cut_off_or_cannot_be_read_are_named(written: Path) -> None:
    xml, weights = written / "openvino_model.xml", written / "openvino_model.bin"
    weights.unlink()
    assert problem_of(written) == "openvino_model.bin: missing"
    weights.symlink_to(weights.name)
    assert "openvino_model.bin: " in problem_of(written) and "symbolic links" in problem_of(written)
    xml.write_bytes(xml.read_bytes()[:40])
    assert problem_of(written).startswith("openvino_model.xml: not a complete OpenVINO model, 40 bytes")
    xml.write_text("net></net>")
    assert problem_of(written).startswith("openvino_model.xml: not a complete OpenVINO model, 10 bytes")
    xml.unlink()
    assert problem_of(written) == "openvino_model.xml: missing"
    xml.mkdir()
    assert problem_of(written).startswith("openvino_model.xml: cannot be read (")
