"""How requests for one model are queued, timed, answered and recovered."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.options.documents import DJL, OURS
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option


class ServingOptions(OptionGroup):
    """Queue, timeouts, response format, recovery."""

    job_queue_size: Annotated[
        int,
        Option(
            "job_queue_size",
            "Requests that may wait for a place in the batch. One more is refused at once with 503.",
            unit="requests",
            at_least=1,
            effect="bound of the waiting queue",
            source=DJL,
        ),
    ] = 1000
    predict_timeout: Annotated[
        float,
        Option(
            "option.predict_timeout",
            "Longest time from the arrival of a request to its last token. Then it is cancelled and answered with a "
            "timeout.",
            unit="seconds",
            above=0,
            effect="deadline of a request",
            source=f"{DJL} (its container's value)",
        ),
    ] = 240.0
    model_loading_timeout: Annotated[
        float,
        Option(
            "option.model_loading_timeout",
            "Longest time until the model is ready; compiling not included.",
            unit="seconds",
            above=0,
            effect="deadline of loading the engine",
            source=f"{DJL} (its container's value)",
        ),
    ] = 1200.0
    stream_write_timeout: Annotated[
        float,
        Option(
            "option.stream_write_timeout",
            "A client that does not read its stream for so long is cancelled, so that it holds no place in the batch.",
            unit="seconds",
            above=0,
            effect="longest wait for one write to a client",
            source=OURS,
        ),
    ] = 30.0
    executor_hang_timeout: Annotated[
        float,
        Option(
            "option.executor_hang_timeout",
            "An engine process that is busy and silent for so long is taken for hung and replaced.",
            unit="seconds",
            above=0,
            effect="bound of the engine process's silence while requests run",
            source=OURS,
        ),
    ] = 60.0
    retry_threshold: Annotated[
        int,
        Option(
            "retry_threshold",
            "How many times a dead or hung engine process is replaced before the model is failed. DJL "
            "Serving's default is 0, with which a single crash needs a new container; three replacements ride out a "
            "crash and still end a crash loop.",
            unit="replacements",
            at_least=0,
            effect="replacements of the engine process",
            source=f"{DJL}, with another default",
        ),
    ] = 3
    output_formatter: Annotated[
        str | None,
        Option(
            "option.output_formatter",
            "Shape of responses: `json`, `jsonlines`, `sse`, `json_chat`, `jsonlines_chat`, `sse_chat`, `3p`, "
            "`3p_stream`, `none`, or the name of a formatter of the model's own `model.py`. A request's "
            "`output_formatter` parameter comes first.",
            example="jsonlines",
            default_note="json; streams: jsonlines, or sse with tgi_compat",
            effect="response formatter",
            source=DJL,
        ),
    ] = None
    tgi_compat: Annotated[
        bool,
        Option(
            "option.tgi_compat",
            "Answer as Text Generation Inference does: lists around results, details on, server-sent events.",
            effect="response schema",
            source=DJL,
        ),
    ] = False
    bedrock_compat: Annotated[
        bool,
        Option(
            "option.bedrock_compat",
            "Read and answer the schema of Bedrock's Llama models (`prompt`, `max_gen_len`, `generation`).",
            effect="request and response schema",
            source=DJL,
        ),
    ] = False
    strict: Annotated[
        bool,
        Option(
            "option.strict",
            "Treat options that are not known as errors instead of warnings.",
            effect="unknown options are errors",
            source=OURS,
        ),
    ] = False
