"""Settings that only TensorRT-LLM's PyTorch backend has."""

from __future__ import annotations

from djl_trtllm.config.options.choices import Orchestrator
from djl_trtllm.config.options.documents import DJL, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class PyTorchOptions(OptionGroup):
    """Attention, graphs, statistics of the PyTorch backend."""

    attn_backend: str | None = option(
        None,
        "Attention kernels: TRTLLM, FLASHINFER, VANILLA, ...",
        example="TRTLLM",
        default_note="the engine's own",
        source=DJL,
    )
    moe_backend: str | None = option(
        None,
        "Kernels of mixture-of-experts layers: CUTLASS, TRTLLM, DEEPGEMM, WIDEEP, ...",
        example="CUTLASS",
        default_note="the engine's own",
        source=DJL,
    )
    use_cuda_graph: bool | None = option(
        None, "Run decoding steps as CUDA graphs.", example="true", default_note="the engine's own: on", source=DJL
    )
    enforce_eager: bool = option(
        False, "Run without CUDA graphs (ENABLE_CUDA_GRAPHS=false). `option.use_cuda_graph` overrides it.", source=DJL
    )
    cuda_graph_batch_sizes: tuple[int, ...] | None = option(
        None,
        "Batches for which CUDA graphs are recorded.",
        unit="sequences",
        at_least=1,
        example="1,2,4,8",
        default_note="chosen by the engine",
        source=TRTLLM,
    )
    cuda_graph_max_batch_size: int | None = option(
        None,
        "Largest batch for which a CUDA graph is recorded.",
        unit="sequences",
        at_least=1,
        example="128",
        default_note="128",
        source=TRTLLM,
    )
    cuda_graph_padding_enabled: bool = option(
        False, "Fill a batch up to the next recorded one.", aliases=("option.enable_padding",), source=TRTLLM
    )
    enable_autotuner: bool = option(True, "Choose kernels by trying them at start.", source=TRTLLM)
    enable_min_latency: bool = option(False, "Prefer latency over throughput (Llama 4).", source=TRTLLM)
    enable_iter_perf_stats: bool = option(
        True, "Gather statistics of iterations, for /metrics.", source=f"{TRTLLM}, with another default"
    )
    enable_iter_req_stats: bool = option(
        False, "Gather statistics of requests in every iteration; needs `option.enable_iter_perf_stats`.", source=TRTLLM
    )
    print_iter_log: bool = option(False, "Log every iteration.", source=TRTLLM)
    perf_metrics_max_requests: int = option(
        0, "Requests of which measurements are kept.", unit="requests", at_least=0, source=TRTLLM
    )
    garbage_collection_gen0_threshold: int = option(
        20000,
        "New objects after which the engine process looks for garbage.",
        unit="objects",
        at_least=1,
        source=TRTLLM,
    )
    checkpoint_format: str | None = option(
        None, "Format of the checkpoint.", example="HF", default_note="HF", source=TRTLLM
    )
    enable_fullgraph: bool = option(
        True,
        "Compile the model as one graph; only with torch.compile.",
        aliases=("option.torch_compile_fullgraph",),
        source=TRTLLM,
    )
    enable_inductor: bool = option(False, "Compile with torch's Inductor.", source=TRTLLM)
    enable_piecewise_cuda_graph: bool = option(False, "Record CUDA graphs for pieces of the model.", source=TRTLLM)
    disable_flashinfer_sampling: bool = option(False, "Sample without FlashInfer.", source=TRTLLM)
    max_stats_len: int = option(
        1000, "Statistics that are kept until somebody reads them.", unit="entries", at_least=1, source=TRTLLM
    )
    iter_stats_max_iterations: int | None = option(
        None,
        "Iterations of which statistics are kept.",
        unit="iterations",
        at_least=0,
        example="1000",
        default_note="the engine's own",
        source=DJL,
    )
    request_stats_max_iterations: int | None = option(
        None,
        "Iterations of which statistics per request are kept.",
        unit="iterations",
        at_least=0,
        example="1000",
        default_note="the engine's own",
        source=DJL,
    )
    return_perf_metrics: bool = option(False, "Return the engine's timings with every request.", source=TRTLLM)
    orchestrator_type: Orchestrator | None = option(
        None, "How the ranks of the engine talk to each other.", example="rpc", default_note="MPI", source=TRTLLM
    )
