"""Options that DJL Serving's Python engine and handlers read."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.choices import RollingBatchMode, Streaming
from djl_trtllm.config.option import Option
from djl_trtllm.config.options.documents import DJL, TRUSS
from djl_trtllm.config.options.group import OptionGroup


class DjlHandlerOptions(OptionGroup):
    """The same directory runs under DJL Serving, where they count; `effect` says what each does here."""

    engine: Annotated[
        str | None,
        Option(
            "engine",
            "DJL Serving's engine, `Python` or `MPI`.",
            example="Python",
            effect="no effect: this server runs no Java engine; under DJL Serving use Python",
            source=DJL,
        ),
    ] = None
    rolling_batch: Annotated[
        RollingBatchMode,
        Option(
            "option.rolling_batch",
            "`auto` and `trtllm` are what this server does anyway. Under DJL Serving `enable` selects its rolling "
            "batch mode (docs/djl-serving.md says why not `auto`), `disable` its async mode; here batching stays in "
            "flight. `vllm`, `lmi-dist` and `scheduler` name other batching libraries; requests are batched by this "
            "server all the same.",
            value_aliases={"lmi_dist": "lmi-dist", "tensorrt_llm": "trtllm", "tensorrt-llm": "trtllm"},
            effect="no effect: requests are always batched in flight",
            source=DJL,
        ),
    ] = RollingBatchMode.AUTO
    mpi_mode: Annotated[
        bool,
        Option(
            "option.mpi_mode",
            "Start one Python process per GPU through mpirun.",
            effect="no effect: the engine process starts its own ranks",
            source=DJL,
        ),
    ] = False
    async_mode: Annotated[
        bool,
        Option(
            "option.async_mode",
            "Use an asynchronous handler under DJL Serving.",
            effect="no effect here; under DJL Serving it selects the async handler",
            source=DJL,
        ),
    ] = False
    entry_point: Annotated[
        str | None,
        Option(
            "option.entryPoint",
            "Python module or file with the handler, under DJL Serving.",
            aliases=("option.entrypoint",),
            example="djl_trtllm.async_handler",
            effect="no effect here; under DJL Serving it names the handler",
            source=DJL,
        ),
    ] = None
    python_executable: Annotated[
        str | None,
        Option(
            "option.pythonExecutable",
            "Python that runs the handler under DJL Serving (PYTHON_EXECUTABLE).",
            aliases=("option.pythonexecutable",),
            example="python3",
            effect="no effect: the server is that Python",
            source=DJL,
        ),
    ] = None
    env: Annotated[
        str | None,
        Option(
            "option.env",
            "Environment variables of the handler's process, `NAME=VALUE,NAME2=VALUE2`. Values are masked wherever "
            "they are shown.",
            example="HF_HUB_OFFLINE=1",
            effect=(
                "no effect: set them on the container, a model directory cannot change what the server's process loads"
            ),
            source=DJL,
        ),
    ] = None
    parallel_loading: Annotated[
        bool,
        Option(
            "option.parallel_loading",
            "Load copies of the model at the same time.",
            effect="no effect: one engine process serves a model",
            source=DJL,
        ),
    ] = False
    handler: Annotated[
        str,
        Option(
            "option.handler",
            "Function of the entry point that DJL Serving calls.",
            effect="no effect here; under DJL Serving it names the function",
            source=DJL,
        ),
    ] = "handle"
    enable_venv: Annotated[
        bool,
        Option(
            "option.enable_venv",
            "Run the handler in a virtual environment of its own.",
            effect="no effect: the server's own environment counts",
            source=DJL,
        ),
    ] = False
    use_passive_workers: Annotated[
        bool,
        Option(
            "option.use_passive_workers",
            "Give requests to the first of several processes only.",
            effect="no effect: the engine process starts its own ranks",
            source=DJL,
        ),
    ] = True
    lmcache_auto_config: Annotated[
        bool,
        Option(
            "option.lmcache_auto_config",
            "Configure LMCache (vLLM).",
            effect="no effect: option.enable_kv_cache_reuse and option.host_cache_size are this engine's",
            source=DJL,
        ),
    ] = False
    enable_streaming: Annotated[
        Streaming | None,
        Option(
            "option.enable_streaming",
            "Stream answers, in DJL Serving's old handlers.",
            value_aliases={"1": "true", "0": "false"},
            example="true",
            effect="no effect: a request streams when it asks for it",
            source=DJL,
        ),
    ] = None
    input_formatter: Annotated[
        str | None,
        Option(
            "option.input_formatter",
            "Reader of requests, by name.",
            example="my_input_formatter",
            effect="no effect here: a model.py with an input formatter is used when it is there",
            source=DJL,
        ),
    ] = None
    default_accept: Annotated[
        str | None,
        Option(
            "option.default_accept",
            "Type of answers where a request names none (SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT; scikit-learn and "
            "XGBoost only).",
            example="application/json",
            effect="no effect: answers are JSON, option.output_formatter chooses their shape",
            source=DJL,
        ),
    ] = None
    model_dir: Annotated[
        str | None,
        Option(
            "option.model_dir",
            "The model directory, as DJL Serving tells its handlers.",
            example="/opt/ml/model",
            effect="no effect: the directory is given on the command line",
            source=DJL,
        ),
    ] = None
    hf_access_token: Annotated[
        str | None,
        Option(
            "option.hf_access_token",
            "Token for private models of the Hugging Face hub, by Truss's name.",
            aliases=("option.hf_token",),
            example="HF_TOKEN",
            effect="no effect: set HF_TOKEN, a token does not belong into a model directory",
            source=TRUSS,
        ),
    ] = None
