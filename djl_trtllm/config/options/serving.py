"""How requests for one model are queued, timed, answered and recovered."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.config.options.choices import ReasoningFormat, ToolCallFormat, UnknownParameters
from djl_trtllm.config.options.option import DJL, OURS, OptionGroup, amount, count, option, unset


class ServingOptions(OptionGroup, name="serving", heading="Serving one model", source=OURS):
    """Queue, timeouts, response format, recovery."""

    job_queue_size: int = option(
        1000,
        "Requests that may wait for a place in the batch. One more is refused at once with 503.",
        key="job_queue_size",
        **count("requests"),
        effect="bound of the waiting queue",
        source=DJL,
    )
    predict_timeout: float = option(
        240.0,
        "Longest time from the arrival of a request to its last token. Then it is cancelled and answered with a "
        "timeout.",
        **amount("seconds"),
        effect="deadline of a request",
        source=f"{DJL} (its container's value)",
    )
    model_loading_timeout: float = option(
        1200.0,
        "Longest time until the model is ready; compiling an engine is not included, compiling kernels at their first "
        "use is. Also the longest silence of a running TensorRT-LLM below which a compiler of kernels runs.",
        **amount("seconds"),
        effect="deadline of loading the engine",
        source=f"{DJL} (its container's value)",
    )
    stream_write_timeout: float = option(
        30.0,
        "Cancel a request whose client does not read its stream for this time, so that its place becomes free.",
        **amount("seconds"),
        effect="longest wait for one write to a client",
    )
    executor_hang_timeout: float = option(
        60.0,
        "Replace an engine process that is busy and does not respond for this time. While TensorRT-LLM compiles "
        "kernels, `option.model_loading_timeout` is the limit.",
        **amount("seconds"),
        effect="bound of the engine process's silence while requests run",
    )
    retry_threshold: int = option(
        3,
        "How many engine processes may fail within ten minutes before the model fails: those that do not start, and "
        "those that end before they have done anything. Those that have worked are replaced and do not count, nor do "
        "those that a guilty request explains (docs/troubleshooting.md). A failed model is started again after 30 "
        "seconds, then after twice as long each time, up to ten minutes. With 0, DJL Serving's default, any loss fails "
        "the model for good, and a single crash needs a new container.",
        key="retry_threshold",
        unit="engine processes",
        at_least=0,
        effect="when a model with failing engine processes fails",
        source=f"{DJL}, with another default",
    )
    resume_after_restart: bool = option(
        True,
        "Continue running requests in the engine process that replaces a dead or hung one: prompt and generated tokens "
        "become the new prompt, and the response goes on. Requests with penalties, a guide, beams, excluded words or "
        "an unreached minimum length get an error instead. Requests that only wait stay in the queue either way.",
        effect="running requests survive the engine process",
    )
    executor_memory_limit: float | None = unset(
        "Recycle the engine process when it and its children have more resident memory than this: another one is "
        "started beside it where there is memory for both (not on GPUs), else when its requests have ended. No "
        "request fails.",
        aliases=("option.host_memory_limit", "host_memory_limit"),
        **amount("GB"),
        example="24",
        effect="resident memory at which the engine process is recycled",
    )
    executor_max_requests: int | None = unset(
        "Recycle the engine process after this number of requests, as `option.executor_memory_limit` does.",
        aliases=("option.host_max_requests", "host_max_requests"),
        **count("requests"),
        example="1000000",
        effect="requests after which the engine process is recycled",
    )
    chat_template_timeout: float = option(
        10.0,
        "Longest time that the model's chat template may take for one request. A template is a program that comes with "
        "the model; one that takes longer is given up, and its request is refused.",
        **amount("seconds"),
        effect="deadline of rendering a conversation",
    )
    output_formatter: str | None = unset(
        "Shape of responses: `json`, `jsonlines`, `sse`, `json_chat`, `jsonlines_chat`, `sse_chat`, `3p`, "
        "`3p_stream`, `none`, or the name of a formatter of the model's own `model.py`. A request's "
        "`output_formatter` parameter comes first.",
        example="jsonlines",
        default_note="json; streams: jsonlines, or sse with tgi_compat",
        effect="response formatter",
        source=DJL,
    )
    tool_call_parser: ToolCallFormat = option(
        ToolCallFormat.AUTO,
        "How the model writes tool calls, for requests with `tools` in OpenAI's API: `hermes` (Hermes, Qwen), "
        "`llama3_json`, `mistral`, or `none`: the text is returned as it is. `auto` recognises the format from the "
        "model's chat template.",
        value_aliases={"qwen3": "hermes", "qwen": "hermes"},
        effect="parser of tool calls",
        source="LMI (vLLM), and TensorRT-LLM's server",
    )
    reasoning_parser: ReasoningFormat = option(
        ReasoningFormat.AUTO,
        "How the model writes its reasoning, which OpenAI's API returns as `reasoning_content`: `qwen3` (between "
        "`<think>` and `</think>`), `deepseek_r1` (the output begins with reasoning, even without the tag), or `none`: "
        "the text is returned as it is. `auto` is `qwen3` if the model's chat template has `</think>`.",
        value_aliases={"deepseek-r1": "deepseek_r1"},
        effect="parser of reasoning",
        source="LMI (vLLM), and TensorRT-LLM's server",
    )
    tgi_compat: bool = option(
        False,
        "Answer as Text Generation Inference does: lists around results, details on, server-sent events.",
        effect="response schema",
        source=DJL,
    )
    bedrock_compat: bool = option(
        False,
        "Read and answer the schema of Bedrock's Llama models (`prompt`, `max_gen_len`, `generation`).",
        effect="request and response schema",
        source=DJL,
    )
    unknown_parameters: UnknownParameters = option(
        UnknownParameters.REFUSE,
        "What happens to a request with a field or parameter that is not known: `refuse` it, or ignore the field and "
        "name it in the response header `Warning`, and once in the log. A known field in the wrong place is refused "
        "either way.",
        effect="refuses unknown fields of requests, or warns of them",
    )
    strict: bool = option(
        False, "Treat options that are not known as errors instead of warnings.", effect="unknown options are errors"
    )
    enable_stateful_sessions: bool = option(
        False,
        "Serve SageMaker's stateful sessions: a client opens one, names it in its requests, and closes it.",
        effect="serves sessions; without it, requests that name one are refused",
        source=DJL,
    )
    sessions_expiration: float = option(
        1200.0,
        "Time from the creation of a session to its end.",
        **amount("seconds"),
        effect="end of a session",
        source=DJL,
    )
    sessions_path: Path | None = unset(
        "Folder in which every session has a folder, for the model's own `model.py`. The sessions that it has are "
        "continued after a restart.",
        example="/var/run/sessions",
        default_note="sagemaker_sessions in /dev/shm, or in the folder for temporary files",
        effect="folder of the sessions' folders",
        source=DJL,
    )
    max_sessions: int = option(
        2000,
        "Sessions that may be open at a time. One more is refused with 503. A client may have as many as are still "
        "free after it: half of them, if no other client has one.",
        **count("sessions"),
        effect="bound of the open sessions",
    )
