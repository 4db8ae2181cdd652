"""How tokens are chosen: beams, drafts, grammars, log probabilities."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.options.choices import GuidedDecoding, SamplerType
from djl_trtllm.config.options.documents import DJL, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option


class DecodingOptions(OptionGroup):
    """What the engine has to know before the first request asks for it."""

    max_beam_width: Annotated[
        int,
        Option(
            "option.max_beam_width",
            "Most beams of one request.",
            unit="beams",
            at_least=1,
            source=DJL,
        ),
    ] = 1
    normalize_log_probs: Annotated[
        bool,
        Option(
            "option.normalize_log_probs",
            "Divide the log probability of a beam by its length.",
            source=DJL,
        ),
    ] = False
    guided_decoding_backend: Annotated[
        GuidedDecoding | None,
        Option(
            "option.guided_decoding_backend",
            "Library that holds output to a grammar or a JSON schema, `none` for none. Without one, requests with a "
            "guide are answered with an error.",
            example="xgrammar",
            default_note="xgrammar; none on AutoDeploy, and on the PyTorch backend of TensorRT-LLM 1.0",
            source=DJL,
        ),
    ] = None
    sampler_type: Annotated[
        SamplerType,
        Option(
            "option.sampler_type",
            "Implementation of sampling.",
            source=TRTLLM,
        ),
    ] = SamplerType.AUTO
