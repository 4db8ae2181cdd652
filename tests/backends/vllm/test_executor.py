"""What an executor promises, held by the installed vLLM, or by the fake where there is none."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from djl_trtllm.backends.json_grammar import guide_arguments
from djl_trtllm.executor.protocol import Ranked, Refusal, Submit, Try
from djl_trtllm.model.vision import Vision
from djl_trtllm.request import Adapter, FinishReason, Guide, GuideKind, Image, Sampling
from tests.backends.promises import END, Promises, finish, generate, step
from tests.backends.vllm import FAKE, IS_INSTALLED
from tests.support.steps import unreadable
from tests.support.vision import encoded, picture, seeing_model

PROMPTS = [[1, 300 + 7 * k, 500, *range(600, 610 + 3 * k)] for k in range(6)]


def make(**arguments: Any) -> Any:
    from djl_trtllm.backends.vllm.executor import VllmExecutor

    guides, images = arguments.pop("guides", "xgrammar"), arguments.pop("images", False)
    given = {
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "dtype": "float32",
        "enforce_eager": True,
        "seed": 0,
        **arguments,
    }
    return VllmExecutor(
        arguments=given,
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
        tokenizer_dir=given["tokenizer"],
        guides=guides,
        max_sequences=8,
        lookahead=2,
        images=images,
    )


@pytest.fixture(scope="module")
def shared(tiny_stories: Path) -> Iterator[Any]:
    if not IS_INSTALLED:
        sys.path.insert(0, str(FAKE))
    executor = make(model=str(tiny_stories), tokenizer=str(tiny_stories))
    yield executor
    executor.close()
    if not IS_INSTALLED:
        sys.path.remove(str(FAKE))
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


@pytest.fixture
def executor(shared: Any) -> Iterator[Any]:
    """The executor, idle before and after."""
    yield shared
    assert not shared.busy


@pytest.fixture
def prompts() -> list[list[int]]:
    return PROMPTS


class TestVllm(Promises):
    error = Refusal


def test_more_requests_than_sequences_all_end(executor: Any) -> None:
    for number in range(20):
        executor.submit(Submit(number, PROMPTS[number % 6], Sampling(8, ignore_eos=True)))
    outputs = step(executor, 2)
    assert executor.stats().running == 20 and (executor.stats().queued or 0) >= 1
    finish(executor, outputs)
    assert sorted(outputs) == list(range(20)) and all(len(output.ids) == 8 for output in outputs.values())


@pytest.mark.parametrize(
    ("most", "one_more"),
    [
        # Tokenizers differ in whether a word has another spelling behind a blank.
        ({"bad": tuple(f"w{n}" for n in range(10, 74))}, {"bad": tuple(f"w{n}" for n in range(10, 75))}),
        ({"bad": ("w" * 511,)}, {"bad": ("w" * 1025,)}),
        # The ends of the model are counted, too.
        ({"stop_token_ids": list(range(3, 128))}, {"stop_token_ids": list(range(3, 132))}),
    ],
    ids=["words", "tokens", "stops"],
)
def test_more_than_vllms_runner_takes_is_refused_before_it_has_it(
    executor: Any, most: dict[str, Any], one_more: dict[str, Any]
) -> None:
    assert generate(executor, PROMPTS[0], 4, min_new_tokens=2, **most).end.finish == FinishReason.LENGTH
    assert isinstance(generate(executor, PROMPTS[0], 4, min_new_tokens=2, **one_more).end.error, Refusal)


def test_a_stop_token_that_the_model_lacks_ends_nothing(executor: Any) -> None:
    stops = {"stop_token_ids": [2**31 - 1], "min_new_tokens": 2}
    assert len(generate(executor, PROMPTS[0], 4, ignore_eos=True, **stops).ids) == 4


@pytest.mark.skipif(IS_INSTALLED, reason="a vLLM is installed")
def test_the_last_token_is_one_before_the_size_of_the_vocabulary(
    shared: Any, tiny_stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake's tokens of a bad word are its bytes."""
    import vllm

    monkeypatch.setattr(vllm.ModelConfig, "get_vocab_size", lambda self: ord("w"))
    executor = make(model=str(tiny_stories), tokenizer=str(tiny_stories))
    given: dict[str, Any] = {"stop_token_ids": [ord("w")], "min_new_tokens": 2}
    ends = [generate(executor, PROMPTS[0], 4, bad=(word,), **given).end for word in "vw"]
    assert [isinstance(end.error, Refusal) for end in ends] == [False, True]


def test_a_prompt_beyond_the_longest_sequence_is_refused(executor: Any) -> None:
    assert isinstance(generate(executor, [5] * 2000).end.error, Refusal)


def test_a_cancelled_request_ends_once_and_its_id_can_be_used_again(executor: Any) -> None:
    for _ in range(3):
        for number in range(4):
            executor.submit(Submit(number, PROMPTS[number], Sampling(500, ignore_eos=True)))
        outputs = step(executor, 4)
        for number in range(4):
            executor.cancel(number)
        executor.cancel(0)
        executor.cancel(99)
        finish(executor, outputs)
        assert [outputs[number].end.finish for number in range(4)] == [FinishReason.CANCELLED] * 4
    assert executor.stats().kv_usage == 0
    assert len(generate(executor, PROMPTS[0], 3, ignore_eos=True).ids) == 3


def test_a_stop_id_before_the_least_length_is_not_generated(executor: Any) -> None:
    third = generate(executor, PROMPTS[0], 8, ignore_eos=True).ids[2]
    output = generate(executor, PROMPTS[0], 8, stop_token_ids=[third], min_new_tokens=5)
    assert len(output.ids) >= 5 and third not in output.ids[:5]


def test_the_likeliest_tokens_come_in_order(executor: Any) -> None:
    plain = generate(executor, PROMPTS[1], 6, ignore_eos=True, logprobs=True)
    ranked = generate(executor, PROMPTS[1], 6, ignore_eos=True, logprobs=True, top_logprobs=3)
    values = [value for delta in plain.deltas for value in delta.logprobs or []]
    rows: list[Any] = [row for delta in ranked.deltas for row in delta.logprobs or []]
    assert [row.logprob for row in rows] == pytest.approx(values, abs=1e-3)
    for token, row in zip(ranked.ids, rows, strict=True):
        assert len(row.ids) == 3 and row.ids[0] == token, "greedy takes the likeliest"
        assert row.logprobs == sorted(row.logprobs, reverse=True)


def test_a_prompt_that_came_before_is_cached_and_says_how_much_of_it(executor: Any) -> None:
    prompt = [9, *range(700, 1000)]
    first, second = (generate(executor, prompt, 3, ignore_eos=True) for _ in range(2))
    assert first.deltas[0].cached_tokens == 0 and 0 < second.deltas[0].cached_tokens < len(prompt)
    assert all(delta.cached_tokens == 0 for delta in second.deltas[1:])
    assert 0 < (executor.stats().kv_hit_rate or 0) < 1


def test_a_prompt_with_another_salt_is_not_cached(executor: Any) -> None:
    prompt = [9, *range(300, 600)]
    outputs = [generate(executor, prompt, 2, cache_salt=salt) for salt in ("", "one", "one", "two", "")]
    assert [output.deltas[0].cached_tokens > 0 for output in outputs] == [False, False, True, False, True]


def test_a_prompts_log_probabilities_come_with_its_first_token_also_where_it_is_cached(executor: Any) -> None:
    prompt = [9, *range(600, 640)]
    generate(executor, prompt, 1)
    for most in (0, 2):
        executor.submit(Submit(1, prompt, Sampling(3), prompt_logprobs=most))
        steps = []
        while executor.busy:
            steps.append(executor.step())
        (first,) = [each for each in steps if each.prompts]
        assert first.ids == [1]
        none, *scores = first.prompts[1]
        assert none is None
        assert len(scores) == len(prompt) - 1
        ranked: list[Any] = [score if most else Ranked(score, [], []) for score in scores]
        assert all(len(score.ids) == len(score.logprobs) == most and score.logprob <= 0 for score in ranked)
        assert all(score.logprobs == sorted(score.logprobs, reverse=True) for score in ranked)


def test_a_bias_decides_the_output_and_one_of_no_token_is_refused(executor: Any) -> None:
    assert generate(executor, PROMPTS[0], 3, logit_bias=((77, 100.0),), ignore_eos=True).ids == [77] * 3
    refused = generate(executor, PROMPTS[0], 3, logit_bias=((2**31 - 1, 1.0),))
    assert isinstance(refused.end.error, Refusal)


def test_a_guide_that_cannot_be_used_is_refused_and_a_good_one_is_followed(executor: Any) -> None:
    pytest.importorskip("xgrammar")
    bad = generate(executor, PROMPTS[0], 8, guide=Guide(GuideKind.GRAMMAR, "root ::= nothing")).end
    assert isinstance(bad.error, Refusal)
    executor.try_guide(Try(7, Guide(GuideKind.REGEX, "yes|no")))
    assert finish(executor)[7].end.finish == FinishReason.STOP
    if IS_INSTALLED:
        output = generate(executor, PROMPTS[0], 8, guide=Guide(GuideKind.REGEX, "yes|no"), stop_token_ids=[END])
        assert output.end.finish == FinishReason.STOP and 1 < len(output.ids) < 8


# -- with the fake only ------------------------------------------------------------------------------------------------

fake_only = pytest.mark.skipif(IS_INSTALLED, reason="a vLLM is installed")


@fake_only
def test_output_that_cannot_be_read_ends_its_request_and_no_other(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable(2, monkeypatch)
    for number in (1, 2):
        executor.submit(Submit(number, PROMPTS[1], Sampling(8, ignore_eos=True)))
    outputs = finish(executor)
    assert outputs[1].end.finish == FinishReason.LENGTH and len(outputs[1].ids) == 8
    assert "2 log-probabilities for 1 token" in str(outputs[2].end.error) and not outputs[2].ids


@fake_only
def test_a_lost_engine_raises_and_is_no_requests_end(shared: Any, tiny_stories: Path) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    for error in (EngineDeadError("gone"), RuntimeError("CUDA error")):
        executor = make(model=str(tiny_stories), tokenizer=str(tiny_stories))
        executor.submit(Submit(1, PROMPTS[0], Sampling(6)))
        executor._core.lost = error
        with pytest.raises(type(error)):
            executor.step()
        with pytest.raises(EngineDeadError):
            executor.submit(Submit(2, PROMPTS[0], Sampling(6)))


@fake_only
def test_adapters_are_a_feature_where_they_are_enabled_and_go_to_vllm(shared: Any, tiny_stories: Path) -> None:
    executor = make(model=str(tiny_stories), tokenizer=str(tiny_stories), enable_lora=True)
    assert executor.features ^ shared.features == {"adapters", "prompt_logprobs"}
    executor.submit(Submit(1, PROMPTS[0], Sampling(2), adapter=Adapter("pirate", 3, "/adapters/pirate")))
    (request,) = executor._core.requests.values()
    assert (request.lora_request.lora_name, request.lora_request.lora_int_id) == ("pirate-3", 3)
    finish(executor)


@fake_only
def test_structural_tags_go_to_vllm_where_xgrammar_compiles_them(
    shared: Any, tiny_stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    given = guide_arguments(Guide(GuideKind.STRUCTURAL_TAG, '{"format": {}}'), "xgrammar")
    assert StructuredOutputsParams(**given).structural_tag == '{"format": {}}'
    opened: list[tuple[Any, ...]] = []
    monkeypatch.setattr(type(shared), "gates", (lambda *given, **more: opened.append(given[:2]), shared.gates[1]))
    other = make(model=str(tiny_stories), tokenizer=str(tiny_stories), guides="llguidance")
    assert shared.features - other.features == {"structural_tag"}
    ((program, directory),) = opened
    assert "llguidance" in program and directory == str(tiny_stories)
    other.submit(Submit(1, PROMPTS[0], Sampling(2), guide=Guide(GuideKind.JSON_OBJECT)))
    (request,) = other._core.requests.values()
    assert request.sampling_params.structured_outputs.json, "llguidance takes schemas as they are"
    finish(other)


@fake_only
def test_each_engine_begins_with_random_numbers_of_its_own_unless_it_is_given_a_seed(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    from djl_trtllm.backends.vllm.executor import load_engine

    made, seeds = vllm.EngineArgs, list[int]()

    def seen(**arguments: Any) -> Any:
        seeds.append(arguments["seed"])
        return made(**arguments)

    monkeypatch.setattr(vllm, "EngineArgs", seen)
    given = {"max_num_seqs": 8, "max_model_len": 1024}
    for arguments in (given, given, {**given, "seed": 5}):
        load_engine(arguments, {})
    assert len(set(seeds)) == 3 and seeds[2] == 5 and all(0 <= seed < 2**32 for seed in seeds)


PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}


@fake_only
@pytest.mark.parametrize(
    ("wanted", "lost"),
    [("min_p", {"min_p"}), ("logprobs", {"top_logprobs"}), ("presence_penalty", PENALTIES), ("top_k seed", {"seed"})],
)
def test_what_a_configuration_of_vllm_excludes_is_no_feature_and_the_rest_is_served(
    shared: Any, tiny_stories: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, lost: set[str]
) -> None:
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.input_processor import InputProcessor

    process = InputProcessor.process_inputs

    def refuse(self: Any, request_id: str, prompt: Any, params: Any, *others: Any, **given: Any) -> Any:
        # For example, speculative_config has no min_p, and max_logprobs=0 no likeliest tokens.
        if all(getattr(params, name) for name in wanted.split()):
            raise VLLMClientError(f"{wanted} cannot be had")
        return process(self, request_id, prompt, params, *others, **given)

    monkeypatch.setattr(InputProcessor, "process_inputs", refuse)
    executor = make(model=str(tiny_stories), tokenizer=str(tiny_stories))
    assert shared.features - executor.features == lost
    assert len(generate(executor, PROMPTS[0], 4).ids) == 4


@fake_only
@pytest.mark.parametrize("right", [True, False])
def test_sampling_is_no_feature_where_drafts_are_checked_with_wrong_parameters(
    shared: Any, tiny_stories: Path, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    from djl_trtllm.backends.vllm import executor as module

    monkeypatch.setattr(module, "checks_sampled_drafts", lambda: right)
    paths = {"model": str(tiny_stories), "tokenizer": str(tiny_stories)}
    executor = make(**paths, speculative_config={"method": "ngram"})
    assert ("do_sample" in executor.features, "top_k" in executor.features) == (right, right)
    assert len(generate(executor, PROMPTS[0], 4).ids) == 4
    assert "do_sample" in make(**paths).features, "without speculation nothing is checked"


@fake_only
def test_tokens_of_drafts_are_counted_by_request_and_what_was_proposed_in_all(
    shared: Any, tiny_stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from djl_trtllm.backends.vllm import executor as module

    monkeypatch.setattr(module, "checks_sampled_drafts", lambda: True)
    given = {"speculative_config": {"method": "ngram"}, "per_request_spec_decode_metrics": "summary"}
    executor = make(model=str(tiny_stories), tokenizer=str(tiny_stories), **given)
    drafted: dict[int, int | None] = {}
    for number in range(2):
        executor.submit(Submit(number, PROMPTS[number], Sampling(8 + number)))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    accepted = {0: 0, 1: 0}
    while executor.busy:
        step = executor.step()
        for request_id, ids, _ in step.rows():
            tokens[request_id] += ids
        for request_id, count in step.accepted.items():
            accepted[request_id] += count
        drafted |= {end.request_id: end.drafted for end in step.ends}
    # 1 + 3 + 3 + 1, and 1 + 3 + 3 + 2.
    assert {number: len(ids) for number, ids in tokens.items()} == {0: 8, 1: 9} and accepted == {0: 4, 1: 5}
    assert drafted == {0: 9, 1: 9}
    assert tokens[0] == generate(shared, PROMPTS[0], 8).ids
    assert (executor.stats().drafts, executor.stats().draft_tokens, executor.stats().kv_hit_rate) == (6, 18, 0)
    assert (shared.stats().drafts, shared.stats().draft_tokens) == (None, None)


@pytest.fixture
def seeing(shared: Any, tmp_path: Path) -> Any:
    """The executor of a model that takes images, whose placeholder is the fake's."""
    from vllm import MARK

    model = seeing_model(tmp_path / "seeing")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"image_token_id": MARK}))
    return make(model=str(model), tokenizer=str(model), images=True)


def prompt_with(*colours: int, salt: str = "", tokens: int = 4, **given: Any) -> Submit:
    """A prompt with a small image of each colour; the server has counted `tokens` for each."""
    from vllm import MARK

    images = tuple(Image(encoded(picture(56, 56, colour)), 56, 56, tokens) for colour in colours)
    ids = [5, *[MARK] * tokens * len(images), 7]
    return Submit(1, ids, Sampling(3), images=images, cache_salt=salt, **given)


def until_read(executor: Any) -> None:
    """Step until a request is the engine's."""
    while not executor._core.requests:
        executor.step()


@fake_only
def test_images_are_a_feature_of_models_that_take_them_and_their_tokens_the_prompts(seeing: Any, shared: Any) -> None:
    assert seeing.features - shared.features == {"images"}
    seeing.submit(prompt_with(1, 2))
    until_read(seeing)
    (request,) = seeing._core.requests.values()
    assert request.prompt_token_ids == prompt_with(1, 2).prompt_ids
    assert request.cache_salt is None
    assert len(finish(seeing)[1].ids) == 3


@fake_only
def test_vllm_knows_an_image_again_by_its_content_and_the_prompts_salt(seeing: Any) -> None:
    known = seeing._input_processor.renderer.cached
    known.clear()
    for request in (prompt_with(1), prompt_with(1), prompt_with(2), prompt_with(1, salt="key"), prompt_with(2, 1)):
        seeing.submit(request)
        finish(seeing)
    seeing.submit(prompt_with(1, salt="key"))
    until_read(seeing)
    assert [each.cache_salt for each in seeing._core.requests.values()] == ["key"], "for the prefix cache"
    *known, _ = known
    first, again, other, salted, *both = known
    assert first == again and both == [other, first]
    assert len({first, other, salted}) == 3


@fake_only
@pytest.mark.parametrize("wrong", [{"logit_bias": ((9999, 1.0),)}, {"tokens": 6}], ids=["parameter", "tokens"])
def test_a_refused_request_leaves_the_images_of_others_in_vllms_caches(seeing: Any, wrong: dict[str, Any]) -> None:
    cached = seeing._input_processor.renderer.cached
    cached.clear()
    seeing.submit(prompt_with(2))
    finish(seeing)
    others = list(cached)
    seeing.submit(prompt_with(1, **wrong))
    assert isinstance(finish(seeing)[1].end.error, Refusal)
    assert others and cached == others


@fake_only
def test_a_vllm_that_cannot_take_out_one_image_loses_all(seeing: Any) -> None:
    """Its two caches have to see the same images."""
    renderer = seeing._input_processor.renderer
    renderer.mm_processor_cache = None
    seeing.submit(prompt_with(1, logit_bias=((9999, 1.0),)))
    assert isinstance(finish(seeing)[1].end.error, Refusal)
    assert renderer.cached == []


@fake_only
def test_an_image_is_read_beside_the_tokens_of_others(seeing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a request that is cancelled meanwhile ends."""
    go_on = threading.Event()
    read = Vision.pixels
    monkeypatch.setattr(Vision, "pixels", lambda self, data: go_on.wait(600) and read(self, data))
    seeing.submit(prompt_with(3))
    seeing.submit(structs.replace(prompt_with(4), request_id=3))
    seeing.submit(Submit(2, [5, 6, 7], Sampling(3)))
    found = step(seeing, 20)
    assert len(found[2].ids) == 3 and found.keys() == {2}
    seeing.cancel(3)
    go_on.set()
    finish(seeing, found)
    assert len(found[1].ids) == 3 and found[3].end.finish is FinishReason.CANCELLED


@fake_only
def test_an_image_that_cannot_be_read_ends_its_request_alone(seeing: Any) -> None:
    damaged = prompt_with(1)
    seeing.submit(structs.replace(damaged, images=(structs.replace(damaged.images[0], data=b"none"),)))
    assert isinstance(finish(seeing)[1].end.error, Refusal)
