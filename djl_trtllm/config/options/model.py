"""Which model is served, and in which number format."""

from __future__ import annotations

from djl_trtllm.config.options.choices import Backend, DType, LoadFormat
from djl_trtllm.config.options.documents import DJL, LMI, TRITON, TRTLLM, TRUSS
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Scope, option


class ModelOptions(OptionGroup):
    """Model files, backend, number format."""

    model_id: str | None = option(
        None,
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
            "option.s3url",
        ),
    )
    revision: str | None = option(
        None,
        "Branch, tag or commit of a model on the Hugging Face hub.",
        example="main",
        default_note="the hub's default branch",
        effect="revision of the hub download; part of the engine cache's key",
        source=DJL,
    )
    trust_remote_code: bool = option(
        False,
        "Run Python code that comes with the model's files (its model and tokenizer classes). Set it only for "
        "models whose code you have read. What the operator sets comes before what a model's files set, and a "
        "fetched model cannot set it.",
        source=DJL,
        scope=Scope.PERMISSION,
    )
    model_name: str | None = option(
        None,
        "The name clients see and may ask for: in OpenAI responses, in metrics and in model listings.",
        aliases=("option.modelName", "option.served_model_name"),
        example="my-model",
        default_note='"model"',
        effect="name of the model in requests, responses and metrics",
        source=DJL,
    )
    backend: Backend = option(
        Backend.AUTO,
        "The engine that runs the model. `auto`: an engine directory names its own; otherwise TensorRT-LLM where "
        "it is installed and a GPU is present (compiled engine where this TensorRT-LLM has one, else its PyTorch "
        "backend); otherwise OpenVINO on the CPU. `scripted` answers from `option.script` and is for tests and "
        "benchmarks.",
        value_aliases={"trt": "tensorrt", "torch": "pytorch", "_autodeploy": "autodeploy"},
        effect="chooses the backend; the choice and its reason are logged",
        source=TRTLLM,
    )
    tokenizer: str | None = option(
        None,
        "Where the tokenizer's files are, if not beside the model's: a folder, a model of the hub, or s3://.",
        aliases=(
            "option.tokenizer_dir",
            "option.tokenizer_repository",
        ),
        example="/models/Meta-Llama-3-8B-Instruct",
        default_note="the model's own",
        effect="where the tokenizer is loaded from",
        source=f"{DJL}, {TRITON}",
    )
    tokenizer_revision: str | None = option(
        None,
        "Branch, tag or commit of the tokenizer on the Hugging Face hub.",
        example="main",
        default_note="the repository's default branch",
        effect="revision of option.tokenizer where that is on the hub",
        source=DJL,
    )
    hf_access_token: str | None = option(
        None,
        "Access token for private and gated models of the Hugging Face hub. Better is HF_TOKEN in the environment, "
        "which comes before this: a token in a model directory is copied with it.",
        aliases=("option.hf_token",),
        example="HF_TOKEN",
        default_note="HF_TOKEN, else what the hub's own login saved",
        effect="token of downloads from the hub; it is masked wherever options are shown",
        source=TRUSS,
    )
    load_format: LoadFormat = option(LoadFormat.AUTO, "`dummy` makes up weights instead of loading them.", source=DJL)
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
        source=DJL,
    )
