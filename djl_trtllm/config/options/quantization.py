"""Smaller numbers for weights, activations and cache, made while compiling."""

from __future__ import annotations

from djl_trtllm.config.options.choices import (
    AwqFormat,
    CalibDevice,
    KvCacheQuantAlgorithm,
    QuantAlgorithm,
    Quantization,
)
from djl_trtllm.config.options.documents import DJL, LMI, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class QuantizationOptions(OptionGroup):
    """What is quantised, how, and on which samples it is calibrated."""

    quantize: Quantization | None = option(
        None,
        "Quantisation applied while the model is compiled; `none` for none. It cannot be applied to an engine "
        "that is already compiled. `int8` and `int4` quantise weights only, `awq` is 4-bit weights scaled by "
        "activations, `w4a8_awq` the same with 8-bit activations, `smoothquant` is 8-bit weights and activations, "
        "`fp8` is 8-bit floating point.",
        value_aliases={
            "int8_weight_only": "int8",
            "int8_wo": "int8",
            "w8a16": "int8",
            "int4_weight_only": "int4",
            "int4_wo": "int4",
            "w4a16": "int4",
            "int4_awq": "awq",
            "w4a16_awq": "awq",
            "w4a8": "w4a8_awq",
            "int8_sq": "smoothquant",
        },
        example="awq",
        default_note="none",
        source=LMI,
    )
    smoothquant_alpha: float = option(
        0.8,
        "How much of the difficulty is moved from activations to weights; only with `option.quantize=smoothquant`.",
        aliases=("option.smoothquant_val",),
        at_least=0,
        at_most=1,
        source=LMI,
    )
    smoothquant_per_token: bool = option(
        False,
        "One scale per token, chosen while running: slower and more accurate. Only with `option.quantize=smoothquant`.",
        source=LMI,
    )
    smoothquant_per_channel: bool = option(
        False,
        "One scale per channel of the weights: slower and more accurate. Only with `option.quantize=smoothquant`.",
        source=LMI,
    )
    awq_format: AwqFormat = option(
        AwqFormat.INT4_AWQ,
        "Kind of AWQ; only with `option.quantize=awq`.",
        aliases=(
            "option.q_format",
            "option.qformat",
        ),
        source=LMI,
    )
    awq_block_size: int = option(
        128,
        "Weights that share a scale; only with `option.quantize=awq`.",
        aliases=("option.group_size",),
        unit="weights",
        at_least=1,
        source=DJL,
    )
    calib_size: int = option(
        32,
        "Samples for the calibration of awq, smoothquant and fp8.",
        aliases=("option.awq_calib_size",),
        unit="samples",
        at_least=1,
        source=LMI,
    )
    calib_batch_size: int = option(1, "Samples that are calibrated at a time.", unit="samples", at_least=1, source=DJL)
    calib_batches: int | None = option(
        None,
        "Batches of samples, in place of what `option.calib_size` gives.",
        unit="batches",
        at_least=1,
        example="32",
        default_note="calib_size / calib_batch_size",
        source=DJL,
    )
    calib_dataset: str = option(
        "cnn_dailymail", "Samples for the calibration: a Hugging Face dataset or a local folder.", source=DJL
    )
    calib_max_seq_length: int = option(512, "Longest sample.", unit="tokens", at_least=1, source=DJL)
    tokenizer_max_seq_length: int = option(
        2048, "Longest text the calibration tokenizes.", unit="tokens", at_least=1, source=DJL
    )
    random_seed: int = option(1234, "Seed of the choice of samples.", at_least=0, source=DJL)
    calib_device: CalibDevice = option(
        CalibDevice.CUDA,
        "Where the calibration runs.",
        key="option.device",
        aliases=("option.calib_device",),
        source=DJL,
    )
    quant_algo: QuantAlgorithm | None = option(
        None,
        "TensorRT-LLM's own name of a quantisation, in place of `option.quantize`.",
        example="W4A16_AWQ",
        default_note="from option.quantize",
        source=DJL,
    )
    kv_cache_quant_algo: KvCacheQuantAlgorithm | None = option(
        None,
        "TensorRT-LLM's own name of a quantisation of the KV cache, in place of `option.kv_cache_dtype`.",
        example="FP8",
        default_note="from option.kv_cache_dtype",
        source=DJL,
    )
    clamp_val: tuple[float, ...] | None = option(
        None,
        "Bounds for values under FP8_PER_CHANNEL_PER_TOKEN, lower and upper.",
        example="[-1200.0,1200.0]",
        default_note="none",
        source=DJL,
    )
    use_meta_recipe: bool = option(False, "Use Meta's FP8 recipe (Llama 3.1 405B).", source=DJL)
    has_zero_point: bool = option(False, "The quantised weights have a zero point.", source=DJL)
    pre_quant_scale: bool = option(
        False, "The weights are scaled before they are quantised.", aliases=("option.pre_quant_scales",), source=DJL
    )
    exclude_modules: tuple[str, ...] | None = option(
        None,
        "Modules that are not quantised.",
        example='["lm_head"]',
        default_note="chosen by the quantiser",
        source=DJL,
    )
    force_dynamic_quantization: bool = option(
        False, "Quantise activations while running, also where the checkpoint has fixed scales.", source=TRTLLM
    )
