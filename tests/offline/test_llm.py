"""`LLM`: prompts of all kinds, and the bundled model on OpenVINO."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from djl_trtllm import LLM, SamplingParams
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.model import Tokenizer
from tests.offline.helpers import PROMPT, Make, stories


@pytest.fixture(scope="module")
def story(tiny_stories: Path) -> Iterator[LLM]:
    """The bundled model on OpenVINO."""
    with LLM(tiny_stories, max_rolling_batch_size=16) as llm:
        yield llm


def test_no_prompts_are_no_outputs(make: Make) -> None:
    assert make().generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1, 2, 3], r"prompts\[0\] is 1: expected a text"),
        (["a", None], r"prompts\[1\] is None"),
        ([b"bytes"], r"prompts\[0\] is b'bytes'"),
        ([[1, 10**6]], r"token id 1000000"),
        ([[1, -1]], r"token id -1"),
        ([{"role": "user", "content": "a"}], r"prompts\[0\] is {'role'"),
        ([[{"content": "a"}]], r"prompts\[0\]: 'messages\[0\].role'"),
    ],
)
def test_what_is_no_prompt_is_refused_before_anything_runs(make: Make, prompts: list[object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make().generate(prompts)  # type: ignore[arg-type]


def test_there_are_as_many_parameters_as_prompts(make: Make) -> None:
    with pytest.raises(InvalidRequestError, match="3 prompts and 2 sampling_params"):
        make().generate(stories(3), [SamplingParams()] * 2)


def test_token_ids_are_a_prompt(story: LLM, tokenizer: Tokenizer) -> None:
    by_text, by_ids = story.generate([PROMPT, tokenizer.encode(PROMPT)])
    assert (by_ids.prompt, by_ids.prompt_token_ids) == (None, by_text.prompt_token_ids)
    assert by_ids.outputs == by_text.outputs


def test_a_chat_is_a_prompt(story: LLM, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "tell me a story"}]
    (output,) = story.generate([messages])
    assert output.prompt == tokenizer.render_chat(messages)
    assert output.prompt_token_ids == tokenizer.encode(tokenizer.render_chat(messages), False)
    assert output.outputs[0].text


def test_an_empty_prompt_fails_alone(story: LLM) -> None:
    empty, full = story.generate([[], PROMPT])
    assert "empty" in str(empty.error)
    assert full.error is None


def test_without_parameters_it_is_greedy_and_32_tokens(story: LLM) -> None:
    (plain,) = story.generate(PROMPT)
    (greedy,) = story.generate(PROMPT, SamplingParams(temperature=0, max_tokens=32))
    assert len(plain.outputs[0].token_ids) == 32
    assert plain == greedy


def test_without_a_limit_it_ends_at_the_end_of_the_text(story: LLM, tokenizer: Tokenizer) -> None:
    (output,) = story.generate(PROMPT, SamplingParams(max_tokens=None))
    (completion,) = output.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.token_ids[-1] in tokenizer.end_ids
    assert completion.text == tokenizer.decode(completion.token_ids)


def test_seeds_repeat_and_no_seed_does_not(story: LLM) -> None:
    def texts(seed: int | None) -> list[str]:
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=20)
        return [output.outputs[0].text for output in story.generate([PROMPT] * 3, params)]

    assert len(set(texts(7))) == 1
    assert texts(7) == texts(7) != texts(8)
    assert len(set(texts(None))) > 1


def test_n_sequences_have_the_seeds_that_follow(story: LLM) -> None:
    def ids(n: int, seed: int) -> list[list[int]]:
        params = SamplingParams(temperature=1.0, seed=seed, n=n, max_tokens=10)
        return [completion.token_ids for completion in story.generate(PROMPT, params)[0].outputs]

    assert ids(3, 5) == ids(1, 5) + ids(1, 6) + ids(1, 7)


def test_the_best_sequences_come_first(story: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=1, n=2, best_of=6, max_tokens=10, logprobs=0)
    (output,) = story.generate(PROMPT, params)
    best, second = output.outputs
    assert (best.cumulative_logprob or 0) > (second.cumulative_logprob or 0)
    (all_six,) = story.generate(PROMPT, SamplingParams(temperature=1.5, seed=1, n=6, max_tokens=10, logprobs=0))
    assert best.token_ids == max(all_six.outputs, key=lambda each: each.cumulative_logprob or -1e9).token_ids


def test_log_probabilities_go_with_the_tokens(story: LLM) -> None:
    (completion,) = story.generate(PROMPT, SamplingParams(max_tokens=8, logprobs=1))[0].outputs
    assert [list(entry) for entry in completion.logprobs] == [[id_] for id_ in completion.token_ids]
    total = sum(value.logprob for entry in completion.logprobs for value in entry.values())
    assert completion.cumulative_logprob == pytest.approx(total)
    (bare,) = story.generate(PROMPT, SamplingParams(max_tokens=8))[0].outputs
    assert (bare.logprobs, bare.cumulative_logprob) == ([], None)


def test_a_stop_string_ends_the_text_before_it(story: LLM) -> None:
    (whole,) = story.generate(PROMPT, SamplingParams(max_tokens=30))[0].outputs
    word = whole.text.split()[3]
    (cut,) = story.generate(PROMPT, SamplingParams(max_tokens=30, stop=word))[0].outputs
    assert cut.text == whole.text.partition(word)[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", word)


def test_a_stop_id_is_the_reason(story: LLM) -> None:
    (whole,) = story.generate(PROMPT, SamplingParams(max_tokens=10))[0].outputs
    (cut,) = story.generate(PROMPT, SamplingParams(max_tokens=10, stop_token_ids=[whole.token_ids[4]]))[0].outputs
    assert (cut.finish_reason, cut.stop_reason) == ("stop", whole.token_ids[4])
