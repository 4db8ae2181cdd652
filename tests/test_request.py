"""Defaults of requests are neutral, and their fields are described."""

from __future__ import annotations

import os
import random
from uuid import RFC_4122, UUID

import msgspec
import pytest

from djl_trtllm.executor.protocol import Feature
from djl_trtllm.request import (
    FIELDS,
    FinishReason,
    GenerationRequest,
    Sampling,
    begins_with_reasoning,
    new_hex_id,
    new_id,
    read_traits,
)


def test_output_begins_with_reasoning_after_its_opener_or_where_nothing_has_ended_it() -> None:
    prompts = ("Hi <think>\n", "Hi </think>\n", "Hi")
    found = [
        [begins_with_reasoning(text, "<think>", "</think>", starts=starts) for text in prompts]
        for starts in (False, True)
    ]
    assert found == [[True, False, False], [True, False, True]]


def test_the_defaults_of_requests_are_neutral() -> None:
    fields = msgspec.structs.asdict(GenerationRequest())
    assert fields.pop("sampling") == Sampling()
    assert not any(fields.values())
    assert msgspec.structs.asdict(Sampling()) == {
        "max_new_tokens": 0,
        "min_new_tokens": 0,
        "do_sample": False,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "ignore_eos": False,
        "n": 1,
        "best_of": None,
        "min_p": 0.0,
        "no_repeat_ngram_size": 0,
        "beam_width": 1,
        "length_penalty": 1.0,
        "early_stopping": False,
        "beam_search_diversity_rate": 0.0,
    }


def test_a_field_whose_traits_are_not_decided_is_an_error() -> None:
    class Decaying(Sampling, frozen=True):
        top_p_decay: float = 1.0

    with pytest.raises(TypeError, match=r"Decaying\.top_p_decay .*Trait\(honoured_by="):
        read_traits(Decaying)


def test_traits_name_fields_and_features_that_exist() -> None:
    for field in FIELDS.values():
        assert field.trait.part_of is None or field.trait.part_of.name in FIELDS
        assert not field.trait.feature or field.trait.feature in list(Feature)


@pytest.mark.parametrize(
    ("sampling", "sequences"),
    [
        (Sampling(), 1),
        (Sampling(n=3), 3),
        (Sampling(n=2, best_of=5), 5),
        (Sampling(n=1, beam_width=2), 2),
        (Sampling(n=3, beam_width=4), 4),
    ],
)
def test_as_many_sequences_are_generated_as_are_ranked_or_delivered(sampling: Sampling, sequences: int) -> None:
    assert sampling.sequences == sequences


def test_finish_reasons_are_small_numbers_for_the_engine_process() -> None:
    assert [reason.value for reason in FinishReason] == [1, 2, 3, 4, 5]


def test_a_forked_process_has_uuids_of_its_own() -> None:
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, new_hex_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 32) != new_hex_id().encode()
    os.close(reading)
    os.close(writing)


def test_uuids_are_random_whatever_a_models_code_seeds() -> None:
    found = []
    for _ in range(100):
        random.seed(1)
        found.append(UUID(new_id()))
    assert len(set(found)) == 100
    assert {(each.version, each.variant) for each in found} == {(4, RFC_4122)}
    assert UUID(new_hex_id()).version == 4
