"""TensorRT-LLM's configuration objects as arguments of `LLM`, and the programs of a document that use them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import djl_trtllm
from djl_trtllm import (
    BuildConfig,
    CapacitySchedulerPolicy,
    DynamicBatchConfig,
    KvCacheConfig,
    PluginConfig,
    SchedulerConfig,
)
from djl_trtllm.backends.tensorrt_llm.names import owners
from djl_trtllm.config.options import find
from djl_trtllm.errors import ConfigError, InvalidRequestError
from djl_trtllm.offline import GuidedDecodingParams, SamplingParams
from djl_trtllm.offline.arguments import Configuration, flattened
from djl_trtllm.request import GenerationRequest, Guide, GuideKind, Sampling
from tests.support.tables import by_rows, by_table

# -- objects -----------------------------------------------------------------------------------------------------------


def test_every_class_is_one_of_tensorrt_llm_and_its_fields_are_options() -> None:
    for keyword, kind in Configuration._by_keyword.items():
        assert kind.__name__ in owners() and getattr(djl_trtllm, kind.__name__) is kind
        assert keyword == keyword.lower() and kind._by_field
        for field in kind._by_field:
            (option,) = kind(**{field: 1}).options()
            assert find(f"option.{option}") is not None, (keyword, field)


def test_fields_become_options() -> None:
    arguments = {
        "tensor_parallel_size": 4,
        "scheduler_config": SchedulerConfig(
            capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION,
            dynamic_batch_config=DynamicBatchConfig(enable_batch_size_tuning=True),
        ),
        "kv_cache_config": {"free_gpu_memory_fraction": 0.9, "max_tokens": None, "cross_kv_cache_fraction": 0.5},
        "build_config": BuildConfig(max_batch_size=8, plugin_config=PluginConfig(gemm_plugin="auto")),
        "extended_runtime_perf_knob_config": '{"cuda_graph_mode": true}',
        "quant_config": None,
    }
    assert flattened(arguments) == {
        "tensor_parallel_size": 4,
        "batch_scheduler_policy": CapacitySchedulerPolicy.MAX_UTILIZATION,
        "enable_batch_size_tuning": True,
        "kv_cache_free_gpu_mem_fraction": 0.9,
        "cross_kv_cache_fraction": 0.5,
        "max_rolling_batch_size": 8,
        "gemm_plugin": "auto",
        "extended_runtime_perf_knob_config": '{"cuda_graph_mode": true}',
        "quant_config": None,
    }


def test_an_object_of_tensorrt_llm_itself() -> None:
    theirs = type("KvCacheConfig", (), {"model_fields_set": {"max_tokens"}, "max_tokens": 64, "dtype": "auto"})()
    assert flattened({"kv_cache_config": theirs}) == {"max_tokens_in_paged_kv_cache": 64}


@by_rows(
    ("arguments", "problem"),
    [
        (
            {"scheduler_config": KvCacheConfig(max_tokens=1)},
            r"scheduler_config=KvCacheConfig\(max_tokens=1\): expected Sc",
        ),
        ({"kv_cache_config": 5}, r"kv_cache_config=5: expected KvCacheConfig\(\.\.\.\)"),
        ({"max_tokens": KvCacheConfig()}, r"max_tokens=KvCacheConfig\(\): expected a value"),
        ({"kv_cache_config": {"max_token": 5}}, r"KvCacheConfig\(max_token=\.\.\.\): .* did you mean max_tokens\?"),
        ({"moe_config": {"zzz": 5}}, r"MoeConfig\(zzz=\.\.\.\): there is no such field here; it has backend"),
        (
            {"max_beam_width": 2, "build_config": BuildConfig(max_beam_width=3)},
            "max_beam_width is given twice: 2 and 3; keep one",
        ),
    ],
)
def test_what_is_no_object_or_no_field_is_reported(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        flattened(arguments)


# -- programs ----------------------------------------------------------------------------------------------------------

PROGRAM = """
{imports}
def main():
    prompts = [
        "Hello, I am",
        "The president of the United States is",
        "The capital of France is",
        "The future of AI is",
    ]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    {configuration}
    llm = LLM(
        model="meta-llama/Llama-3.3-70B-Instruct",
        tensor_parallel_size={gpus},
        {argument}
    )
    outputs = llm.generate(prompts, sampling_params)
    # Print the outputs.
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {{prompt!r}}, Generated text: {{generated_text!r}}")

if __name__ == '__main__':
    main()
"""
"""Those of "Useful Runtime Options" (TensorRT-LLM), with what differs left out."""

SCHEDULER, CACHE = "scheduler_config=scheduler_config", "kv_cache_config=kv_cache_config"
PROGRAMS = {
    "capacity scheduler policy": (
        "SchedulerConfig, CapacitySchedulerPolicy",
        "scheduler_config = SchedulerConfig(capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION)",
        (4, SCHEDULER),
    ),
    "context chunking policy": (
        "SchedulerConfig, ContextChunkingPolicy",
        "scheduler_config = SchedulerConfig(context_chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS)",
        (4, SCHEDULER),
    ),
    "memory fraction": (
        "KvCacheConfig",
        "kv_cache_config = KvCacheConfig(free_gpu_memory_fraction=0.95)",
        (8, CACHE),
    ),
    "tokens of the cache": ("KvCacheConfig", "kv_cache_config = KvCacheConfig(max_tokens=4096)", (8, CACHE)),
    "attention window": ("KvCacheConfig", "kv_cache_config = KvCacheConfig(max_attention_window=1024)", (8, CACHE)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_of_the_document_run_with_their_import_lines_changed(
    tmp_path: Path, tiny_stories: Path, name: str
) -> None:
    """On OpenVINO, with the bundled model in the place of the document's."""
    names, configuration, (gpus, argument) = PROGRAMS[name]
    imports = f"from djl_trtllm import LLM, SamplingParams\nfrom djl_trtllm import {names}"
    (tmp_path / "meta-llama").mkdir()
    (tmp_path / "meta-llama" / "Llama-3.3-70B-Instruct").symlink_to(tiny_stories)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(imports=imports, configuration=configuration, gpus=gpus, argument=argument))
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all(line.startswith("Prompt: '") for line in lines)
    assert not any(line.endswith("Generated text: ''") for line in lines)


# -- TensorRT-LLM's sampling parameters as those of a request.


@by_table("fields", "greedy")
def test_greedy_is_what_tensorrt_llm_takes_for_greedy(fields: dict[str, float], greedy: bool) -> None:
    sampling = SamplingParams(**fields).template().sampling  # type: ignore[arg-type]
    assert sampling.do_sample is not greedy


@by_table("fields", "message")
def test_wrong_parameters_are_refused_when_they_are_made(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert "payload" not in str(refused.value)


def test_what_it_does_not_have_is_no_argument() -> None:
    with pytest.raises(TypeError, match="detokenize"):
        SamplingParams(detokenize=False)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({"json": {"type": "object"}}, Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')),
        ({"regex": "a+"}, Guide(GuideKind.REGEX, "a+")),
        ({"grammar": "root ::= x"}, Guide(GuideKind.GRAMMAR, "root ::= x")),
        ({"json_object": True}, Guide(GuideKind.JSON_OBJECT)),
    ],
)
def test_a_guide_is_that_of_the_request(fields: dict[str, Any], guide: Guide) -> None:
    assert SamplingParams(guided_decoding=GuidedDecodingParams(**fields)).template().guide == guide


@pytest.mark.parametrize("fields", [{}, {"regex": "a", "json_object": True}])
def test_there_is_one_guide(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="exactly one"):
        GuidedDecodingParams(**fields)


BEAMS: dict[str, Any] = {"length_penalty": 0.5, "early_stopping": 1, "beam_search_diversity_rate": 0.25}


@pytest.mark.parametrize(("fields", "width"), [({"n": 2, "best_of": 4}, 4), ({"n": 3}, 3), ({"best_of": 2}, 2)])
def test_beams_are_those_that_are_generated(fields: dict[str, Any], width: int) -> None:
    sampling = SamplingParams(use_beam_search=True, temperature=1.0, **fields, **BEAMS).template().sampling
    assert (sampling.beam_width, sampling.n, sampling.best_of) == (width, fields.get("n", 1), None)
    assert (sampling.length_penalty, sampling.early_stopping, sampling.beam_search_diversity_rate) == (0.5, True, 0.25)
    assert not sampling.do_sample


def test_parameters_become_those_of_the_request() -> None:
    sampling: dict[str, Any] = {
        **{"n": 2, "best_of": 3, "temperature": 1.5, "top_p": 0.9, "top_k": 40, "min_p": 0.25, "seed": 5},
        **{"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "no_repeat_ngram_size": 3},
    }
    request = SamplingParams(
        **sampling, max_tokens=None, min_tokens=4, stop=("a", "b"), stop_token_ids=(1, 2), ignore_eos=True, bad="wolf",
        logprobs=0, truncate_prompt_tokens=9, guided_decoding=GuidedDecodingParams(regex="a"),
    ).template()  # fmt: skip
    assert request == GenerationRequest(
        sampling=Sampling(**sampling, min_new_tokens=4, do_sample=True, ignore_eos=True), stop=("a", "b"),
        stop_token_ids=(1, 2), logprobs=True, needs_logprobs=True, truncate=9, bad=("wolf",),
        guide=Guide(GuideKind.REGEX, "a"),
    )  # fmt: skip
    set_by_llm = {"prompt", "prompt_ids", "messages", "template", "adapter", "asks_logprobs", "default_new_tokens"}
    of_openai = {"top_logprobs", "shown_tokens", "guide_from", "priority"}
    of_openai |= {"prompt_logprobs", "prompt_only", "logit_bias", "cache_salt", "images", "thinking"}
    of_vectors = {"pooling", "pair"}
    neutral = GenerationRequest()
    unset = {name for name in GenerationRequest.__struct_fields__ if getattr(request, name) == getattr(neutral, name)}
    assert unset == set_by_llm | of_openai | of_vectors
    assert SamplingParams().template() == GenerationRequest(default_new_tokens=32)
