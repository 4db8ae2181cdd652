"""The quantisation of weights and KV cache: TensorRT-LLM's algorithms and their calibration."""

from __future__ import annotations

from djl_trtllm.backends.effects import Target
from djl_trtllm.backends.tensorrt_llm.arguments import ArgumentBuilder
from djl_trtllm.config import Backend, Config, KvCacheDType, Quantization
from djl_trtllm.config.options.choices import AwqFormat

_ALGORITHMS = {
    Quantization.INT8: "W8A16",
    Quantization.INT4: "W4A16",
    Quantization.AWQ: "W4A16_AWQ",
    Quantization.W4A8_AWQ: "W4A8_AWQ",
    Quantization.SMOOTHQUANT: "W8A8_SQ_PER_CHANNEL",
    Quantization.FP8: "FP8",
}
_SMOOTHQUANT = {
    (False, False): "W8A8_SQ_PER_TENSOR_PLUGIN",
    (True, False): "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
    (False, True): "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
    (True, True): "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
}
"""By option.smoothquant_per_token and option.smoothquant_per_channel, where one of them is set (TensorRT-LLM's
`tests/integration/defs/accuracy/test_cli_flow.py` at 000a01de)."""

_SAME = {
    Quantization.INT8: ("W8A16", "W8A16_GPTQ"),
    Quantization.INT4: ("W4A16", "W4A16_GPTQ"),
    Quantization.AWQ: ("W4A16_AWQ", "W4A8_AWQ"),
    Quantization.W4A8_AWQ: ("W4A8_AWQ",),
    Quantization.SMOOTHQUANT: (
        "W8A8_SQ_PER_CHANNEL",
        "W8A8_SQ_PER_TENSOR_PLUGIN",
        "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
        "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
        "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
    ),
    Quantization.FP8: ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_BLOCK_SCALES"),
}
_CALIBRATED = frozenset({"W4A16_AWQ", "W4A8_AWQ", "FP8", "NVFP4", "W4A8_NVFP4_FP8", *_SAME[Quantization.SMOOTHQUANT]})
_QUANT_ALGO = Target("QuantConfig", "quant_algo")
_KV_CACHE_QUANT_ALGO = Target("QuantConfig", "kv_cache_quant_algo")


def method_of(algorithm: str | None) -> Quantization | None:
    """The value of `option.quantize` for one of TensorRT-LLM's algorithms, or None."""
    return next((method for method, names in _SAME.items() if algorithm in names), None)


def quantization(builder: ArgumentBuilder) -> None:
    """`QuantConfig` and `CalibConfig` of an engine; a quantised checkpoint has its own."""
    options, inputs = builder.options, builder.inputs
    if options.quantize is not None and inputs.stored_quantization is not None:
        if inputs.stored_quantization not in _SAME[options.quantize]:
            builder.problems.append(
                f"{builder.format_setting('quantize')}: the checkpoint is quantised already, with "
                f"{inputs.stored_quantization}; leave the option out, or take a checkpoint that is not"
            )
        return
    if options.quantize is not None and inputs.backend is not Backend.TENSORRT:
        builder.problems.append(
            f"{builder.format_setting('quantize')}: TensorRT-LLM's {inputs.backend} backend does not quantise, and "
            "this checkpoint is not quantised: take one that is (quantised by ModelOpt, with hf_quant_config.json), "
            "or compile an engine with option.backend=tensorrt on TensorRT-LLM 1.2"
        )
        return
    algorithm = _algorithm(builder.config)
    if algorithm is None:
        return
    if _QUANT_ALGO not in builder:
        builder.put(_QUANT_ALGO, {"enum": "QuantAlgo", "name": algorithm}, "quantize")
    if algorithm in _SAME[Quantization.SMOOTHQUANT]:
        builder.put(Target("QuantConfig", "smoothquant_val"), options.smoothquant_alpha, "smoothquant_alpha")
    if algorithm in _CALIBRATED and options.calib_batches is None:
        batches = -(-options.calib_size // options.calib_batch_size)
        builder.put(Target("CalibConfig", "calib_batches"), batches, "calib_size")


def _algorithm(config: Config) -> str | None:
    options = config.options
    if options.quant_algo is not None:
        return str(options.quant_algo)
    if options.quantize is Quantization.AWQ and options.awq_format is AwqFormat.W4A8_AWQ:
        return "W4A8_AWQ"
    chosen = config.is_set("smoothquant_per_token") or config.is_set("smoothquant_per_channel")
    if options.quantize is Quantization.SMOOTHQUANT and chosen:
        return _SMOOTHQUANT[options.smoothquant_per_token, options.smoothquant_per_channel]
    return None if options.quantize is None else _ALGORITHMS[options.quantize]


def kv_cache_format(builder: ArgumentBuilder) -> None:
    """An engine's cache is quantised while compiling, PyTorch's while loading."""
    options, engine = builder.options, builder.inputs.backend is Backend.TENSORRT
    match options.kv_cache_dtype:
        case KvCacheDType.FP8 if engine and options.kv_cache_quant_algo is None:
            builder.put(_KV_CACHE_QUANT_ALGO, {"enum": "QuantAlgo", "name": "FP8"}, "kv_cache_dtype")
        case KvCacheDType.INT8 if engine and options.kv_cache_quant_algo is None:
            builder.put(_KV_CACHE_QUANT_ALGO, {"enum": "QuantAlgo", "name": "INT8"}, "kv_cache_dtype")
        case KvCacheDType.FP8 if not engine:
            builder.put(Target("KvCacheConfig", "dtype"), "fp8", "kv_cache_dtype")
        case KvCacheDType.INT8 if not engine:
            builder.problems.append(
                f"{builder.format_setting('kv_cache_dtype')}: TensorRT-LLM's {builder.inputs.backend} backend has no "
                "such cache; option.kv_cache_dtype=fp8 takes the same memory"
            )
        case KvCacheDType.FP16 if builder.inputs.dtype not in (None, "float16"):
            builder.notes.append(
                f"{builder.format_setting('kv_cache_dtype')}: TensorRT-LLM keeps the cache in the model's own number "
                f"format, {builder.inputs.dtype}"
            )
        case KvCacheDType.FP32:
            builder.problems.append(
                f"{builder.format_setting('kv_cache_dtype')}: TensorRT-LLM keeps the cache in the model's own 16 bits, "
                "or in 8 (fp8); leave the option out"
            )


def is_calibrated(config: Config, stored_quantization: str | None) -> bool:
    """Whether compiling calibrates with samples."""
    return stored_quantization is None and _algorithm(config) in _CALIBRATED
