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
    FINISH_WORDS,
    FinishReason,
    GenerationRequest,
    Guide,
    OutputChunk,
    Pooling,
    RequestOrigin,
    Resume,
    Sampling,
    SequenceResult,
    ThinkingBudget,
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
    for kind in (Guide, ThinkingBudget, RequestOrigin, SequenceResult, OutputChunk):
        assert not any(kind.__struct_defaults__)
    assert Pooling() == Pooling("embed", None, None, 0)
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


def test_a_field_is_set_by_a_value_that_is_not_neutral_together_with_what_it_is_part_of() -> None:
    sampled = Sampling(temperature=0.5, seed=1)
    for sampling, expected in (
        (sampled, set()),
        (msgspec.structs.replace(sampled, do_sample=True), {"do_sample", "temperature", "seed"}),
        (Sampling(length_penalty=2.0), set()),
        (Sampling(length_penalty=2.0, beam_width=2), {"length_penalty", "beam_width"}),
    ):
        request = GenerationRequest(sampling=sampling)
        assert {name for name, field in FIELDS.items() if name != "sampling" and field.is_set(request)} == expected


def test_parameters_of_sampling_ask_for_sampling_and_a_seed_does_not() -> None:
    whole = {name: field.trait.part_of for name, field in FIELDS.items() if field.trait.part_of}
    assert {name for name, part in whole.items() if part.implied} == {"temperature", "top_k", "top_p", "min_p"}
    assert {name for name, part in whole.items() if not part.implied and part.name == "do_sample"} == {"seed"}


def test_what_depends_on_the_generated_tokens_is_not_resumed_and_lengths_are_adjusted() -> None:
    fields = {resume: {name for name, field in FIELDS.items() if field.trait.resume is resume} for resume in Resume}
    assert fields[Resume.ADJUSTED] == {"max_new_tokens", "min_new_tokens", "seed", "prompt_logprobs"}
    assert fields[Resume.IMPOSSIBLE] == {
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
        *("beam_width", "length_penalty", "early_stopping", "beam_search_diversity_rate", "bad", "guide"),
    }


def test_an_engine_is_asked_for_a_feature_by_the_fields_name_or_by_another() -> None:
    engine = {name: field.trait for name, field in FIELDS.items() if field.trait.honoured_by == "engine"}
    assert {name: trait.feature for name, trait in engine.items() if trait.feature} == {
        "needs_logprobs": "logprobs",
        "adapter": "adapters",
    }
    assert {"temperature", "guide", "images", "logit_bias", "cache_salt", "max_new_tokens"} <= engine.keys()
    every_engine_has = {"max_new_tokens", "min_new_tokens", "ignore_eos", "stop_token_ids", "guide"}
    assert {name for name, trait in engine.items() if not trait.advice} == every_engine_has | {
        *("temperature", "top_k", "top_p"),  # a refusal names do_sample
    }
    assert not {"n", "best_of", "stop", "truncate", "priority", "thinking", "messages"} & engine.keys()


def test_a_refusal_names_the_parameter_as_clients_send_it() -> None:
    for name, parameter in (
        ("beam_width", "'num_beams'"),
        ("needs_logprobs", "'logprobs'"),
        ("top_logprobs", "'top_logprobs'"),
        ("prompt_logprobs", "'prompt_logprobs'"),
        ("bad", "'bad_words'"),
        ("adapter", "'adapters'"),
        ("images", "a content part"),
    ):
        assert FIELDS[name].trait.shown.startswith(parameter)


def test_finish_reasons_have_the_words_of_lmi_and_tgi() -> None:
    assert list(FINISH_WORDS.values()) == ["eos_token", "stop_sequence", "length", "cancelled", "error"]
    assert list(FINISH_WORDS) == list(FinishReason)


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
