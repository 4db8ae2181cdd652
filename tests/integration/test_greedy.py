"""Greedy output equals that of transformers, on every architecture, with rotary options and with prefix reuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm import LLM, SamplingParams
from djl_trtllm.backends.planning import compile_checkpoint
from djl_trtllm.model import Tokenizer, load_tokenizer
from tests.engines.helpers import configured
from tests.support import reference as golden
from tests.support.client import lmi
from tests.support.models import scripted_model
from tests.support.reference import ARCHITECTURES, SIXTEEN, Reference, greedy, story, write_checkpoint
from tests.support.server import Server, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(golden_tokens: golden.Tokens) -> list[list[int]]:
    """The tokens after each prompt."""
    return golden_tokens[golden.GREEDY]


def test_the_golden_file_is_what_transformers_says(reference: Reference, golden_tokens: golden.Tokens) -> None:
    made = golden.make(reference)
    assert made.keys() == golden_tokens.keys()
    for name, tokens in made.items():
        for at, (said, kept) in enumerate(zip(tokens, golden_tokens[name], strict=True)):
            assert said == kept, f"{name}, prompt {at}"


def test_greedy_among_sixteen_equals_transformers(server: Server, expected: list[list[int]]) -> None:
    answers = server.together([lmi(prompt, stream=True, max_new_tokens=golden.NEW_TOKENS) for prompt in SIXTEEN])
    for prompt, ids, answer in zip(SIXTEEN, expected, answers, strict=True):
        assert answer.token_ids == ids, prompt


def test_text_equals_transformers_decoding(server: Server, reference: Reference, expected: list[list[int]]) -> None:
    for prompt, ids in zip(SIXTEEN, expected, strict=True):
        text = reference.tokenizer.decode(reference.ids(prompt) + ids, skip_special_tokens=True)
        answer = server.answer(prompt, max_new_tokens=golden.NEW_TOKENS, return_full_text=True)
        assert answer["generated_text"] == text


# -- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact(model: Path, scratch: Path) -> Iterator[Server]:
    """A server whose KV cache rounds nothing."""
    with serving(
        model,
        scratch,
        OPTION_KV_CACHE_DTYPE="fp32",
        OPTION_MAX_INPUT_LEN="2560",
        OPTION_MAX_TOKENS_IN_PAGED_KV_CACHE="16384",
    ) as started:
        yield started


def deviations(server: Server, reference: Reference, prompt: str, **parameters: Any) -> list[float]:
    """How far the log-probability of each generated token is from transformers'."""
    tokens = server.answer(prompt, **parameters)["details"]["tokens"]
    expected = reference.logprobs(reference.ids(prompt), [token["id"] for token in tokens])
    return [abs(token["log_prob"] - value) for token, value in zip(tokens, expected, strict=True)]


def test_logprobs_equal_transformers_log_softmax(exact: Server, reference: Reference) -> None:
    for prompt in SIXTEEN:
        assert max(deviations(exact, reference, prompt, max_new_tokens=32)) < 1e-3


def test_logprobs_do_not_drift_with_the_position(exact: Server, reference: Reference) -> None:
    prompt = story(110)
    assert len(reference.ids(prompt)) > 1500
    assert max(deviations(exact, reference, prompt, max_new_tokens=32)) < 1e-3


def test_a_16_bit_cache_changes_logprobs_little(server: Server, reference: Reference) -> None:
    for prompt in (*SIXTEEN, story(110)):
        assert max(deviations(server, reference, prompt, max_new_tokens=32)) < 3e-2


def test_logprobs_of_sampled_tokens_are_those_before_temperature(exact: Server, reference: Reference) -> None:
    sampling = {"do_sample": True, "temperature": 1.7, "top_k": 50, "repetition_penalty": 1.2, "seed": 11}
    assert max(deviations(exact, reference, SIXTEEN[0], max_new_tokens=32, **sampling)) < 1e-3


# -- the rotary options on the embedded engine: greedy output is that of transformers with the same config.json --------

TOKENS = 16


def checkpoint(directory: Path, tiny_stories: Path, **config: object) -> Path:
    directory.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / name).symlink_to(tiny_stories / name)
    content = json.loads((tiny_stories / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.usefixtures("compiled_here")
def test_greedy_with_rotary_options_equals_transformers(tmp_path: Path, tiny_stories: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    other = Reference(checkpoint(tmp_path / "other", tiny_stories, rope_theta=500.0, rope_scaling=scaling))
    own = Reference(checkpoint(tmp_path / "own", tiny_stories))
    cache = tmp_path / "cache"
    with LLM(
        tmp_path / "own",
        engine_cache_dir=cache,
        rotary_base=500,
        rotary_scaling_type="linear",
        rotary_scaling_factor=2,
    ) as llm:
        outputs = llm.generate(SIXTEEN[:8], SamplingParams(max_tokens=TOKENS))
    ids = [output.outputs[0].token_ids for output in outputs]

    def said_by(reference: Reference) -> list[list[int]]:
        return [reference.greedy(reference.ids(prompt), TOKENS) for prompt in SIXTEEN[:8]]

    assert ids == said_by(other)
    assert ids != said_by(own)


# Fourteen architectures: a checkpoint is compiled for OpenVINO and served, and its greedy output is transformers'.

QUICK = "qwen2"
NEW_TOKENS = 16
PROMPTS = ("the little red riding hood", "the wood", "hood hood the riding into", "w")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def registering(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server to register models in: starting one for each architecture takes longer than all of them."""
    first = scripted_model(tmp_path_factory.mktemp("first") / "model", {"steps_per_second": 100})
    with serving(first, SERVING_MODEL_STORE=str(store)) as started:
        yield started


@pytest.mark.compile
@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in ARCHITECTURES],
)
def test_greedy_output_is_that_of_transformers(
    model_type: str, registering: Server, store: Path, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model_type)
    compile_checkpoint(configured(max_rolling_batch_size=4), checkpoint, store / model_type)
    tokenizer = load_tokenizer(checkpoint)
    expected = greedy(checkpoint, [tokenizer.encode(prompt) for prompt in PROMPTS], NEW_TOKENS)
    answer = registering.http.post("/models", params={"url": model_type})
    assert answer.status_code == 200, answer.text
    try:
        for prompt, wanted in zip(PROMPTS, expected, strict=True):
            request = lmi(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, details=True, ignore_eos_token=True)
            answer = registering.http.post(f"/predictions/{model_type}", json=request)
            assert answer.status_code == 200, answer.text
            generated = [token["id"] for token in answer.json()["details"]["tokens"]]
            assert len(generated) == NEW_TOKENS
            assert generated[: wanted.certain] == wanted.tokens[: wanted.certain]
    finally:
        registering.http.delete(f"/models/{model_type}")
    # Tokens of one kind, or those after a tie, would say nothing.
    assert sum(wanted.certain for wanted in expected) >= NEW_TOKENS * len(PROMPTS) / 2
    assert len({token for wanted in expected for token in wanted.tokens}) >= 8


# -- with prefix reuse, a prompt that begins as an earlier one is answered sooner, and the metric says why -------------

REUSED = "reused_prompt_tokens_total"


@pytest.fixture(scope="module")
def reusing(model: Path, scratch: Path) -> Iterator[Server]:
    with serving(
        model,
        scratch,
        OPTION_ENABLE_KV_CACHE_REUSE="true",
        OPTION_MAX_INPUT_LEN="2560",
        OPTION_MAX_TOKENS_IN_PAGED_KV_CACHE="32768",
    ) as started:
        yield started


@pytest.fixture(scope="module")
def computing(tiny_stories: Path, scratch: Path) -> Iterator[Server]:
    """A server without the cache, by one of LMI's names for it."""
    with serving(tiny_stories, scratch, OPTION_ENABLE_PREFIX_CACHING="false") as started:
        yield started


def prefix(number: int, sentences: int) -> str:
    """A text that begins unlike any other number's."""
    return f"Story number {number}. {story(sentences, number % 16)}"


def test_a_shared_prefix_is_counted(reusing: Server, tokenizer: Tokenizer) -> None:
    shared = prefix(0, 14)
    length = len(tokenizer.encode(shared))
    assert length > 200
    before = reusing.metric(REUSED)
    reusing.post(f"{shared} The wolf", max_new_tokens=1)
    assert reusing.metric(REUSED) == before
    reusing.post(f"{shared} The grandmother", max_new_tokens=1)
    reused = reusing.metric(REUSED) - before
    assert length - 32 <= reused <= length
    assert reused % 32 == 0


def test_reuse_does_not_change_the_answer_and_can_be_turned_off(reusing: Server, computing: Server) -> None:
    for ending in ("The wolf", "The grandmother", "The wolf"):
        prompt = f"{prefix(9, 20)} {ending}"
        assert reusing.token_ids(prompt, max_new_tokens=32) == computing.token_ids(prompt, max_new_tokens=32)
    assert computing.metric(REUSED) == 0
