"""How a model is spread over GPUs and machines."""

from __future__ import annotations

from typing import Literal

from djl_trtllm.config.options.choices import AllReduceStrategy, EmbeddingParallelMode
from djl_trtllm.config.options.documents import DJL, LMI, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class ParallelismOptions(OptionGroup):
    """Degrees of parallelism, and the communication between the parts."""

    tensor_parallel_degree: int | Literal["max"] = option(
        1,
        "GPUs over which each layer is split; `max` takes all GPUs of the machine (divided by the pipeline "
        "parallel degree). It must divide the number of attention heads, and divide that of keys and values or be a "
        "multiple of it.",
        aliases=(
            "option.tensor_parallel_size",
            "option.tp_size",
            "option.tensor_parallelism",
            "option.tensor_parallel_count",
        ),
        unit="GPUs",
        at_least=1,
        source=LMI,
    )
    pipeline_parallel_degree: int = option(
        1,
        "Groups of GPUs over which the layers are spread one after the other.",
        aliases=(
            "option.pipeline_parallel_size",
            "option.pp_size",
            "option.pipeline_parallelism",
            "option.pipeline_parallel_count",
        ),
        unit="groups",
        at_least=1,
        source=DJL,
    )
    pp_partition: tuple[int, ...] | None = option(
        None,
        "Layers of each group of `option.pipeline_parallel_degree`, in order: as many numbers as groups. For groups on "
        "GPUs of different size, or models whose first or last layers are larger.",
        unit="layers",
        at_least=1,
        example="20,20,20,20",
        default_note="as equal as possible",
        source=TRTLLM,
    )
    context_parallel_size: int = option(
        1, "GPUs over which one sequence is split.", unit="GPUs", at_least=1, source=DJL
    )
    moe_tensor_parallel_size: int | None = option(
        None,
        "GPUs over which each expert of a mixture-of-experts model is split.",
        unit="GPUs",
        at_least=1,
        example="1",
        default_note="chosen by the engine",
        source=DJL,
    )
    moe_expert_parallel_size: int | None = option(
        None,
        "GPUs over which the experts are spread, each whole.",
        unit="GPUs",
        at_least=1,
        example="1",
        default_note="chosen by the engine",
        source=DJL,
    )
    moe_cluster_parallel_size: int | None = option(
        None,
        "GPUs of one cluster that share an expert.",
        unit="GPUs",
        at_least=1,
        example="1",
        default_note="chosen by the engine",
        source=TRTLLM,
    )
    enable_attention_dp: bool = option(
        False, "Give each GPU its own requests for attention, and split only the rest of the model.", source=DJL
    )
    enable_lm_head_tp_in_adp: bool = option(
        False, "Split the output layer over the GPUs under attention data parallelism.", source=TRTLLM
    )
    embedding_parallel_mode: EmbeddingParallelMode = option(
        EmbeddingParallelMode.VOCABULARY, "How the embedding table is split over GPUs.", source=DJL
    )
    allreduce_strategy: AllReduceStrategy = option(
        AllReduceStrategy.AUTO, "Kernel that adds up the parts of a layer over GPUs.", source=TRTLLM
    )
    gpus_per_node: int | None = option(
        None,
        "GPUs of one machine.",
        unit="GPUs",
        at_least=1,
        example="8",
        default_note="those of this machine",
        source=TRTLLM,
    )
    num_nodes: int = option(
        1,
        "Machines over which one model is spread. The server is started on the first, and trtllm-llmapi-launch "
        "starts the ranks on all of them.",
        unit="machines",
        at_least=1,
        source=TRITON,
    )
    cluster_size: int = option(
        1,
        "Machines over which DJL Serving spreads one model (DJL_CLUSTER_SIZE); means what `option.num_nodes` does.",
        unit="machines",
        at_least=1,
        source=DJL,
    )
