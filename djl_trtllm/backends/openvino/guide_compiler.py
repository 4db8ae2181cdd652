"""Compiles guides with OpenVINO GenAI, outside the pipeline that serves.

OpenVINO GenAI compiles a guide in the first `step()` of its request. Other requests wait for it, and its error ends the
pipeline. It has no call that only compiles; so here a model without weights generates a token. What it compiles is
cached in the tokenizer: a pipeline with the same tokenizer and vocabulary finds it there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino_genai import GenerationConfig, LLMPipeline, StructuredOutputConfig, Tokenizer

from djl_trtllm.backends.openvino.engine_files import MODEL_XML
from djl_trtllm.backends.openvino.json_grammar import any_object, grammar_of
from djl_trtllm.request import Guide, GuideKind


def structured_output(guide: Guide) -> StructuredOutputConfig:
    """The guide as OpenVINO GenAI's configuration."""
    if guide.kind is GuideKind.REGEX:
        return StructuredOutputConfig(regex=guide.value)
    if guide.kind is GuideKind.GRAMMAR:
        return StructuredOutputConfig(grammar=guide.value)
    grammar = any_object() if guide.kind is GuideKind.JSON_OBJECT else grammar_of(guide.value)
    if grammar is None:
        return StructuredOutputConfig(json_schema=guide.value)
    return StructuredOutputConfig(grammar=grammar)


class GuideCompiler:
    """`vocabulary` is how many logits the served model has for a token: a tokenizer has a cache for one number only."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_id: int = tokenizer.get_eos_token_id()
        xml, weights = _blank_model(vocabulary)
        self._pipeline = LLMPipeline(xml, weights, tokenizer, "CPU", ATTENTION_BACKEND="SDPA", INFERENCE_NUM_THREADS=1)

    def compile(self, guide: Guide, tokens: int = 1) -> None:
        """Compile, and generate random `tokens` of the guide. Raises RuntimeError. Runs without the GIL."""
        config = GenerationConfig()
        config.max_new_tokens = tokens
        config.do_sample = tokens > 1
        config.structured_output_config = structured_output(guide)
        config.set_eos_token_id(self._end_id)
        self._pipeline.generate(ov.Tensor(np.array([[0]], dtype=np.int64)), config)

    def forget(self) -> None:
        """Free what was compiled. Call it while no pipeline with the same tokenizer runs."""
        # Another number of logits replaces the cache.
        GuideCompiler(self._tokenizer, self._vocabulary + 1).compile(Guide(GuideKind.REGEX, "a"))


def read_vocabulary(engine_dir: Path) -> int:
    """How many logits an engine's model has for a token."""
    shape = ov.Core().read_model(engine_dir / MODEL_XML).outputs[0].partial_shape
    return int(shape[shape.rank.get_length() - 1].get_length())


def _blank_model(vocabulary: int) -> tuple[str, ov.Tensor]:
    """A language model whose logits are all 0: its IR and its weights."""
    inputs = {
        name: ops.parameter([-1] * rank, dtype, name=name)
        for name, rank, dtype in (
            ("input_ids", 2, np.int64),
            ("attention_mask", 2, np.int64),
            ("position_ids", 2, np.int64),
            ("beam_idx", 1, np.int32),
        )
    }
    for name, node in inputs.items():
        node.output(0).set_names({name})
    ids = ops.convert(ops.unsqueeze(inputs["input_ids"], ops.constant(np.array([2]))), "f32")
    logits = ops.multiply(ids, ops.constant(np.zeros((1, 1, vocabulary), np.float32)))
    logits.output(0).set_names({"logits"})
    model = ov.Model([ops.result(logits)], list(inputs.values()), "blank")
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / MODEL_XML
        ov.save_model(model, xml, compress_to_fp16=False)
        return xml.read_text(), ov.Tensor(np.fromfile(xml.with_suffix(".bin"), dtype=np.uint8))
