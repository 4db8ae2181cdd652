"""How tokens are chosen: beams, drafts, grammars, log probabilities."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.choices import GuidedDecoding, SamplerType
from djl_trtllm.config.option import Option
from djl_trtllm.config.options.documents import DJL, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup


class DecodingOptions(OptionGroup):
    """What the engine has to know before the first request asks for it."""

    max_beam_width: Annotated[
        int,
        Option(
            "option.max_beam_width",
            "Most beams of one request.",
            unit="beams",
            at_least=1,
            tensorrt="BuildConfig.max_beam_width",
            pytorch="LLM(max_beam_width), when set",
            openvino="no effect: requests with beams are answered with an error",
            source=DJL,
        ),
    ] = 1
    normalize_log_probs: Annotated[
        bool,
        Option(
            "option.normalize_log_probs",
            "Divide the log probability of a beam by its length.",
            tensorrt="LLM(normalize_log_probs)",
            pytorch="no effect: a setting of the compiled engine",
            openvino="no effect: OpenVINO has no such setting",
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
            tensorrt="LLM(guided_decoding_backend)",
            pytorch="LLM(guided_decoding_backend)",
            openvino="no effect: OpenVINO brings its own",
            source=DJL,
        ),
    ] = None
    decoding_mode: Annotated[
        str | None,
        Option(
            "option.decoding_mode",
            "How Triton's backend chooses tokens: top_k, top_p, top_k_top_p, beam_search, medusa, redrafter, "
            "lookahead or eagle.",
            example="top_k_top_p",
            default_note="from the request's parameters",
            effect="no effect: sampling follows each request's parameters",
            source=TRITON,
        ),
    ] = None
    sampler_type: Annotated[
        SamplerType,
        Option(
            "option.sampler_type",
            "Implementation of sampling.",
            tensorrt="no effect: a setting of the PyTorch backend",
            pytorch="LLM(sampler_type)",
            openvino="no effect: OpenVINO has no such setting",
            source=TRTLLM,
        ),
    ] = SamplerType.AUTO
    max_draft_len: Annotated[
        int,
        Option(
            "option.max_draft_len",
            "Tokens a draft model may be ahead.",
            unit="tokens",
            at_least=0,
            effect="no effect: speculative decoding is not available yet",
            source=DJL,
        ),
    ] = 0
    draft_model_id: Annotated[
        str | None,
        Option(
            "option.draft_model_id",
            "Draft model for speculative decoding.",
            aliases=("option.speculative_draft_model",),
            example="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
            effect="no effect: speculative decoding is not available yet",
            source=DJL,
        ),
    ] = None
    spec_length: Annotated[
        int,
        Option(
            "option.spec_length",
            "Tokens a draft model is ahead.",
            unit="tokens",
            at_least=0,
            effect="no effect: speculative decoding is not available yet",
            source=DJL,
        ),
    ] = 0
    speculative_decoding_mode: Annotated[
        str | None,
        Option(
            "option.speculative_decoding_mode",
            "Kind of speculative decoding a compiled engine is made for.",
            example="lookahead_decoding",
            effect="no effect: speculative decoding is not available yet",
            source=TRTLLM,
        ),
    ] = None
    speculative_decoding_fast_logits: Annotated[
        bool,
        Option(
            "option.speculative_decoding_fast_logits",
            "Move a draft's logits between processes directly.",
            effect="no effect: speculative decoding is not available yet",
            source=TRITON,
        ),
    ] = False
    medusa_choices: Annotated[
        str | None,
        Option(
            "option.medusa_choices",
            "Tree of candidates of Medusa heads.",
            example="{0}, {0,0}, {1}",
            effect="no effect: speculative decoding is not available yet",
            source=TRITON,
        ),
    ] = None
    eagle_choices: Annotated[
        str | None,
        Option(
            "option.eagle_choices",
            "Tree of candidates of EAGLE.",
            example="{0}, {0,0}, {1}",
            effect="no effect: speculative decoding is not available yet",
            source=TRITON,
        ),
    ] = None
    lookahead_window_size: Annotated[
        int | None,
        Option(
            "option.lookahead_window_size",
            "Window of lookahead decoding.",
            unit="tokens",
            at_least=1,
            example="4",
            effect="no effect: speculative decoding is not available yet",
            source=TRITON,
        ),
    ] = None
    lookahead_ngram_size: Annotated[
        int | None,
        Option(
            "option.lookahead_ngram_size",
            "Length of the n-grams of lookahead decoding.",
            unit="tokens",
            at_least=1,
            example="4",
            effect="no effect: speculative decoding is not available yet",
            source=TRITON,
        ),
    ] = None
    lookahead_verification_set_size: Annotated[
        int | None,
        Option(
            "option.lookahead_verification_set_size",
            "Candidates that lookahead decoding verifies.",
            unit="candidates",
            at_least=1,
            example="4",
            effect="no effect: speculative decoding is not available yet",
            source=TRITON,
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Option(
            "option.reasoning_parser",
            "Parser that tells thoughts from the answer.",
            example="deepseek-r1",
            effect="no effect: the text is given out as it is",
            source=TRTLLM,
        ),
    ] = None
    exclude_input_in_output: Annotated[
        bool,
        Option(
            "option.exclude_input_in_output",
            "Leave the prompt out of Triton's output.",
            effect="no effect: the prompt is given out when the request asks for it (return_full_text)",
            source=TRITON,
        ),
    ] = False
    skip_special_tokens: Annotated[
        bool,
        Option(
            "option.skip_special_tokens",
            "Leave special tokens out of the text.",
            effect="no effect: chosen per request (skip_special_tokens), true when it does not say",
            source=TRITON,
        ),
    ] = True
    add_special_tokens: Annotated[
        bool,
        Option(
            "option.add_special_tokens",
            "Begin prompts with the tokenizer's special tokens.",
            effect="no effect: the tokenizer's own setting counts",
            source=TRITON,
        ),
    ] = True
    accumulate_tokens: Annotated[
        bool,
        Option(
            "option.accumulate_tokens",
            "Send the whole text so far in each message of a Triton stream.",
            effect="no effect: streams hold what is new",
            source=TRITON,
        ),
    ] = False
