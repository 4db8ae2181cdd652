from __future__ import annotations

import random
import statistics
from itertools import islice
from pathlib import Path

import pytest

from djl_trtllm.bench.prompts import SHAREGPT_MEANS, Prompt, like_sharegpt, of_file, sample_text, synthetic
from djl_trtllm.errors import BenchmarkError


def test_a_synthetic_prompt_has_the_words_of_its_tokens() -> None:
    first, second = islice(synthetic(random.Random(1), 130, 7, 1.3), 2)
    assert (len(first.text.split()), first.output_tokens, first.messages) == (100, 7, None)
    assert first.text.split()[:5] != second.text.split()[:5], "a common beginning would be reused from the KV cache"


def test_the_same_seed_makes_the_same_prompts() -> None:
    prompts = [list(islice(synthetic(random.Random(3), 50, 5, 1.3), 3)) for _ in range(2)]
    assert prompts[0] == prompts[1]


def test_even_the_shortest_prompt_has_a_word() -> None:
    assert next(synthetic(random.Random(1), 1, 1, 4.0)).text


def test_conversations_have_sharegpts_mean_lengths_and_are_of_many_lengths() -> None:
    prompts = list(islice(like_sharegpt(random.Random(1), 1.0), 20_000))
    lengths = [[len(prompt.text.split()) for prompt in prompts], [prompt.output_tokens for prompt in prompts]]
    for values, mean in zip(lengths, SHAREGPT_MEANS, strict=True):
        assert statistics.mean(values) == pytest.approx(mean, rel=0.03)
        assert min(values) >= 4 and max(values) == 1024
        assert statistics.median(values) < 0.7 * mean


def test_a_file_has_texts_and_messages_and_is_read_again_and_again(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "one", "max_tokens": 3}\n\n{"inputs": "two"}\n'
        '{"messages": [{"role": "user", "content": "three"}]}\n'
    )
    prompts = list(islice(of_file(file, 9, random.Random(1)), 6))
    expected = {("one", 3), ("two", 9), ("three", 9)}
    assert {(prompt.plain(), prompt.output_tokens) for prompt in prompts[:3]} == expected
    assert {(prompt.plain(), prompt.output_tokens) for prompt in prompts[3:]} == expected


def test_messages_are_one_text_for_apis_without_chat() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert Prompt(1, messages=messages).plain() == "a\nb"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", "no prompts"),
        ("{nonsense\n", ":1: not JSON"),
        ('{"prompt": "a"}\n[1]\n', ":2: expected an object with 'prompt'"),
        ('{"prompt": ""}\n', ":1: expected an object"),
        ('{"messages": []}\n', ":1: expected an object"),
        ('{"prompt": "a", "max_tokens": 0}\n', ":1: max_tokens is 0; expected"),
        ('{"prompt": "a", "max_tokens": true}\n', "max_tokens is True; expected"),
    ],
)
def test_a_wrong_file_is_an_error_with_its_line(content: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(BenchmarkError, match=error):
        next(of_file(file, 1, random.Random(1)))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"--dataset .*nowhere: cannot read it"):
        next(of_file(tmp_path / "nowhere", 1, random.Random(1)))


def test_the_sample_has_every_word() -> None:
    assert len(set(sample_text().split())) > 90
    assert len(sample_text(10).split()) == 10
