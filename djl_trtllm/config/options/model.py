"""Which model is served, and in which number format."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.choices import Backend, DType, Quantization
from djl_trtllm.config.option import Option
from djl_trtllm.config.options.group import OptionGroup

LMI = "lmi-trt-llm.md"
DJL = "DJL Serving"


class ModelOptions(OptionGroup):
    """Model files, backend, number format."""

    model_id: Annotated[
        str | None,
        Option(
            "option.model_id",
            "The model: a Hugging Face hub id, an `s3://` address of a checkpoint or of a compiled model, or a local "
            "path. Without it the model directory itself is the model.",
            example="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
            default_note="the model directory",
            effect="where the files of the model come from",
            source=LMI,
        ),
    ] = None
    revision: Annotated[
        str | None,
        Option(
            "option.revision",
            "Branch, tag or commit of a model on the Hugging Face hub.",
            example="main",
            default_note="the hub's default branch",
            effect="revision of the hub download; part of the engine cache's key",
            source=DJL,
        ),
    ] = None
    task: Annotated[
        str | None,
        Option(
            "option.task",
            "The model's task as the Hugging Face hub names it. This server generates text and does nothing else.",
            example="text-generation",
            effect="no effect: text generation is the only task",
            source=DJL,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Option(
            "option.trust_remote_code",
            "Run Python code that comes with the model's files (its model and tokenizer classes). Set it only for "
            "models whose code you have read.",
            tensorrt="trust_remote_code of LLM and of the tokenizer",
            pytorch="trust_remote_code of LLM and of the tokenizer",
            openvino="trust_remote_code of the export and of the tokenizer",
            source=DJL,
        ),
    ] = False
    model_name: Annotated[
        str | None,
        Option(
            "option.model_name",
            "The name clients see and may ask for: in OpenAI responses, in metrics and in model listings.",
            aliases=("option.modelName",),
            example="my-model",
            default_note='"model"',
            effect="name of the model in requests, responses and metrics",
            source=DJL,
        ),
    ] = None
    backend: Annotated[
        Backend,
        Option(
            "option.backend",
            "The engine that runs the model. `auto`: an engine directory names its own; otherwise TensorRT-LLM where "
            "it is installed and a GPU is present (compiled engine where this TensorRT-LLM has one, else its PyTorch "
            "backend); otherwise OpenVINO on the CPU. `scripted` answers from `option.script` and is for tests and "
            "benchmarks.",
            value_aliases={"trt": "tensorrt", "torch": "pytorch", "_autodeploy": "autodeploy"},
            effect="chooses the backend; the choice and its reason are logged",
            source="TensorRT-LLM LLM API",
        ),
    ] = Backend.AUTO
    dtype: Annotated[
        DType,
        Option(
            "option.dtype",
            "Number format of weights and activations. `auto` takes the checkpoint's own format where the backend "
            "has it.",
            value_aliases={
                "float32": "fp32",
                "float": "fp32",
                "f32": "fp32",
                "float16": "fp16",
                "half": "fp16",
                "f16": "fp16",
                "bfloat16": "bf16",
            },
            tensorrt="LLM(dtype)",
            pytorch="LLM(dtype)",
            openvino="weight format of the export and INFERENCE_PRECISION_HINT",
            source=DJL,
        ),
    ] = DType.AUTO
    quantize: Annotated[
        Quantization | None,
        Option(
            "option.quantize",
            "Quantisation applied while the model is compiled; `none` for none. It cannot be applied to an engine "
            "that is already compiled. `int8` and `int4` quantise weights only, `awq` is 4-bit weights scaled by "
            "activations, `smoothquant` is 8-bit weights and activations, `fp8` is 8-bit floating point.",
            value_aliases={
                "int8_weight_only": "int8",
                "int8_wo": "int8",
                "w8a16": "int8",
                "int4_weight_only": "int4",
                "int4_wo": "int4",
                "w4a16": "int4",
                "int4_awq": "awq",
                "w4a16_awq": "awq",
                "int8_sq": "smoothquant",
            },
            example="awq",
            default_note="none",
            tensorrt="QuantConfig.quant_algo (W8A16, W4A16, W4A16_AWQ, W8A8_SQ_PER_CHANNEL or FP8)",
            pytorch="refused unless the checkpoint is already quantised so: this backend does not quantise",
            openvino="weight compression of the export: int8 and int4 as they are, awq as int4 with NNCF's data-free "
            "AWQ; smoothquant and fp8 have no counterpart and are refused",
            source=LMI,
        ),
    ] = None
