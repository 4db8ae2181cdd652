"""How tokens are chosen: beams, drafts, grammars, log probabilities."""

from __future__ import annotations

from djl_trtllm.config.options.choices import GuidedDecoding, SamplerType
from djl_trtllm.config.options.documents import DJL, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class DecodingOptions(OptionGroup):
    """What the engine has to know before the first request asks for it."""

    max_beam_width: int = option(1, "Most beams of one request.", unit="beams", at_least=1, source=DJL)
    normalize_log_probs: bool = option(False, "Divide the log probability of a beam by its length.", source=DJL)
    guided_decoding_backend: GuidedDecoding | None = option(
        None,
        "Library that holds output to a grammar or a JSON schema, `none` for none. Without one, requests with a "
        "guide are answered with an error.",
        example="xgrammar",
        default_note="xgrammar; none on AutoDeploy, and on the PyTorch backend of TensorRT-LLM 1.0",
        source=DJL,
    )
    sampler_type: SamplerType = option(SamplerType.AUTO, "Implementation of sampling.", source=TRTLLM)
