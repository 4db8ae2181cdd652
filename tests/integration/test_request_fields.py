"""Every field of a request, from the HTTP body to the engine's own arguments: it arrives, or is refused by name."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
import pytest

from djl_trtllm.api.dialects.lmi import dialect as lmi
from djl_trtllm.backends.openvino.executor import (
    FEATURES as OPENVINO_FEATURES,
    GUIDES as OPENVINO_GUIDES,
    generation_config,
)
from djl_trtllm.backends.scripted.executor import ScriptedExecutor
from djl_trtllm.backends.tensorrt_llm.names import members
from djl_trtllm.backends.tensorrt_llm.sampling import find_sampler
from djl_trtllm.batching.admission import BatchLimits, supported
from djl_trtllm.batching.rolling_batch import RollingBatch
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.errors import UnsupportedParameterError
from djl_trtllm.executor.protocol import Deframer, Feature, Limits, Submit, Try, decode_to_engine, frame
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import Adapter, GenerationRequest, Sampling
from tests.backends.tensorrt_llm.kit import MakeEngine

PROMPT = "the little red riding hood"
ENGINES = ("openvino", "scripted", "tensorrt", "pytorch")
VERSION = "1.2.1"


# Of each field the request body's parameters, and the arguments that each engine gets for them; null: it refuses them.
# TensorRT-LLM samples where it gets a temperature. Its TorchSampler of this version ignores seeds and penalties.
CASES: dict[str, dict[str, dict[str, Any] | None]] = json.loads(
    Path(__file__).with_name("request_fields.json").read_text()
)
DONE_BY_THE_SERVER: dict[str, dict[str, Any]] = {
    "n": {"n": 3, "do_sample": True},
    "best_of": {"best_of": 3, "do_sample": True},
    "truncate": {"truncate": 2},
    "stop": {"stop_sequences": ["little"]},
}
READ_BY_OPENAI = ("top_logprobs", "prompt_logprobs")
"""Fields that LMI's parameters do not have; tests/api/requests.json has how OpenAI's are read."""
NOT_PARAMETERS = {"prompt", "prompt_ids", "messages", "template", "sampling", "default_new_tokens"} | {
    "shown_tokens",
    "guide_from",
    "prompt_only",
    "priority",
    "images",
    "thinking",
    "pooling",
    "pair",
}
PART_OF_LOGPROBS = {"asks_logprobs", "needs_logprobs"}


class Recorder:
    """An executor that keeps what it gets, as the socket brings it."""

    limits = Limits(8, 0, 32, 1000)

    def __init__(self) -> None:
        self.submitted: list[Submit] = []

    def submit(self, request: Submit) -> None:
        (body,) = Deframer().feed(frame(request))
        message = decode_to_engine(body)
        assert isinstance(message, Submit)
        self.submitted.append(message)

    def try_guide(self, trial: Try) -> None: ...

    def cancel(self, request_id: int) -> None: ...


def submitted(tokenizer: Tokenizer, features: frozenset[str], parameters: dict[str, Any]) -> list[Submit]:
    """What an engine process gets for a request body. Raises UnsupportedParameterError."""
    given = {name: value for name, value in parameters.items() if name in READ_BY_OPENAI}
    parameters = {name: value for name, value in parameters.items() if name not in READ_BY_OPENAI}
    body = json.loads(json.dumps({"inputs": PROMPT, "parameters": parameters}))
    (request,) = lmi.parse_payload(body).requests
    request = msgspec.structs.replace(request, **given)
    request = supported(request, Recorder.limits, features)
    recorder = Recorder()
    batch = RollingBatch(recorder, tokenizer, BatchLimits(8, 8, 500, 500, 1000), Statistics())
    batch.admit(request.sampling.sequences)
    adapter = None if request.adapter is None else Adapter(request.adapter, 3, "adapters/french")
    batch.submit(request, tokenizer.encode(PROMPT), lambda chunk: None, adapter)
    return recorder.submitted


class Engine(NamedTuple):
    features: frozenset[str]
    arguments: Callable[[Submit], dict[str, Any]]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Engine]:
    """Each engine's features, and what it makes of a message."""
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [])
    if find_spec("torch") is None:
        torch = module_from_spec(ModuleSpec("torch", None))
        vars(torch).update(zeros=np.zeros, tensor=np.array, float32=np.float32)
        monkeypatch.setitem(sys.modules, "torch", torch)
    make = MakeEngine(monkeypatch)

    def openvino(message: Submit) -> dict[str, Any]:
        config = generation_config(message)
        given = {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}
        more = {"structured_output_config": getattr(config.structured_output_config, "regex", None)}
        more["cache_salt"] = message.cache_salt  # tests/backends/openvino has what becomes of it
        return given | more | {"stop_token_ids": sorted(config.stop_token_ids)}

    def scripted(message: Submit) -> dict[str, Any]:
        bias = {str(token): weight for token, weight in message.logit_bias}
        return msgspec.structs.asdict(message) | msgspec.structs.asdict(message.sampling) | {"logit_bias": bias}

    def tensorrt_llm(backend: str, max_beam_width: int) -> Engine:
        options: dict[str, Any] = {"backend": backend, "max_beam_width": max_beam_width}
        options |= {
            "logprobs": True,
            "lora": True,
            "vocab_size": 2048,
            "arguments": {"guided_decoding_backend": "xgrammar"},
        }
        features = make(VERSION, **options).executor.features
        assert features >= find_sampler(VERSION, backend, {}, max_beam_width).fields

        def arguments(message: Submit) -> dict[str, Any]:
            async def body() -> dict[str, Any]:
                engine = make(VERSION, **options)
                await engine.begin()
                engine.executor.submit(message)
                engine.running.cancel()
                call = engine.llm.calls[-1]
                given: dict[str, Any] = vars(call["sampling_params"])
                assert given.keys() <= members("SamplingParams", VERSION).keys()
                if "guided_decoding" in given:
                    given["guided_decoding"] = vars(given["guided_decoding"])
                if (bias := given.get("embedding_bias")) is not None:
                    given["embedding_bias"] = {str(token): bias[token] for token in np.flatnonzero(bias)}
                lora = {"lora_request": getattr(call["lora_request"], "number", None)}
                return lora | given | {"cache_salt": call.get("cache_salt")}

            return asyncio.run(body())

        return Engine(features, arguments)

    return {
        "openvino": Engine(OPENVINO_FEATURES | OPENVINO_GUIDES, openvino),
        "scripted": Engine(ScriptedExecutor().features, scripted),
        "tensorrt": tensorrt_llm("tensorrt", 4),
        "pytorch": tensorrt_llm("pytorch", 1),
    }


def test_every_field_has_a_case() -> None:
    fields = {*Sampling.__struct_fields__, *GenerationRequest.__struct_fields__}
    assert {*CASES, *DONE_BY_THE_SERVER} == fields - NOT_PARAMETERS - PART_OF_LOGPROBS


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("field", CASES)
def test_a_field_arrives_or_is_refused_by_name(
    tokenizer: Tokenizer, engines: dict[str, Engine], field: str, engine: str
) -> None:
    case = CASES[field]
    expected, parameters = case[engine], case["parameters"]
    assert parameters is not None
    if expected is None:
        with pytest.raises(UnsupportedParameterError) as refused:
            submitted(tokenizer, engines[engine].features, parameters)
        named = {"guide": "a regular expression", "beam_width": "num_beams"}
        shown = str(refused.value)
        assert any(name in shown for name in (*parameters, named.get(field, field))), shown
        return
    (message,) = submitted(tokenizer, engines[engine].features, parameters)
    arguments = engines[engine].arguments(message)
    assert {name: arguments.get(name) for name in expected} == expected
    # A value that is the engine's own default proves nothing.
    plain = engines[engine].arguments(submitted(tokenizer, engines[engine].features, {})[0])
    assert {name: plain.get(name) for name in expected} != expected


def test_what_the_server_does_itself_is_refused_by_no_engine(tokenizer: Tokenizer, engines: dict[str, Engine]) -> None:
    for engine in engines.values():
        got = {name: submitted(tokenizer, engine.features, given) for name, given in DONE_BY_THE_SERVER.items()}
        assert {name: len(messages) for name, messages in got.items()} == {
            "n": 3,
            "best_of": 3,
            "truncate": 1,
            "stop": 1,
        }
        assert len({message.sampling.seed for message in got["n"]}) == 3
        assert all(message.logprobs for message in got["best_of"])
        assert got["truncate"][0].prompt_ids == tokenizer.encode(PROMPT)[-2:]
        assert Feature.LOGPROBS in engine.features
