"""Guides on OpenVINO: as grammars, compiled where the engine finds them, and tried by a program of the gate.

OpenVINO GenAI compiles a guide in the first `step()` of its request. Other requests wait for it, and its error ends the
pipeline. So a guide is tried in a process (`python -m djl_trtllm.backends.openvino.guides FD ENGINE_DIR`), compiled in
a thread if it can be used, and only then does its request reach the pipeline, which finds the compiled guide.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino_genai import GenerationConfig, LLMPipeline, StructuredOutputConfig, Tokenizer

from djl_trtllm.backends.json_grammar import SchemaError, as_grammar
from djl_trtllm.backends.openvino.compile import LANGUAGE_MODEL_XML, MODEL_XML, takes_images
from djl_trtllm.executor.guides import Key, Trial, Verdict, keywords_left_out, reason_of, serve_trials
from djl_trtllm.request import Guide, GuideKind

_MOST_COMPILED = 256
"""Guides that stay compiled. Each takes about 100 KB, and the engine itself forgets none."""
_TOKENS = 16
_AGAIN_SECONDS = 0.25
"""Processor time for a compiled guide: the engine spends it again in the first step of each sequence."""
_TOKEN_SECONDS = 0.1

# -- compiling ---------------------------------------------------------------------------------------------------------


class GuideCompiler:
    """Compiles guides outside the pipeline that serves. OpenVINO GenAI has no call that only compiles.

    So a model without weights generates a token. What it compiles is cached in the tokenizer, for one number of logits
    (`vocabulary`): a pipeline with the same tokenizer and as many logits finds it there.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_id: int = tokenizer.get_eos_token_id()
        xml, weights = _blank_model(vocabulary)
        self._pipeline = LLMPipeline(xml, weights, tokenizer, "CPU", ATTENTION_BACKEND="SDPA", INFERENCE_NUM_THREADS=1)

    def compile(self, guide: Guide, tokens: int = 1) -> None:
        """Compile a guide, and generate `tokens` random tokens of it, without the GIL. Raises RuntimeError."""
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
    """Return the number of logits that an engine's model has for a token."""
    model = LANGUAGE_MODEL_XML if takes_images(engine_dir) else MODEL_XML
    shape = ov.Core().read_model(engine_dir / model).outputs[0].partial_shape
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


class CompiledGuides:
    """Compiles guides one at a time in a thread: the gate's `Prepare`. `make_compiler` is called in that thread."""

    def __init__(self, make_compiler: Callable[[], GuideCompiler]) -> None:
        self._make_compiler = make_compiler
        self._compiler: GuideCompiler | None = None
        self._thread = ThreadPoolExecutor(1, "guide-compiler")
        self._compiling: tuple[Key, Future[None]] | None = None
        self._problems: dict[Key, str] = {}
        """Problems of guides that were compiled; "" if a guide has none."""

    def __call__(self, key: Key, guide: Guide) -> str | None:
        """Return the problem of a compiled guide, "" for none; None for another guide, which is now compiled."""
        if self._compiling is not None and self._compiling[1].done():
            compiled, future = self._compiling
            error = future.exception()
            self._problems[compiled] = "" if error is None else str(error) or type(error).__name__
            self._compiling = None
        if key in self._problems or self._compiling is not None:
            return self._problems.get(key)
        if len(self._problems) >= _MOST_COMPILED and self._compiler is not None:
            # Between two steps and while nothing compiles: the tokenizer's cache has no lock of its own.
            self._compiler.forget()
            self._problems.clear()
        self._compiling = key, self._thread.submit(self._compile, guide)
        return None

    def _compile(self, guide: Guide) -> None:
        if self._compiler is None:
            self._compiler = self._make_compiler()
        self._compiler.compile(guide)


# -- the program of the gate -------------------------------------------------------------------------------------------


def try_guide(compiler: GuideCompiler, guide: Guide) -> Verdict:
    """Compile a guide as the engine does, and generate tokens of it."""
    try:
        guide, not_followed = as_grammar(guide)
        compiler.compile(guide)
        began = time.process_time()  # other processes do not make a guide slower
        compiler.compile(guide)
        again = time.process_time() - began
        compiler.compile(guide, _TOKENS)
        of_token = (time.process_time() - began - 2 * again) / _TOKENS
    except SchemaError as error:
        return Verdict(str(error))
    except RuntimeError as error:
        return Verdict(reason_of(str(error)))
    if again > _AGAIN_SECONDS:
        return Verdict(f"it is too large: each sequence would stop the others for {again:.2f} seconds")
    if of_token > _TOKEN_SECONDS:
        return Verdict(f"it is too complex: each token would take {of_token:.2f} seconds")
    return keywords_left_out(not_followed, strict=guide.strict)


def _make_trial(engine_dir: Path) -> Trial:
    compiler = GuideCompiler(Tokenizer(str(engine_dir)), read_vocabulary(engine_dir))
    return lambda guide: try_guide(compiler, guide)


def structured_output(guide: Guide) -> StructuredOutputConfig:
    """The guide as OpenVINO GenAI's configuration. Raises SchemaError."""
    if guide.kind is GuideKind.REGEX:
        return StructuredOutputConfig(regex=guide.value)
    return StructuredOutputConfig(grammar=as_grammar(guide)[0].value)


if __name__ == "__main__":
    serve_trials(_make_trial, sys.argv)
