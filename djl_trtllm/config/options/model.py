"""Which model is served, and in which number format."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.options.choices import Backend, DType, LoadFormat
from djl_trtllm.config.options.documents import DJL, LMI, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option, Scope


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
            aliases=(
                "option.model_id_or_path",
                "option.model",
                "option.engine_repository",
            ),
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
    trust_remote_code: Annotated[
        bool,
        Option(
            "option.trust_remote_code",
            "Run Python code that comes with the model's files (its model and tokenizer classes). Set it only for "
            "models whose code you have read. What the operator sets comes before what a model's files set, and a "
            "fetched model cannot set it.",
            source=DJL,
            scope=Scope.PERMISSION,
        ),
    ] = False
    model_name: Annotated[
        str | None,
        Option(
            "option.model_name",
            "The name clients see and may ask for: in OpenAI responses, in metrics and in model listings.",
            aliases=("option.modelName", "option.served_model_name"),
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
            source=TRTLLM,
        ),
    ] = Backend.AUTO
    tokenizer: Annotated[
        str | None,
        Option(
            "option.tokenizer",
            "Where the tokenizer's files are, if not beside the model's: a folder, a model of the hub, or s3://.",
            aliases=(
                "option.tokenizer_dir",
                "option.tokenizer_repository",
            ),
            example="/models/Meta-Llama-3-8B-Instruct",
            default_note="the model's own",
            effect="where the tokenizer is loaded from",
            source=f"{DJL}, {TRITON}",
        ),
    ] = None
    tokenizer_revision: Annotated[
        str | None,
        Option(
            "option.tokenizer_revision",
            "Branch, tag or commit of the tokenizer on the Hugging Face hub.",
            example="main",
            default_note="the repository's default branch",
            effect="revision of option.tokenizer where that is on the hub",
            source=DJL,
        ),
    ] = None
    load_format: Annotated[
        LoadFormat,
        Option(
            "option.load_format",
            "`dummy` makes up weights instead of loading them.",
            source=DJL,
        ),
    ] = LoadFormat.AUTO
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
            source=DJL,
        ),
    ] = DType.AUTO
