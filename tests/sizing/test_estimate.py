from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.checkpoint import CheckpointSizes, LayerCache
from djl_trtllm.sizing.estimate import (
    FITTED,
    GIB,
    MIB,
    MOST,
    Conditions,
    EngineConstants,
    Estimate,
    LoraSlots,
    lora_bytes,
    model_windows,
    stage_caches,
    usual_vllm_tokens,
    warnings_of,
    weights_by_stage,
)
from djl_trtllm.sizing.machines import gpu_named
from djl_trtllm.sizing.tensors import Part
from tests.sizing import configs
from tests.sizing.configs import deepseek, gemma3, gpt_oss, llama, nemotron_h, qwen3_32b_fp8
from tests.support.tables import by_rows, by_table


@pytest.mark.parametrize(
    "changes", [{"gpu_memory": 0}, {"tensor_parallel": 0}, {"max_batch_size": 0}, {"fraction": 0.0}, {"fraction": 1.5}]
)
def test_impossible_values_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(SizingError, match=next(iter(changes))):
        Conditions(**{"gpu_memory": 1, **changes})


LLAMA = CheckpointSizes.from_config(llama())


GPT_OSS = CheckpointSizes.from_config(gpt_oss())
BARE = EngineConstants(scale=1.0, overhead=5, eight_ranks=7)
WIDTH = 64 * 64

# Model, conditions, constants, tokens: bytes of their activations. PyTorch's are those of AIConfigurator.
ACTIVATIONS: list[tuple[CheckpointSizes, dict[str, Any], EngineConstants, int, float]] = [
    *(
        (LLAMA, {"backend": "pytorch", "tensor_parallel": ranks}, BARE, 8192, 2 * 8192 * 4096 * factor)
        for ranks, factor in ((1, 11), (2, 6.5), (3, 6.5), (4, 5), (8, 5), (16, 5))
    ),
    (LLAMA, {"backend": "pytorch"}, BARE, 1, 70 * MIB),
    *(
        (GPT_OSS, {"backend": "pytorch", "tensor_parallel": ranks}, BARE, 8192, 8192 * WIDTH * (2 * factor + 4))
        for ranks, factor in ((1, 22), (2, 13), (4, 10), (8, 10))
    ),
    # An engine has residuals on every rank and splits the rest; it has an MLP for each expert that a token goes to.
    (LLAMA, {}, BARE, 10, 10 * 2 * (2 * 14336 + 4 * 4096 + 48 * 128)),
    (LLAMA, {"tensor_parallel": 4}, BARE, 10, 10 * 2 * (2 * 14336 / 4 + 4 * 4096 + 12 * 128)),
    (LLAMA, {"tensor_parallel": 4}, replace(BARE, scale=2.0), 10, 10 * 4 * (2 * 14336 / 4 + 4 * 4096 + 12 * 128)),
    (
        CheckpointSizes.from_config(llama(num_local_experts=8, num_experts_per_tok=2)),
        {},
        BARE,
        10,
        10 * 2 * 2 * (2 * 2 * 14336 + 4 * 4096 + 48 * 128),
    ),
]


@by_rows(("sizes", "conditions", "constants", "tokens", "size"), ACTIVATIONS)
def test_activations(
    sizes: CheckpointSizes, conditions: dict[str, Any], constants: EngineConstants, tokens: int, size: float
) -> None:
    assert Estimate(sizes, Conditions(1, **conditions), constants).activations(tokens) == size


def test_logits_of_the_whole_batch_are_kept_five_times_by_an_engine() -> None:
    assert Estimate(LLAMA, Conditions(1, max_batch_size=256)).logits == 5 * 4 * 256 * 128256
    assert Estimate(LLAMA, Conditions(1, max_batch_size=8, max_beam_width=4)).logits == 5 * 4 * 32 * 128256
    assert Estimate(LLAMA, Conditions(1, backend="pytorch")).logits == 0
    assert Estimate(CheckpointSizes.from_config({}), Conditions(1)).logits == 0


@by_rows(
    ("tensor", "pipeline", "backend", "size"),
    [
        *((1, 1, "pytorch", 0), (2, 1, "pytorch", 342 * MIB), (3, 1, "pytorch", 342 * MIB)),
        *((4, 1, "pytorch", 392 * MIB), (1, 4, "pytorch", 342 * MIB), (8, 1, "pytorch", 392 * MIB)),
        *((8, 1, "tensorrt", BARE.eight_ranks), (4, 1, "tensorrt", 392 * MIB)),
    ],
)
def test_ranks_need_buffers_to_communicate(tensor: int, pipeline: int, backend: Any, size: int) -> None:
    conditions = Conditions(1, tensor_parallel=tensor, pipeline_parallel=pipeline, backend=backend)
    assert Estimate(LLAMA, conditions, BARE).communication == size


def test_the_runtime_takes_what_was_fitted_for_an_engine_and_measured_for_pytorch() -> None:
    assert Estimate(LLAMA, Conditions(1), BARE).overhead == 5
    assert 3 * GIB < Estimate(LLAMA, Conditions(1, backend="pytorch"), BARE).overhead < 3.5 * GIB


@pytest.mark.parametrize(("backend", "context"), [("tensorrt", 0), ("pytorch", 1644 * MIB // 3)])
@pytest.mark.parametrize("degrees", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_beside_several_ranks_of_pytorch_the_engine_process_has_a_context(
    backend: Any, context: int, degrees: dict[str, Any]
) -> None:
    alone = Estimate(LLAMA, Conditions(1, backend=backend), BARE)
    several = Estimate(LLAMA, Conditions(1, backend=backend, **degrees), BARE)
    assert several.overhead == alone.overhead + context


def test_the_constants_of_engines_are_those_of_the_fit() -> None:
    assert EngineConstants(scale=2.4, overhead=2560 * 1024**2, eight_ranks=2816 * 1024**2) == FITTED


EMBEDDING = 128256 * 4096 * 2
NORMS = (2 * 32 + 1) * 4096 * 2
LAYERS = 16_060_522_496 - 2 * EMBEDDING - NORMS


def weights(sizes: CheckpointSizes, **conditions: object) -> tuple[int, ...]:
    return weights_by_stage(sizes, Conditions(80 << 30, **conditions))  # type: ignore[arg-type]


ALL = 16_060_522_496
TIED = CheckpointSizes.from_config(llama(tie_word_embeddings=True))
WIDE = CheckpointSizes.from_config(llama(torch_dtype="float32"))


@by_rows(
    ("sizes", "conditions", "size"),
    [
        (LLAMA, {}, ALL),
        # An engine has the whole embedding on each rank, and PyTorch a part.
        (LLAMA, {"tensor_parallel": 4}, EMBEDDING + NORMS + LAYERS // 4 + EMBEDDING // 4),
        (LLAMA, {"tensor_parallel": 4, "backend": "pytorch"}, NORMS + LAYERS // 4 + EMBEDDING // 2),
        # A tied head is a second copy in an engine only.
        (TIED, {}, ALL),
        (TIED, {"backend": "pytorch"}, ALL - EMBEDDING),
        # Quantising changes the matrices of layers only, and nothing that is quantised already.
        *(
            (LLAMA, {"quantization": name}, int(LAYERS * bits / 16) + NORMS + 2 * EMBEDDING)
            for name, bits in (("fp8", 8), ("awq", 4.125), ("nvfp4", 4.5), ("none", 16))
        ),
        (replace(LLAMA, quantization="FP8", exact=True), {"quantization": "awq", "dtype": "float32"}, ALL),
        # A stored format that is unknown counts as it was before.
        (replace(LLAMA, quantization="bitsandbytes"), {}, ALL),
        # Unquantised weights take the type that is asked for, else that of the config, whatever the files have.
        (LLAMA, {"dtype": "float32"}, 2 * ALL),
        (WIDE, {"dtype": "float16"}, ALL),
        (replace(LLAMA, shape=WIDE.shape, exact=True), {}, 2 * ALL),
        (replace(LLAMA, quantization="FP8"), {"dtype": "float32"}, LAYERS // 2 + 2 * (NORMS + 2 * EMBEDDING)),
        # Queries and keys in one matrix: 2 of 32 heads, and one of 8 for keys and values, which two ranks share.
        (replace(LLAMA, parts=(Part("fused", 0, "BF16", True, 4800, 9600),)), {"tensor_parallel": 16}, 9600 * 4 // 48),
    ],
)
def test_weights_of_one_stage(sizes: CheckpointSizes, conditions: dict[str, Any], size: int) -> None:
    assert weights(sizes, **conditions) == (size,)


def test_a_feed_forward_part_of_unknown_width_has_four_times_that_of_the_model() -> None:
    known, unknown = (CheckpointSizes.from_config(llama(intermediate_size=width)) for width in (4 * 4096, None))
    assert weights(unknown) == weights(known)
    assert Estimate(unknown, Conditions(1)).activations(10) == Estimate(known, Conditions(1)).activations(10)


def test_keys_of_fewer_heads_than_ranks_are_replicated() -> None:
    keys = 2 * 32 * 1024 * 4096 * 2
    expected = NORMS + (LAYERS - keys) // 16 + keys // 8 + 2 * EMBEDDING // 16
    assert weights(LLAMA, tensor_parallel=16, backend="pytorch") == (expected,)


def test_pipeline_stages_have_their_layers_and_the_ends_embedding_and_head() -> None:
    first, middle, last = weights(CheckpointSizes.from_config(llama(num_hidden_layers=5)), pipeline_parallel=3)
    layer = (LAYERS + NORMS - 4096 * 2) // 32
    assert (first, middle, last) == (EMBEDDING + 2 * layer + 4096 * 2, 2 * layer, layer + EMBEDDING)


def test_counted_weights_of_a_quantised_checkpoint_take_its_format() -> None:
    qwen = CheckpointSizes.from_config(qwen3_32b_fp8())
    assert qwen.quantization == "FP8_BLOCK_SCALES"
    assert 31.9 < weights(qwen)[0] / (1 << 30) < 32.1
    # https://huggingface.co/openai/gpt-oss-20b: 13.8 GB of files
    assert 11.5e9 < weights(CheckpointSizes.from_config(gpt_oss()))[0] < 14e9


def test_adapters_take_rank_times_inputs_and_outputs() -> None:
    slots = LoraSlots(adapters=2, rank=8, modules=("attn_q", "attn_v"))
    assert lora_bytes(LLAMA.shape, slots, 1) == 2 * 2 * 8 * 32 * (4096 + 4096 + 4096 + 1024)
    assert lora_bytes(LLAMA.shape, slots, 4, 2) == 2 * 2 * 8 * 16 * (4096 + 1024 + 4096 + 256)
    assert lora_bytes(LLAMA.shape, None, 1) == 0
    assert (LoraSlots().adapters, LoraSlots().modules) == (4, ("attn_q", "attn_k", "attn_v"))
    # Heads that are not known count as none.
    shape = replace(LLAMA.shape, num_heads=None, num_kv_heads=None, head_dim=128)
    assert lora_bytes(shape, LoraSlots(1, 1, ("attn_qkv",)), 1) == 2 * 32 * 4096


@by_table("module", "whole", "split")
def test_a_module_has_a_whole_matrix_and_a_split_one(module: str, whole: int, split: int) -> None:
    shape = replace(LLAMA.shape, num_heads=256, head_dim=64, num_kv_heads=16)
    slots = LoraSlots(adapters=1, rank=1, modules=(module,))
    assert lora_bytes(shape, slots, 4) == 2 * 32 * (whole + split // 4)


KIB = 1024


def per_token(config: dict[str, Any], **conditions: Any) -> int:
    return max(
        cache.per_token for cache in stage_caches(CheckpointSizes.from_config(config), Conditions(1, **conditions))
    )


@by_table("changes", "size")
def test_bytes_per_token_are_those_of_tensorrt_llm(changes: dict[str, Any], size: int) -> None:
    assert per_token(llama(**changes)) == size * KIB


@by_table("conditions", "size")
def test_division_and_type_change_the_bytes_per_token(conditions: dict[str, Any], size: int) -> None:
    assert per_token(llama(), **conditions) == size * KIB


def test_layers_with_a_window_keep_whole_sequences_unless_the_option_says_otherwise() -> None:
    sizes = CheckpointSizes.from_config(gpt_oss())
    layer = 2 * 8 * 64 * 2
    whole = stage_caches(sizes, Conditions(1))[0]
    assert whole.sequence(1000) == 24 * 1000 * layer
    kept = stage_caches(sizes, Conditions(1, attention_windows=(128, 4096)))[0]
    assert kept.sequence(1000) == 12 * (128 + 1000) * layer
    assert kept.sequence(100) == 24 * 100 * layer
    assert kept.per_token == whole.per_token


def test_the_windows_of_a_model_are_a_value_for_the_option() -> None:
    sizes = CheckpointSizes.from_config(gemma3())
    windows = model_windows(sizes)
    assert windows[:6] == (1024, 1024, 1024, 1024, 1024, 0)
    cache = stage_caches(sizes, Conditions(1, attention_windows=windows))[0]
    assert cache.sequence(10_000) == (40 * 1024 + 8 * 10_000) * 2 * 8 * 256 * 2
    assert model_windows(CheckpointSizes.from_config(llama())) == ()


def test_mamba_layers_keep_a_state_per_sequence_and_a_draft_model_has_its_own() -> None:
    hybrid = CheckpointSizes.from_config(nemotron_h())
    (cache,) = stage_caches(hybrid, Conditions(1))
    assert (cache.per_token, cache.state) == (4 * 2 * 8 * 128 * 2, 2 * 25_903_104)
    assert cache.sequence(100) == 100 * cache.per_token + cache.state
    (both,) = stage_caches(hybrid, Conditions(1, draft=hybrid))
    assert (both.state, both.per_token) == (2 * cache.state, 2 * cache.per_token)
    draft = CheckpointSizes.from_config(llama(num_hidden_layers=4))
    assert per_token(llama(), draft=draft) == 144 * KIB


def test_latent_attention_and_the_checkpoints_own_type_decide_the_bytes_per_token() -> None:
    assert per_token(deepseek()) == per_token(deepseek(), tensor_parallel=8) == 61 * 576 * 2
    sizes = replace(LLAMA, kv_quantization="FP8")
    for dtype, size in ((None, 64), ("bfloat16", 128)):
        assert stage_caches(sizes, Conditions(1, kv_dtype=dtype))[0].per_token == size * KIB


def test_only_layers_that_attend_have_windows() -> None:
    layers = (LayerCache("attention", 8, 64, 128), LayerCache("state", state=8), LayerCache("latent", 1, 576, 64))
    sizes = replace(CheckpointSizes.from_config(llama()), layers=layers)
    assert model_windows(sizes) == (128, 64)


def test_the_maximum_is_the_last_that_fits() -> None:
    found = Estimate(LLAMA, Conditions(24 * GIB))
    most = found.max_num_tokens
    assert found.kv_tokens(most) >= found.longest(most)
    assert found.kv_tokens(most + 1) < found.longest(most + 1)
    assert found.recommended == most // 2
    assert (found.longest(100), found.longest(10_000)) == (200, 8192)


@pytest.mark.parametrize(("backend", "kept"), [("tensorrt", 1), ("pytorch", 1 - 0.015)])
def test_what_is_left_is_the_caches_but_for_what_pytorchs_allocator_keeps(backend: Any, kept: float) -> None:
    found = Estimate(LLAMA, Conditions(80 * GIB, fraction=0.5, backend=backend))
    used = found.weights + found.logits + found.communication + found.overhead + found.activations(1000)
    assert found.kv_bytes(1000) == int((80 * GIB - used) * 0.5 * kept)
    assert found.kv_tokens(1000) == found.kv_bytes(1000) // (128 * 1024)
    assert found.sequences_of(4096, 1000) == found.kv_tokens(1000) // 4096


def test_the_recommended_number_is_at_most_16384() -> None:
    found = Estimate(LLAMA, Conditions(80 * GIB))
    assert found.max_num_tokens > 2 * MOST
    assert found.recommended == MOST
    assert found.sequences_of(4096) == found.sequences_of(4096, MOST)


def test_a_draft_model_is_on_the_last_stage_and_adapters_are_on_every_one() -> None:
    def on_two_stages(**more: Any) -> Conditions:
        return Conditions(80 * GIB, pipeline_parallel=2, max_input_len=1, max_output_len=1, **more)

    draft = CheckpointSizes.from_config(llama(num_hidden_layers=4, vocab_size=256))
    first, last = weights_by_stage(LLAMA, on_two_stages())
    assert Estimate(LLAMA, on_two_stages()).weights == max(first, last)
    found = Estimate(LLAMA, on_two_stages(draft=draft))
    # Its cache is the last stage's too.
    alone, both = (stage_caches(LLAMA, on_two_stages(draft=each)) for each in (None, draft))
    assert both[0] == alone[0] and both[1].per_token == alone[1].per_token + 4 * 4096
    assert found.weights == last + draft.bytes > first
    used = last + draft.bytes + found.logits + found.communication + found.overhead + found.activations(1)
    assert found.kv_bytes(1) == int((80 * GIB - used) * 0.9)
    adapted = Estimate(LLAMA, on_two_stages(lora=LoraSlots()))
    assert adapted.weights == max(first, last) + adapted.lora > max(first, last)
    plain, shared = (
        Estimate(LLAMA, Conditions(80 * GIB, lora=lora)) for lora in (None, LoraSlots(adapters=0, free_share=0.25))
    )
    assert shared.lora == 0
    assert shared.kv_bytes(1000) == pytest.approx(plain.kv_bytes(1000) * 0.75, abs=2)


def test_a_state_leaves_less_for_the_keys_of_each_sequence() -> None:
    found = Estimate(CheckpointSizes.from_config(nemotron_h()), Conditions(80 * GIB))
    each = 1000 * found.kv_bytes_per_token + 2 * 25_903_104
    assert found.sequences_of(1000) == found.kv_bytes(found.recommended) // each


def test_a_pure_mamba_model_has_no_tokens_but_sequences() -> None:
    mamba = CheckpointSizes.from_config(llama(model_type="mamba2", mamba_d_state=128))
    found = Estimate(mamba, Conditions(80 * GIB))
    assert found.kv_tokens(1024) == 0
    assert found.sequences_of(10**6) == found.sequences_of(1) > 0


def test_the_stage_with_least_left_decides() -> None:
    # Mistral Large: 88 layers on 3 stages, of which the first has 30 and the embedding.
    sizes = CheckpointSizes.from_config(llama(num_hidden_layers=88))
    one = Estimate(sizes, Conditions(48 * GIB, pipeline_parallel=3))
    assert one.kv_bytes_per_token == 30 * 4096
    assert one.kv_tokens(1024) <= one.kv_bytes(1024) // one.kv_bytes_per_token


DATA: dict[str, Any] = json.loads((Path(__file__).parent / "kv_capacity.json").read_text(encoding="utf-8"))
MODELS = {
    "Llama-3.1-8B": CheckpointSizes.from_config(llama()),
    "Qwen3-32B-FP8": CheckpointSizes.from_config(qwen3_32b_fp8()),
}


def capacity_errors(gpu: str) -> list[float]:
    errors = []
    for where, model, ranks, inputs, outputs, fraction, sequences in DATA["rows"]:
        if where == gpu:
            conditions = Conditions(
                gpu_named(gpu).memory, ranks, kv_dtype="bfloat16", fraction=fraction, backend="pytorch"
            )
            # The measurements reserved 1,000 tokens more per sequence (see the file's `source`).
            found = Estimate(MODELS[model], conditions).sequences_of(inputs + outputs + 1000, 2 * inputs)
            errors.append(abs(found / sequences - 1))
    return errors


def test_capacities_are_those_that_were_measured() -> None:
    h100, gb300 = capacity_errors("H100"), capacity_errors("GB300")
    assert (len(h100), len(gb300)) == (24, 48)
    assert sum(error <= 0.05 for error in h100) >= 20
    assert sum(error <= 0.05 for error in h100 + gb300) >= 66
    assert max(h100 + gb300) <= 0.08


CONFIGS = st.builds(
    llama,
    num_hidden_layers=st.integers(1, 120),
    hidden_size=st.sampled_from([512, 2048, 4096, 8192]),
    intermediate_size=st.integers(512, 60_000),
    num_attention_heads=st.sampled_from([8, 32, 64]),
    num_key_value_heads=st.sampled_from([1, 2, 8, 32]),
    vocab_size=st.integers(256, 300_000),
    tie_word_embeddings=st.booleans(),
    num_local_experts=st.sampled_from([0, 8]),
)
OTHERS = st.sampled_from([deepseek(num_hidden_layers=8, n_routed_experts=16), gpt_oss(), nemotron_h()])
CONDITIONS = st.builds(
    Conditions,
    gpu_memory=st.integers(1, 300 * GIB),
    tensor_parallel=st.sampled_from([1, 2, 4, 8, 16]),
    pipeline_parallel=st.integers(1, 4),
    quantization=st.sampled_from([None, "fp8", "awq", "nvfp4"]),
    kv_dtype=st.sampled_from([None, "fp8", "nvfp4", "int8"]),
    fraction=st.floats(0.05, 1),
    max_batch_size=st.integers(1, 1024),
    max_input_len=st.none() | st.integers(1, 100_000),
    attention_windows=st.sampled_from([None, (128, 4096)]),
    backend=st.sampled_from(["tensorrt", "pytorch"]),
)


def figures(found: Estimate, tokens: int, length: int) -> tuple[int, ...]:
    return found.kv_tokens(tokens), found.sequences_of(length, tokens), found.kv_bytes(tokens)


@settings(max_examples=80, deadline=None)
@given(CONFIGS | OTHERS, CONDITIONS, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**5))
def test_more_max_num_tokens_never_gives_more_cache(
    config: dict[str, Any], conditions: Conditions, tokens: int, more: int, length: int
) -> None:
    found = Estimate(CheckpointSizes.from_config(config), conditions)
    fewer = figures(found, tokens + more, length)
    assert all(few <= many for few, many in zip(fewer, figures(found, tokens, length), strict=True))
    most = found.max_num_tokens
    assert most == 0 or found.sequences_of(found.longest(most), most) >= 1


@settings(max_examples=80, deadline=None)
@given(CONFIGS | OTHERS, CONDITIONS, st.integers(0, 300 * GIB), st.integers(0, 10**6), st.integers(1, 10**5))
def test_more_memory_never_gives_less(
    config: dict[str, Any], conditions: Conditions, more: int, tokens: int, length: int
) -> None:
    sizes = CheckpointSizes.from_config(config)
    small = Estimate(sizes, conditions)
    large = Estimate(sizes, replace(conditions, gpu_memory=conditions.gpu_memory + more))
    pairs = zip(figures(small, tokens, length), figures(large, tokens, length), strict=True)
    assert all(few <= many for few, many in pairs)
    assert small.max_num_tokens <= large.max_num_tokens
    assert small.recommended <= large.recommended
    assert small.weights == large.weights


def numbers_of(model: str | None, changes: dict[str, Any], memory: int, given: dict[str, Any]) -> list[int]:
    conditions = dict(given)
    if "lora" in given:
        conditions["lora"] = LoraSlots(**given["lora"])
    if "draft" in given:
        conditions["draft"] = CheckpointSizes.from_config(llama(**given["draft"]))
    sizes = CheckpointSizes.from_config((configs.CONFIGS[model] if model else {}) | changes)
    found = Estimate(sizes, Conditions(memory * GIB, **conditions))
    parts = [found.weights, found.lora, found.logits, found.communication, found.overhead, found.activations(8192)]
    tokens = [
        found.kv_bytes_per_token,
        found.kv_tokens(8192),
        found.sequences_of(4096, 8192),
        min(found.max_num_tokens, 10**7),
    ]
    return [*parts, found.kv_bytes(8192), *tokens, found.recommended]


@by_table("model", "changes", "memory", "conditions", "found")
def test_an_estimate_changes_on_purpose_only(
    model: str | None, changes: dict[str, Any], memory: int, conditions: dict[str, Any], found: list[int]
) -> None:
    """`memory` is in GiB. Without a model only the sizes in `changes` are known."""
    assert numbers_of(model, changes, memory, conditions) == found


@pytest.mark.parametrize("backend", ["tensorrt", "pytorch"])
def test_more_ranks_never_hold_more_weights_each(backend: Any) -> None:
    held = [Estimate(LLAMA, Conditions(GIB, ranks, backend=backend)).weights for ranks in (1, 2, 4, 8, 16)]
    assert held == sorted(held, reverse=True)


EXACT = replace(CheckpointSizes.from_config(llama(), "llama"), exact=True)


@by_rows(
    ("sizes", "memory", "conditions", "parts"),
    [
        (EXACT, 80, {}, ()),
        (
            EXACT,
            12,
            {},
            (
                "llama does not fit: 15.0 GiB of weights, 0.6 GiB of logits, 2.5 GiB of runtime on each of 1 GPUs",
                "12.0 GiB",
                "option.tensor_parallel_degree",
            ),
        ),
        (EXACT, 80, {"max_input_len": 30_000}, ("below the longest prompt of 30000 tokens",)),
        (EXACT, 80, {"tensor_parallel": 3}, ("32 attention heads cannot be divided among 3 GPUs",)),
        (EXACT, 80, {"pipeline_parallel": 33}, ("32 layers cannot be divided among 33 groups of GPUs",)),
        (EXACT, 80, {"pipeline_parallel": 32}, ()),
        (replace(EXACT, quantization="FP8"), 80, {"quantization": "awq"}, ("stored as FP8 already",)),
        (replace(EXACT, exact=False), 80, {}, ("counted from config.json",)),
        (CheckpointSizes.from_config({}), 80, {}, ("counted from config.json", "no weights are counted")),
        (EXACT, 22.5, {}, ("the KV cache has", "sequences of 4096 tokens")),
        (replace(GPT_OSS, exact=True), 80, {}, ("option.max_attention_window",)),
        (replace(GPT_OSS, exact=True), 80, {"attention_windows": (128, 0)}, ()),
    ],
)
def test_what_does_not_fit_well_is_said_with_its_numbers(
    sizes: CheckpointSizes, memory: float, conditions: dict[str, Any], parts: tuple[str, ...]
) -> None:
    text = "\n".join(warnings_of(Estimate(sizes, Conditions(int(memory * GIB), **conditions))))
    assert [part for part in parts if part not in text] == [] and bool(text) == bool(parts)
    assert "KV cache has" not in text or memory == 22.5


def test_a_cache_without_room_for_one_sequence_is_named_as_such() -> None:
    found = Estimate(EXACT, Conditions(int(22.5 * GIB), max_input_len=7500, max_output_len=512))
    assert "does not hold one sequence of 8012 tokens" in "\n".join(warnings_of(found, 20_000))


@pytest.mark.parametrize(
    ("cache", "sequences", "few"),
    [(10 * GIB - 1, 31, True), (10 * GIB, 31, False), (10 * GIB - 1, 32, False), (10 * GIB - 1, 1, True)],
)
def test_a_small_cache_for_few_sequences_is_said(cache: int, sequences: int, few: bool) -> None:
    narrow: Any = SimpleNamespace(
        conditions=Conditions(1, max_input_len=5),
        sizes=EXACT,
        max_num_tokens=1,
        recommended=9,
        kv_bytes=lambda tokens: cache,
        sequences_of=lambda length, tokens: sequences,
    )
    assert ("requests will wait" in "".join(warnings_of(narrow))) == few


def test_parts_below_a_twentieth_of_a_gib_are_not_listed() -> None:
    large: Any = SimpleNamespace(
        conditions=Conditions(GIB),
        sizes=EXACT,
        max_num_tokens=0,
        weights=9 * GIB,
        logits=GIB // 20,
        communication=GIB // 20 + 1,
        overhead=0,
    )
    (text,) = warnings_of(large, 5)
    assert "does not fit: 9.0 GiB of weights, 0.1 GiB of communication on each" in text


def test_a_prompt_as_long_as_the_number_needs_no_chunks() -> None:
    fitting = Estimate(EXACT, Conditions(80 * GIB, max_input_len=3000))
    assert not any("longest prompt" in text for text in warnings_of(fitting, 3000))
    assert any("longest prompt" in text for text in warnings_of(fitting, 2999))


# Hidden size, MLP, layers and heads; share of the GPU and ranks; MiB that each rank held, and tokens of the KV cache.
ON_H200 = [
    ((2048, 8192, 16, 32), 0.2, 1, 31_086, 827_072),
    ((4096, 14336, 32, 32), 0.4, 1, 59_482, 340_080),
    ((4096, 14336, 32, 32), 0.4, 2, 59_960, 797_136),
    ((8192, 28672, 8, 64), 0.4, 1, 60_980, 1_332_928),
    ((8192, 28672, 8, 64), 0.4, 2, 61_140, 3_157_120),
]
"""`benchmarks.gpu` with vLLM 0.26 (docs/sizing.md, "On a GPU")."""


@by_rows(("shape", "share", "ranks", "held", "tokens"), ON_H200)
def test_vllm_takes_what_was_measured_on_h200(
    shape: tuple[int, int, int, int], share: float, ranks: int, held: int, tokens: int
) -> None:
    hidden, inner, layers, heads = shape
    sizes = CheckpointSizes.from_config(
        llama()
        | {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_key_value_heads": 8}
        | {"num_attention_heads": heads, "head_dim": hidden // heads, "vocab_size": 32000, "tie_word_embeddings": True}
    )
    memory = gpu_named("h200").memory
    conditions = Conditions(memory, ranks, max_batch_size=512, backend="vllm", utilization=share)
    estimate, iteration = Estimate(sizes, conditions), usual_vllm_tokens(memory)
    fixed = estimate.weights + estimate.logits + estimate.communication + estimate.overhead
    total = fixed + estimate.activations(iteration) + estimate.kv_bytes(iteration)
    assert total / MIB == pytest.approx(held, rel=0.03)
    assert estimate.kv_tokens(iteration) == pytest.approx(tokens, rel=0.003)


def test_a_share_of_the_whole_gpu_leaves_what_vllm_takes_beside_it() -> None:
    conditions = Conditions(80 * GIB, backend="vllm", utilization=1.0)
    estimate = Estimate(LLAMA, conditions)
    parts = estimate.weights + estimate.logits + estimate.communication + estimate.overhead
    assert parts + estimate.activations(8192) + estimate.kv_bytes(8192) == 80 * GIB
    assert (usual_vllm_tokens(80 * GIB), usual_vllm_tokens(24 * GIB)) == (8192, 2048)
