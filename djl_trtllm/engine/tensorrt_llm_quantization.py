"""How weights and KV cache are quantised: options to TensorRT-LLM's algorithms and their calibration."""

from __future__ import annotations

from djl_trtllm.config import Backend, Config, KvCacheDType, Quantization
from djl_trtllm.config.choices import AwqFormat
from djl_trtllm.config.target import Target
from djl_trtllm.engine.tensorrt_llm_arguments import Collector

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
    """The word of `option.quantize` for one of TensorRT-LLM's algorithms, where there is one."""
    return next((method for method, names in _SAME.items() if algorithm in names), None)


def quantization(collector: Collector) -> None:
    """`QuantConfig` and `CalibConfig` of an engine; a checkpoint that is quantised already brings its own."""
    options, facts = collector.options, collector.facts
    if options.quantize is not None and facts.stored_quantization is not None:
        if facts.stored_quantization not in _SAME[options.quantize]:
            collector.problems.append(
                f"{collector.cited('quantize')}: the checkpoint is quantised already, with {facts.stored_quantization};"
                " leave the option out, or take a checkpoint that is not"
            )
        return
    if options.quantize is not None and facts.backend is not Backend.TENSORRT:
        collector.problems.append(
            f"{collector.cited('quantize')}: TensorRT-LLM's {facts.backend} backend does not quantise, and this "
            "checkpoint is not quantised: take one that is (quantised by ModelOpt, with hf_quant_config.json), or "
            "compile an engine with option.backend=tensorrt on TensorRT-LLM 1.2"
        )
        return
    algorithm = _algorithm(collector.config)
    if algorithm is None:
        return
    if _QUANT_ALGO not in collector:
        collector.put(_QUANT_ALGO, {"enum": "QuantAlgo", "name": algorithm}, "quantize")
    if algorithm in _SAME[Quantization.SMOOTHQUANT]:
        collector.put(Target("QuantConfig", "smoothquant_val"), options.smoothquant_alpha, "smoothquant_alpha")
    if algorithm in _CALIBRATED and options.calib_batches is None:
        batches = -(-options.calib_size // options.calib_batch_size)
        collector.put(Target("CalibConfig", "calib_batches"), batches, "calib_size")


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


def kv_cache_format(collector: Collector) -> None:
    """An engine's cache is quantised when it is compiled, PyTorch's when it is loaded."""
    options, engine = collector.options, collector.facts.backend is Backend.TENSORRT
    match options.kv_cache_dtype:
        case KvCacheDType.FP8 if engine and options.kv_cache_quant_algo is None:
            collector.put(_KV_CACHE_QUANT_ALGO, {"enum": "QuantAlgo", "name": "FP8"}, "kv_cache_dtype")
        case KvCacheDType.INT8 if engine and options.kv_cache_quant_algo is None:
            collector.put(_KV_CACHE_QUANT_ALGO, {"enum": "QuantAlgo", "name": "INT8"}, "kv_cache_dtype")
        case KvCacheDType.FP8 if not engine:
            collector.put(Target("KvCacheConfig", "dtype"), "fp8", "kv_cache_dtype")
        case KvCacheDType.INT8 if not engine:
            collector.problems.append(
                f"{collector.cited('kv_cache_dtype')}: TensorRT-LLM's {collector.facts.backend} backend has no such "
                "cache; option.kv_cache_dtype=fp8 takes the same memory"
            )
        case KvCacheDType.FP16 if collector.facts.dtype not in (None, "float16"):
            collector.notes.append(
                f"{collector.cited('kv_cache_dtype')}: TensorRT-LLM keeps the cache in the model's own number format, "
                f"{collector.facts.dtype}"
            )
        case KvCacheDType.FP32:
            collector.problems.append(
                f"{collector.cited('kv_cache_dtype')}: TensorRT-LLM keeps the cache in the model's own 16 bits, or in "
                "8 (fp8); leave the option out"
            )


def is_calibrated(config: Config, stored_quantization: str | None) -> bool:
    """Whether compiling runs samples through the model."""
    return stored_quantization is None and _algorithm(config) in _CALIBRATED
