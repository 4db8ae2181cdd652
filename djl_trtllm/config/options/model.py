"""The model: its files, its architecture, its quantisation, its adapters."""

from __future__ import annotations

from typing import Literal

from djl_trtllm.config.options.choices import (
    AwqFormat,
    Backend,
    ChatGlmVersion,
    DType,
    GptVersion,
    KvCacheQuantAlgorithm,
    LoadFormat,
    QuantAlgorithm,
    Quantization,
    RollingBatch,
    RotaryScaling,
)
from djl_trtllm.config.options.option import DJL, LMI, TRITON, TRTLLM, TRUSS, OptionGroup, Scope, count, option, unset


class ModelOptions(OptionGroup, name="model", heading="Model", source=DJL):
    """Model files, backend, number format."""

    model_id: str | None = unset(
        "The model: a Hugging Face hub id, an `s3://` address of a checkpoint or of a compiled model, or a local "
        "path. Without it the model directory itself is the model.",
        example="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        default_note="the model directory",
        effect="where the files of the model come from",
        source=LMI,
        aliases=("option.model_id_or_path", "option.model", "option.engine_repository", "option.s3url"),
    )
    revision: str | None = unset(
        "Branch, tag or commit of a model on the Hugging Face hub.",
        example="main",
        default_note="the hub's default branch",
        effect="revision of the hub download; part of the engine cache's key",
    )
    trust_remote_code: bool = option(
        False,
        "Run Python code that comes with the model's files (its model and tokenizer classes). Set it only for "
        "models whose code you have read. What the operator sets comes before what a model's files set, and a "
        "fetched model cannot set it.",
        scope=Scope.PERMISSION,
    )
    model_name: str | None = unset(
        "The name clients see and may ask for: in OpenAI responses, in metrics and in model listings.",
        aliases=("option.modelName", "option.served_model_name"),
        example="my-model",
        default_note='"model"',
        effect="name of the model in requests, responses and metrics",
    )
    backend: Backend = option(
        Backend.AUTO,
        "The engine that runs the model. `auto`: an engine directory names its own; otherwise TensorRT-LLM where "
        "it is installed and a GPU is present (compiled engine where this TensorRT-LLM has one, else its PyTorch "
        "backend); otherwise vLLM where it is installed, on a CPU only where OpenVINO is not; otherwise OpenVINO on "
        "the CPU. `scripted` answers from `option.script` and is for tests and "
        "benchmarks.",
        value_aliases={"trt": "tensorrt", "torch": "pytorch", "_autodeploy": "autodeploy"},
        effect="chooses the backend; the choice and its reason are logged",
        source=TRTLLM,
    )
    rolling_batch: RollingBatch = option(
        RollingBatch.AUTO,
        "LMI's batching library. `vllm` and `lmi-dist` (which is vLLM in LMI too) mean `option.backend=vllm`, unless "
        "that is set. The others choose no engine, and requests are always batched in flight. Under DJL Serving "
        "`enable` selects its rolling batch mode (docs/djl-serving.md says why not `auto`), `disable` its async mode.",
        value_aliases={
            "lmi_dist": "lmi-dist",
            "tensorrt_llm": "trtllm",
            "tensorrt-llm": "trtllm",
            "trt-llm": "trtllm",
            "trt_llm": "trtllm",
        },
        effect="vllm and lmi-dist choose option.backend=vllm; requests are always batched in flight",
        under_djl="DJL Serving's rolling batch mode if it is `enable` or `trtllm`",
    )
    tokenizer: str | None = unset(
        "Where the tokenizer's files are, if not beside the model's: a folder, a model of the hub, or s3://.",
        aliases=("option.tokenizer_dir", "option.tokenizer_repository"),
        example="/models/Meta-Llama-3-8B-Instruct",
        default_note="the model's own",
        effect="where the tokenizer is loaded from",
        source=f"{DJL}, {TRITON}",
    )
    tokenizer_revision: str | None = unset(
        "Branch, tag or commit of the tokenizer on the Hugging Face hub.",
        example="main",
        default_note="the repository's default branch",
        effect="revision of option.tokenizer where that is on the hub",
    )
    hf_access_token: str | None = unset(
        "Access token for private and gated models of the Hugging Face hub. Better is HF_TOKEN in the environment, "
        "which comes before this: a token in a model directory is copied with it.",
        aliases=("option.hf_token",),
        example="HF_TOKEN",
        default_note="HF_TOKEN, else what the hub's own login saved",
        effect="token of downloads from the hub; it is masked wherever options are shown",
        source=TRUSS,
    )
    load_format: LoadFormat = option(LoadFormat.AUTO, "`dummy` makes up weights instead of loading them.")
    dtype: DType = option(
        DType.AUTO,
        "Number format of weights and activations. `auto` takes the checkpoint's own format where the backend has it.",
        value_aliases={
            "float32": "fp32",
            "float": "fp32",
            "f32": "fp32",
            "float16": "fp16",
            "half": "fp16",
            "f16": "fp16",
            "bfloat16": "bf16",
        },
    )


_OVERLAY = "{} in the copy of the checkpoint's config.json that the engine reads"


class ArchitectureOptions(OptionGroup, name="architecture", heading="Model architecture", source=LMI):
    """Each of them is in the checkpoint's config.json today; the `rotary_*` options override it."""

    chatglm_model_version: ChatGlmVersion = option(
        ChatGlmVersion.UNSPECIFIED,
        "Which ChatGLM model it is; the document requires it for ChatGLM.",
        value_aliases={"chatglm3": "chatglm3_6b", "chatglm2": "chatglm2_6b", "chatglm": "chatglm_6b"},
    )
    gpt_model_version: GptVersion = option(GptVersion.GPT2, "Which model of the GPT-2 family it is.")
    rotary_base: float | None = unset(
        "Base of the rotary embedding, for Llama, InternLM and Qwen.",
        above=0,
        example="10000",
        default_note="the checkpoint's own",
        effect=_OVERLAY.format("rope_theta"),
    )
    rotary_dim: int | None = unset(
        "Dimensions of a head that are rotated, for GPT-J.",
        **count("dimensions"),
        example="64",
        default_note="the checkpoint's own",
        effect=_OVERLAY.format("rotary_dim"),
    )
    rotary_scaling_type: RotaryScaling | None = unset(
        "How the rotary embedding is stretched over longer contexts, for Llama, InternLM and Qwen.",
        example="linear",
        default_note="the checkpoint's own",
        effect=_OVERLAY.format("rope_scaling") + "; OpenVINO does not stretch `dynamic`",
    )
    rotary_scaling_factor: float | None = unset(
        "By how much the context is stretched.",
        above=1,
        example="2",
        default_note="the checkpoint's own",
        effect=_OVERLAY.format("rope_scaling"),
    )


class QuantizationOptions(OptionGroup, name="quantization", heading="Quantisation", source=DJL):
    """Options that say what is quantised, how, and on which samples it is calibrated."""

    quantize: Quantization | None = unset(
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
            "awq_marlin": "awq",
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
        aliases=("option.q_format", "option.qformat"),
        source=LMI,
    )
    awq_block_size: int = option(
        128,
        "Weights that share a scale; only with `option.quantize=awq`.",
        aliases=("option.group_size",),
        **count("weights"),
    )
    calib_size: int = option(
        32,
        "Samples for the calibration of awq, smoothquant, fp8 and NVFP4.",
        aliases=("option.awq_calib_size",),
        **count("samples"),
        source=LMI,
    )
    calib_batch_size: int = option(1, "Samples that are calibrated at a time.", **count("samples"))
    calib_batches: int | None = unset(
        "Batches of samples, in place of what `option.calib_size` gives.",
        **count("batches"),
        example="32",
        default_note="calib_size / calib_batch_size",
    )
    calib_dataset: str = option(
        "cnn_dailymail", "Samples for the calibration: a Hugging Face dataset or a local folder."
    )
    calib_max_seq_length: int = option(512, "Longest sample.", **count("tokens"))
    tokenizer_max_seq_length: int = option(2048, "Longest text the calibration tokenizes.", **count("tokens"))
    random_seed: int = option(1234, "Seed of the choice of samples.", at_least=0)
    calib_device: Literal["cuda", "cpu"] = option(
        "cuda", "Where the calibration runs.", key="option.device", aliases=("option.calib_device",)
    )
    quant_algo: QuantAlgorithm | None = unset(
        "TensorRT-LLM's own name of a quantisation, in place of `option.quantize`.",
        example="W4A16_AWQ",
        default_note="from option.quantize",
    )
    kv_cache_quant_algo: KvCacheQuantAlgorithm | None = unset(
        "TensorRT-LLM's own name of a quantisation of the KV cache, in place of `option.kv_cache_dtype`.",
        example="FP8",
        default_note="from option.kv_cache_dtype",
    )
    clamp_val: tuple[float, ...] | None = unset(
        "Bounds for values under FP8_PER_CHANNEL_PER_TOKEN, lower and upper.",
        example="[-1200.0,1200.0]",
        default_note="none",
    )
    use_meta_recipe: bool = option(False, "Use Meta's FP8 recipe (Llama 3.1 405B).")
    has_zero_point: bool = option(False, "The quantised weights have a zero point.")
    pre_quant_scale: bool = option(
        False, "The weights are scaled before they are quantised.", aliases=("option.pre_quant_scales",)
    )
    exclude_modules: tuple[str, ...] | None = unset(
        "Modules that are not quantised.", example='["lm_head"]', default_note="chosen by the quantiser"
    )
    force_dynamic_quantization: bool = option(
        False, "Quantise activations while running, also where the checkpoint has fixed scales.", source=TRTLLM
    )


class LoraOptions(OptionGroup, name="lora", heading="Adapters", source=TRTLLM):
    """Adapters that requests name; TensorRT-LLM has them."""

    enable_lora: bool = option(
        False,
        "Serve LoRA adapters beside the model, those in its `adapters` folder and those registered at `/adapters`; "
        "a request names one by `adapters`.",
        source=DJL,
    )
    max_lora_rank: int = option(64, "Largest rank of an adapter.", **count("dimensions"))
    lora_dir: str | None = unset("Folders of adapters.", example="/opt/ml/model/adapters")
    lora_ckpt_source: str = option("hf", "Format of the adapters, `hf` or `nemo`.")
    lora_target_modules: tuple[str, ...] | None = unset("Modules that adapters change.", example="attn_q,attn_v")
    lora_cache_optimal_adapter_size: int = option(
        8,
        "Rank for which the adapter cache is sized.",
        aliases=("option.optimal_adapter_size",),
        **count("dimensions"),
        source=TRITON,
    )
    lora_cache_max_adapter_size: int = option(
        64,
        "Largest rank the adapter cache takes.",
        aliases=("option.max_adapter_size",),
        **count("dimensions"),
        source=TRITON,
    )
    lora_cache_gpu_memory_fraction: float = option(
        0.05,
        "Share of GPU memory for adapters.",
        aliases=("option.device_cache_percent",),
        at_least=0,
        at_most=1,
        source=TRITON,
    )
    lora_cache_host_memory_bytes: int = option(
        1073741824, "Host memory for adapters.", unit="bytes", at_least=0, source=TRITON
    )
