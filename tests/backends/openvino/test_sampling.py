from __future__ import annotations

import pytest

from djl_trtllm.backends.openvino.sampling import FEATURES, generation_config
from djl_trtllm.executor.protocol import Feature, Submit
from djl_trtllm.request import Sampling


def test_a_greedy_sequence_has_none_of_the_sampling_arguments() -> None:
    config = generation_config(Submit(1, [5], Sampling(9, temperature=0.5, top_k=3, top_p=0.5, seed=3)))
    plain = generation_config(Submit(1, [5], Sampling(9)))
    assert (config.do_sample, config.max_new_tokens, config.min_new_tokens) == (False, 9, 0)
    for name in ("temperature", "top_k", "top_p", "rng_seed"):
        assert getattr(config, name) == getattr(plain, name)


def test_a_sampled_sequence_has_all_of_them() -> None:
    sampling = Sampling(9, 2, True, 0.5, 3, 0.25, 1.5, 0.25, 0.75, seed=2**63)
    config = generation_config(Submit(1, [5], sampling))
    assert (config.do_sample, config.max_new_tokens, config.min_new_tokens) == (True, 9, 2)
    assert (config.temperature, config.top_k, config.top_p, config.rng_seed) == (0.5, 3, 0.25, 2**63)
    assert (config.repetition_penalty, config.presence_penalty, config.frequency_penalty) == (1.5, 0.25, 0.75)


@pytest.mark.parametrize(("ids", "ignores"), [([], True), ([7, 8], False)])
def test_end_tokens_are_ignored_only_where_no_token_ends_the_sequence(ids: list[int], ignores: bool) -> None:
    config = generation_config(Submit(1, [5], Sampling(9, ignore_eos=True), ids))
    assert (config.ignore_eos, config.stop_token_ids) == (ignores, set(ids))
    assert config.eos_token_id == (ids[0] if ids else -1)


def test_log_probabilities_are_those_of_the_chosen_token() -> None:
    assert [generation_config(Submit(1, [5], Sampling(9), logprobs=asked)).logprobs for asked in (False, True)] == [
        0,
        1,
    ]


def test_only_what_reaches_the_engine_is_honoured() -> None:
    assert (
        frozenset(
            {
                *(
                    "max_new_tokens",
                    "min_new_tokens",
                    "do_sample",
                    "temperature",
                    "top_k",
                    "top_p",
                    "seed",
                    "ignore_eos",
                ),
                *("repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids"),
                *(Feature.LOGPROBS, Feature.FREE_LOGPROBS),
            }
        )
        == FEATURES
    )
