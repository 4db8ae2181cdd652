"""How tokens are chosen: beams, drafts, grammars, log probabilities."""

from __future__ import annotations

from djl_trtllm.config.options.choices import GuidedDecoding, IgnoredSeed, SamplerType
from djl_trtllm.config.options.documents import DJL, OURS, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class DecodingOptions(OptionGroup):
    """What the engine has to know before the first request asks for it."""

    max_beam_width: int = option(
        1,
        "Most beams of one request; on the PyTorch backend of TensorRT-LLM, the beams of every request.",
        unit="beams",
        at_least=1,
        source=DJL,
    )
    normalize_log_probs: bool = option(False, "Divide the log probability of a beam by its length.", source=DJL)
    guided_decoding_backend: GuidedDecoding | None = option(
        None,
        "Library that holds output to a grammar or a JSON schema, `none` for none. Without one, requests with a "
        "guide are answered with an error. A grammar is EBNF for xgrammar, Lark's for llguidance.",
        example="xgrammar",
        default_note="xgrammar; none on AutoDeploy, and on the PyTorch backend of TensorRT-LLM 1.0",
        source=DJL,
    )
    stop_in_engine: bool | None = option(
        None,
        "Whether the engine ends a sequence at a stop string or a stop token id. If not, the server finds both and "
        "cancels the sequence in the engine, which costs an iteration or two. TensorRT-LLM 0.20 and 0.21 lose host "
        "memory with each request that has one (TensorRT-LLM #5509). Beam search is always ended by the engine.",
        example="false",
        default_note="true; false on TensorRT-LLM before 1.0",
        source=OURS,
    )
    sampler_type: SamplerType = option(SamplerType.AUTO, "Implementation of sampling.", source=TRTLLM)
    ignored_seed: IgnoredSeed = option(
        IgnoredSeed.REFUSE,
        "What happens to a sampled request with a `seed` if the engine's sampler ignores seeds, as on the PyTorch "
        "backend of TensorRT-LLM 1.2: `refuse` it, or answer it with the response header `Warning`.",
        effect="refuses seeds that the engine ignores, or warns of them",
        source=OURS,
    )
