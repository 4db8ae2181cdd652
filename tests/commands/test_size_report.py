"""What is printed of one model on one machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from djl_trtllm.config import load
from djl_trtllm.sizing.machines import of_gpu, of_instance, of_memory
from tests.commands.sized import BIG, described, report


def test_the_parts_add_up_to_the_gpu(tmp_path: Path) -> None:
    found = report(described(tmp_path), of_gpu("h100"))
    assert sum(found.memory.values()) == of_gpu("h100").memory
    assert all(size >= 0 for size in found.memory.values())
    estimate = found.found.estimate
    assert found.memory["weights"] == estimate.weights
    assert found.memory["kv_cache"] == estimate.kv_bytes(16384)
    assert found.memory["activations"] == estimate.activations(16384) + estimate.logits


def test_the_lines_end_with_options_that_resolve_to_themselves(tmp_path: Path) -> None:
    path = described(tmp_path)
    found = report(path, of_instance("g5.12xlarge"), 4, max_input_len=2048, max_output_len=5000, quantize="fp8")
    pasted = [line for line in found.lines() if line.startswith("option.")]
    assert pasted == found.lines()[-len(pasted) :]
    (path / "serving.properties").write_text("\n".join(pasted))
    config = load(path, {})
    assert config.warnings == ()
    options = config.options
    assert (options.tensor_parallel_degree, options.max_num_tokens, options.quantize) == (4, 16384, "fp8")
    assert (options.max_input_len, options.max_output_len, options.max_rolling_batch_size) == (4096, 5000, 256)
    assert not any(origin.kind == "derived" for origin in config.origins.values())


def test_a_prompt_above_max_num_tokens_is_split(tmp_path: Path) -> None:
    gemma = described(
        tmp_path,
        num_hidden_layers=28,
        hidden_size=3072,
        intermediate_size=24576,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=256,
        vocab_size=256000,
    )
    found = report(gemma, of_instance("g5.12xlarge"), 1, max_input_len=3000)
    assert found.settings["max_num_tokens"] == "1190"
    assert found.settings["max_input_len"] == "3000"
    assert found.settings["max_output_len"] == "1190"
    assert found.settings["enable_chunked_prefill"] == "true"


def test_lengths_to_paste_end_at_the_models_context(tmp_path: Path) -> None:
    found = report(described(tmp_path), of_gpu("h100"), max_input_len=30000)
    assert (found.settings["max_input_len"], found.settings["max_output_len"]) == ("8191", "4096")
    assert found.warnings[0].startswith("sequences of 30000 + 512 tokens are longer than the model's context")


def test_gpus_without_fp8_are_named_as_such(tmp_path: Path) -> None:
    path = described(tmp_path)
    wanted = "A100-80GB does not compute in FP8"
    assert any(text.startswith(wanted) for text in report(path, of_gpu("a100"), quantize="fp8").warnings)
    assert not any("FP8" in text for text in report(path, of_gpu("h100"), quantize="fp8").warnings)
    assert not any("FP8" in text for text in report(path, of_gpu("a100")).warnings)


def test_where_the_number_comes_from_is_said(tmp_path: Path) -> None:
    path = described(tmp_path)
    measured = "\n".join(report(path, of_instance("g5.12xlarge")).lines())
    assert "max_num_tokens: 16384, from table LMI 0.28, LLaMA 3 8B on g5.12xl, tp 1" in measured
    assert "the estimate of the largest one is" in measured
    assert "on g5.12xlarge: 4 x A10G with 22.5 GiB, 5.67 USD per hour; tensor parallel 1, TensorRT engine" in measured
    estimated = "\n".join(report(path, of_memory("80GB"), backend="pytorch").lines())
    assert "from half of the estimate" in estimated
    assert "for a GPU of 74.5 GiB, tp 1" in estimated
    assert "PyTorch" in estimated


def test_the_model_is_described(tmp_path: Path) -> None:
    text = "\n".join(report(described(tmp_path), of_gpu("h100")).lines())
    assert f"{tmp_path}: 8.03 billion parameters in bfloat16, 14.96 GiB, counted from config.json" in text
    assert "32 layers, hidden size 4096, 32 heads of which 8 in the KV cache, vocabulary 128256" in text


def test_a_small_model_has_millions_of_parameters(tmp_path: Path) -> None:
    small = report(described(tmp_path, num_hidden_layers=1, hidden_size=512, vocab_size=1000), of_gpu("l4"))
    assert " million parameters in bfloat16" in small.lines()[0]


def test_out_of_memory_has_numbers_and_what_helps_and_nothing_to_paste(tmp_path: Path) -> None:
    path = described(tmp_path, **BIG)
    found = report(path, of_instance("g5.48xlarge"), 8)
    text = "\n".join(found.lines())
    assert "option." not in text and "max_num_tokens: none fits" in text
    assert "needed" in text and "the GPU has" in text
    assert "out of memory was measured (table LMI 0.28, LLaMA 3 70B on g5.48xl, tp 8)" in found.warnings[0]
    assert "--compare" in found.warnings[1]
    assert found.settings == {} and found.kv_tokens == found.sequences == 0
    helped = report(path, of_gpu("h100"), 1)
    assert helped.warnings[1] == "it fits with --tp 2"


def test_an_estimate_that_contradicts_a_measurement_is_reported(tmp_path: Path) -> None:
    found = report(described(tmp_path), of_instance("g5.12xlarge"))
    estimate = found.found.estimate
    tight = replace(estimate, conditions=replace(estimate.conditions, gpu_memory=1 << 30))
    contradicted = replace(found, found=replace(found.found, estimate=tight))
    assert contradicted.found.fits
    assert contradicted.warnings == (
        "the estimate says out of memory where the table has a measurement; the measurement is used",
    )


def test_json_has_the_same_numbers(tmp_path: Path) -> None:
    found = report(described(tmp_path), of_instance("g5.12xlarge"), max_input_len=2048, max_output_len=2048)
    told = found.as_json()
    assert told["fits"] is True
    assert told["max_num_tokens"] == 16384
    assert told["measured"] == {"row": "table LMI 0.28, LLaMA 3 8B on g5.12xl, tp 1", "max_num_tokens": 24000}
    assert told["memory_per_gpu"] == found.memory
    assert told["sequences"] == {"input": 2048, "output": 2048, "count": found.sequences}
    assert told["options"]["option.max_num_tokens"] == "16384"
    assert told["machine"]["usd_per_hour"] == 5.672 and "us-east-1" in told["machine"]["price"]
    assert told["model"]["parameters"] == 8030261248
    missing = report(described(tmp_path, **BIG), of_instance("g5.48xlarge"), 8).as_json()
    assert missing["fits"] is False
    assert (missing["max_num_tokens"], missing["origin"], missing["options"]) == (None, None, {})


def test_the_page_has_the_report_as_it_is(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text(encoding="utf-8")
    assert "\n".join(report(described(tmp_path), of_instance("g5.12xlarge"), 4).lines()[1:]) in page


def test_what_was_seen_on_the_machine_is_a_warning(tmp_path: Path) -> None:
    busy = replace(of_gpu("h100"), remarks=("other programs use 40.0 GiB",))
    assert report(described(tmp_path), busy).warnings[-1] == "other programs use 40.0 GiB"
