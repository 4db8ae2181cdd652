"""Settings that only TensorRT-LLM's PyTorch backend has."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.options.choices import Orchestrator
from djl_trtllm.config.options.documents import DJL, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option


class PyTorchOptions(OptionGroup):
    """Attention, graphs, statistics of the PyTorch backend."""

    attn_backend: Annotated[
        str | None,
        Option(
            "option.attn_backend",
            "Attention kernels: TRTLLM, FLASHINFER, VANILLA, ...",
            example="TRTLLM",
            default_note="the engine's own",
            source=DJL,
        ),
    ] = None
    moe_backend: Annotated[
        str | None,
        Option(
            "option.moe_backend",
            "Kernels of mixture-of-experts layers: CUTLASS, TRTLLM, DEEPGEMM, WIDEEP, ...",
            example="CUTLASS",
            default_note="the engine's own",
            source=DJL,
        ),
    ] = None
    use_cuda_graph: Annotated[
        bool | None,
        Option(
            "option.use_cuda_graph",
            "Run decoding steps as CUDA graphs.",
            example="true",
            default_note="the engine's own: on",
            source=DJL,
        ),
    ] = None
    enforce_eager: Annotated[
        bool,
        Option(
            "option.enforce_eager",
            "Run without CUDA graphs (ENABLE_CUDA_GRAPHS=false). `option.use_cuda_graph` overrides it.",
            source=DJL,
        ),
    ] = False
    cuda_graph_batch_sizes: Annotated[
        tuple[int, ...] | None,
        Option(
            "option.cuda_graph_batch_sizes",
            "Batches for which CUDA graphs are recorded.",
            unit="sequences",
            at_least=1,
            example="1,2,4,8",
            default_note="chosen by the engine",
            source=TRTLLM,
        ),
    ] = None
    cuda_graph_max_batch_size: Annotated[
        int | None,
        Option(
            "option.cuda_graph_max_batch_size",
            "Largest batch for which a CUDA graph is recorded.",
            unit="sequences",
            at_least=1,
            example="128",
            default_note="128",
            source=TRTLLM,
        ),
    ] = None
    cuda_graph_padding_enabled: Annotated[
        bool,
        Option(
            "option.cuda_graph_padding_enabled",
            "Fill a batch up to the next recorded one.",
            aliases=("option.enable_padding",),
            source=TRTLLM,
        ),
    ] = False
    enable_autotuner: Annotated[
        bool,
        Option(
            "option.enable_autotuner",
            "Choose kernels by trying them at start.",
            source=TRTLLM,
        ),
    ] = True
    enable_min_latency: Annotated[
        bool,
        Option(
            "option.enable_min_latency",
            "Prefer latency over throughput (Llama 4).",
            source=TRTLLM,
        ),
    ] = False
    enable_iter_perf_stats: Annotated[
        bool,
        Option(
            "option.enable_iter_perf_stats",
            "Gather statistics of iterations, for /metrics.",
            source=f"{TRTLLM}, with another default",
        ),
    ] = True
    enable_iter_req_stats: Annotated[
        bool,
        Option(
            "option.enable_iter_req_stats",
            "Gather statistics of requests in every iteration; needs `option.enable_iter_perf_stats`.",
            source=TRTLLM,
        ),
    ] = False
    print_iter_log: Annotated[
        bool,
        Option(
            "option.print_iter_log",
            "Log every iteration.",
            source=TRTLLM,
        ),
    ] = False
    perf_metrics_max_requests: Annotated[
        int,
        Option(
            "option.perf_metrics_max_requests",
            "Requests of which measurements are kept.",
            unit="requests",
            at_least=0,
            source=TRTLLM,
        ),
    ] = 0
    garbage_collection_gen0_threshold: Annotated[
        int,
        Option(
            "option.garbage_collection_gen0_threshold",
            "New objects after which the engine process looks for garbage.",
            unit="objects",
            at_least=1,
            source=TRTLLM,
        ),
    ] = 20000
    checkpoint_format: Annotated[
        str | None,
        Option(
            "option.checkpoint_format",
            "Format of the checkpoint.",
            example="HF",
            default_note="HF",
            source=TRTLLM,
        ),
    ] = None
    enable_fullgraph: Annotated[
        bool,
        Option(
            "option.enable_fullgraph",
            "Compile the model as one graph; only with torch.compile.",
            aliases=("option.torch_compile_fullgraph",),
            source=TRTLLM,
        ),
    ] = True
    enable_inductor: Annotated[
        bool,
        Option(
            "option.enable_inductor",
            "Compile with torch's Inductor.",
            source=TRTLLM,
        ),
    ] = False
    enable_piecewise_cuda_graph: Annotated[
        bool,
        Option(
            "option.enable_piecewise_cuda_graph",
            "Record CUDA graphs for pieces of the model.",
            source=TRTLLM,
        ),
    ] = False
    disable_flashinfer_sampling: Annotated[
        bool,
        Option(
            "option.disable_flashinfer_sampling",
            "Sample without FlashInfer.",
            source=TRTLLM,
        ),
    ] = False
    max_stats_len: Annotated[
        int,
        Option(
            "option.max_stats_len",
            "Statistics that are kept until somebody reads them.",
            unit="entries",
            at_least=1,
            source=TRTLLM,
        ),
    ] = 1000
    iter_stats_max_iterations: Annotated[
        int | None,
        Option(
            "option.iter_stats_max_iterations",
            "Iterations of which statistics are kept.",
            unit="iterations",
            at_least=0,
            example="1000",
            default_note="the engine's own",
            source=DJL,
        ),
    ] = None
    request_stats_max_iterations: Annotated[
        int | None,
        Option(
            "option.request_stats_max_iterations",
            "Iterations of which statistics per request are kept.",
            unit="iterations",
            at_least=0,
            example="1000",
            default_note="the engine's own",
            source=DJL,
        ),
    ] = None
    return_perf_metrics: Annotated[
        bool,
        Option(
            "option.return_perf_metrics",
            "Return the engine's timings with every request.",
            source=TRTLLM,
        ),
    ] = False
    orchestrator_type: Annotated[
        Orchestrator | None,
        Option(
            "option.orchestrator_type",
            "How the ranks of the engine talk to each other.",
            example="rpc",
            default_note="MPI",
            source=TRTLLM,
        ),
    ] = None
