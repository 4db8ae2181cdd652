"""Smaller numbers for weights, activations and cache, made while compiling."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.options.choices import (
    AwqFormat,
    CalibDevice,
    KvCacheQuantAlgorithm,
    QuantAlgorithm,
    Quantization,
)
from djl_trtllm.config.options.documents import DJL, LMI, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option


class QuantizationOptions(OptionGroup):
    """What is quantised, how, and on which samples it is calibrated."""

    quantize: Annotated[
        Quantization | None,
        Option(
            "option.quantize",
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
        ),
    ] = None
    smoothquant_alpha: Annotated[
        float,
        Option(
            "option.smoothquant_alpha",
            "How much of the difficulty is moved from activations to weights; only with `option.quantize=smoothquant`.",
            aliases=("option.smoothquant_val",),
            at_least=0,
            at_most=1,
            source=LMI,
        ),
    ] = 0.8
    smoothquant_per_token: Annotated[
        bool,
        Option(
            "option.smoothquant_per_token",
            "One scale per token, chosen while running: slower and more accurate. Only with "
            "`option.quantize=smoothquant`.",
            source=LMI,
        ),
    ] = False
    smoothquant_per_channel: Annotated[
        bool,
        Option(
            "option.smoothquant_per_channel",
            "One scale per channel of the weights: slower and more accurate. Only with `option.quantize=smoothquant`.",
            source=LMI,
        ),
    ] = False
    awq_format: Annotated[
        AwqFormat,
        Option(
            "option.awq_format",
            "Kind of AWQ; only with `option.quantize=awq`.",
            aliases=(
                "option.q_format",
                "option.qformat",
            ),
            source=LMI,
        ),
    ] = AwqFormat.INT4_AWQ
    awq_block_size: Annotated[
        int,
        Option(
            "option.awq_block_size",
            "Weights that share a scale; only with `option.quantize=awq`.",
            aliases=("option.group_size",),
            unit="weights",
            at_least=1,
            source=DJL,
        ),
    ] = 128
    calib_size: Annotated[
        int,
        Option(
            "option.calib_size",
            "Samples for the calibration of awq, smoothquant and fp8.",
            aliases=("option.awq_calib_size",),
            unit="samples",
            at_least=1,
            source=LMI,
        ),
    ] = 32
    calib_batch_size: Annotated[
        int,
        Option(
            "option.calib_batch_size",
            "Samples that are calibrated at a time.",
            unit="samples",
            at_least=1,
            source=DJL,
        ),
    ] = 1
    calib_batches: Annotated[
        int | None,
        Option(
            "option.calib_batches",
            "Batches of samples, in place of what `option.calib_size` gives.",
            unit="batches",
            at_least=1,
            example="32",
            default_note="calib_size / calib_batch_size",
            source=DJL,
        ),
    ] = None
    calib_dataset: Annotated[
        str,
        Option(
            "option.calib_dataset",
            "Samples for the calibration: a Hugging Face dataset or a local folder.",
            source=DJL,
        ),
    ] = "cnn_dailymail"
    calib_max_seq_length: Annotated[
        int,
        Option(
            "option.calib_max_seq_length",
            "Longest sample.",
            unit="tokens",
            at_least=1,
            source=DJL,
        ),
    ] = 512
    tokenizer_max_seq_length: Annotated[
        int,
        Option(
            "option.tokenizer_max_seq_length",
            "Longest text the calibration tokenizes.",
            unit="tokens",
            at_least=1,
            source=DJL,
        ),
    ] = 2048
    random_seed: Annotated[
        int,
        Option(
            "option.random_seed",
            "Seed of the choice of samples.",
            at_least=0,
            source=DJL,
        ),
    ] = 1234
    calib_device: Annotated[
        CalibDevice,
        Option(
            "option.device",
            "Where the calibration runs.",
            aliases=("option.calib_device",),
            source=DJL,
        ),
    ] = CalibDevice.CUDA
    quant_algo: Annotated[
        QuantAlgorithm | None,
        Option(
            "option.quant_algo",
            "TensorRT-LLM's own name of a quantisation, in place of `option.quantize`.",
            example="W4A16_AWQ",
            default_note="from option.quantize",
            source=DJL,
        ),
    ] = None
    kv_cache_quant_algo: Annotated[
        KvCacheQuantAlgorithm | None,
        Option(
            "option.kv_cache_quant_algo",
            "TensorRT-LLM's own name of a quantisation of the KV cache, in place of `option.kv_cache_dtype`.",
            example="FP8",
            default_note="from option.kv_cache_dtype",
            source=DJL,
        ),
    ] = None
    clamp_val: Annotated[
        tuple[float, ...] | None,
        Option(
            "option.clamp_val",
            "Bounds for values under FP8_PER_CHANNEL_PER_TOKEN, lower and upper.",
            example="[-1200.0,1200.0]",
            default_note="none",
            source=DJL,
        ),
    ] = None
    use_meta_recipe: Annotated[
        bool,
        Option(
            "option.use_meta_recipe",
            "Use Meta's FP8 recipe (Llama 3.1 405B).",
            source=DJL,
        ),
    ] = False
    has_zero_point: Annotated[
        bool,
        Option(
            "option.has_zero_point",
            "The quantised weights have a zero point.",
            source=DJL,
        ),
    ] = False
    pre_quant_scale: Annotated[
        bool,
        Option(
            "option.pre_quant_scale",
            "The weights are scaled before they are quantised.",
            aliases=("option.pre_quant_scales",),
            source=DJL,
        ),
    ] = False
    exclude_modules: Annotated[
        tuple[str, ...] | None,
        Option(
            "option.exclude_modules",
            "Modules that are not quantised.",
            example='["lm_head"]',
            default_note="chosen by the quantiser",
            source=DJL,
        ),
    ] = None
    force_dynamic_quantization: Annotated[
        bool,
        Option(
            "option.force_dynamic_quantization",
            "Quantise activations while running, also where the checkpoint has fixed scales.",
            source=TRTLLM,
        ),
    ] = False
