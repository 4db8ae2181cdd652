"""What a rolling batch accepts, and what an executor gets of a request."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer as RawTokenizer, decoders, models, normalizers, pre_tokenizers

from djl_trtllm.batching.admission import BatchLimits, SequenceLimits, Translator, refusals, supported
from djl_trtllm.batching.sequence import OutputSequence
from djl_trtllm.errors import InvalidRequestError, PromptTooLongError, RequestError, UnsupportedParameterError
from djl_trtllm.executor.protocol import Feature, Limits, Ranked, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import (
    FIELDS,
    Adapter,
    FinishReason,
    GenerationRequest,
    Guide,
    GuideKind,
    Image,
    ImageSource,
    Pooling,
    RankedToken,
    RequestOrigin,
    Sampling,
    ThinkingBudget,
)
from tests.batching.helpers import take
from tests.support.tables import by_rows

BATCH = BatchLimits(
    max_batch_size=4, max_queue_size=4, max_input_len=50, max_output_len=20, max_seq_len=60, vocab_size=100
)
ENGINE = Limits(4, 0, 10, 100)
EVERYTHING = frozenset({*FIELDS, *Feature})
GUIDE = Guide(GuideKind.REGEX, "a+")
END = 2


def asking(**fields: object) -> GenerationRequest:
    """`fields` are those of Sampling and of GenerationRequest."""
    sampling = {name: fields.pop(name) for name in Sampling.__struct_fields__ if name in fields}
    parameters = Sampling(**sampling)  # type: ignore[arg-type]
    return GenerationRequest(prompt_ids=[3], sampling=parameters, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "likely", "taken"), [(32_768, 0, True), (16_385, 1, False), (1560, 20, True), (1561, 20, False)]
)
def test_the_scores_of_a_prompt_are_bounded_with_their_likely_tokens(tokens: int, likely: int, taken: bool) -> None:
    """The event loop makes an object of each."""
    batch = dataclasses.replace(BATCH, max_input_len=10**6, max_seq_len=10**6)
    limits, request = SequenceLimits(batch, replace(ENGINE, max_seq_len=10**6)), asking(prompt_logprobs=likely)
    if taken:
        assert len(limits.fit(request, [3] * tokens)[0]) == tokens
    else:
        with pytest.raises(InvalidRequestError, match="'prompt_logprobs'"):
            limits.fit(request, [3] * tokens)


# -- what an engine refuses --------------------------------------------------------------------------------------------


@by_rows(
    ("missing", "refused"),
    [
        ((), ""),
        (("min_p",), "min_p"),
        (("logprobs",), "needs_logprobs"),
        (("adapters",), "adapter"),
        (("regex",), "regex"),
        (("json",), "json_object json_schema"),
        (("structural_tag",), "structural_tag"),
        (("do_sample",), "do_sample temperature top_k top_p min_p seed"),
        (("beam_width",), "beam_width length_penalty early_stopping beam_search_diversity_rate"),
    ],
)
def test_an_engine_refuses_the_fields_that_need_what_it_lacks(missing: tuple[str, ...], refused: str) -> None:
    found = refusals(ENGINE, EVERYTHING.difference(missing))
    assert {str(getattr(name, "value", name)) for name in found} == {*refused.split()} and all(found.values())


def test_an_engine_with_beams_for_every_request_refuses_what_beams_have_not() -> None:
    found = refusals(replace(ENGINE, beams=4), EVERYTHING)
    assert {"temperature", "seed", "top_logprobs", "prompt_logprobs", GuideKind.REGEX} < set(found)
    assert not {"beam_width", "length_penalty", "min_new_tokens", "needs_logprobs"} & set(found)


def test_a_vector_has_at_most_as_many_dimensions_as_those_of_the_model() -> None:
    limits = replace(ENGINE, task="embed", dimensions=8)
    assert supported(asking(pooling=Pooling(dimensions=8)), limits, EVERYTHING).pooling == Pooling(dimensions=8)
    with pytest.raises(InvalidRequestError, match="'dimensions' is 9: expected at most 8"):
        supported(asking(pooling=Pooling(dimensions=9)), limits, EVERYTHING)


# -- how long a sequence may be ----------------------------------------------------------------------------------------


@by_rows(
    ("prompt", "fields", "engine", "tokens"),
    [
        # What fits is kept as it is.
        *(
            (1, {"max_new_tokens": 1}, {}, 1),
            (50, {"max_new_tokens": 10}, {}, 10),
            (40, {"max_new_tokens": 20}, {}, 20),
        ),
        # No number means what fits, up to max_output_len; a default is lowered to every limit.
        *((3, {}, {}, 20), (40, {}, {}, 20), (45, {}, {}, 15), (30, {}, {"max_seq_len": 31}, 1)),
        *((3, {"default_new_tokens": 30}, {}, 20), (45, {"default_new_tokens": 30}, {}, 15)),
        *((1, {"default_new_tokens": 7}, {}, 7), (1, {"default_new_tokens": 7, "max_new_tokens": 9}, {}, 9)),
        (45, {"min_new_tokens": 15}, {}, 15),
        # The smaller of both longest sequences counts.
        *((n - 10, {"max_new_tokens": 10}, {"max_seq_len": most}, 10) for most, n in ((40, 40), (60, 60), (61, 60))),
        (30, {"max_new_tokens": 10}, {"kv_blocks": 5}, 10),
        (30, {"max_new_tokens": 10}, {"kv_blocks": 6, "draft_tokens": 10}, 10),
        (30, {"max_new_tokens": 10, "beam_width": 2}, {"kv_blocks": 10}, 10),
    ],
)
def test_a_sequence_gets_the_tokens_that_it_asks_for_or_that_fit(
    prompt: int, fields: dict[str, object], engine: dict[str, int], tokens: int
) -> None:
    ids = list(range(prompt))
    assert SequenceLimits(BATCH, replace(ENGINE, **engine)).fit(asking(**fields), ids) == (ids, tokens)


@by_rows(
    ("prompt", "fields", "engine", "error", "message"),
    [
        (
            51,
            {"max_new_tokens": 5},
            {},
            PromptTooLongError,
            r"51 tokens, and max_input_len is 50: .*option\.max_input_len",
        ),
        (
            45,
            {"max_new_tokens": 16},
            {},
            PromptTooLongError,
            r"asks for 16 new ones, .* have 60 together \(max_seq_len\): 15 are left",
        ),
        (
            30,
            {},
            {"max_seq_len": 30},
            PromptTooLongError,
            r"the prompt has 30 tokens, .* have 30 together \(max_seq_len\): 0 are left",
        ),
        (
            30,
            {},
            {"max_seq_len": 29},
            PromptTooLongError,
            r"the prompt has 30 tokens, .* have 29 together \(max_seq_len\): 0 are left",
        ),
        *(
            (n - 10, {"max_new_tokens": 11}, {"max_seq_len": most}, PromptTooLongError, f"may have {n} ")
            for most, n in ((40, 40), (60, 60), (61, 60))
        ),
        (
            1,
            {"max_new_tokens": 21},
            {},
            InvalidRequestError,
            r"21 new tokens, and max_output_len is 20: .*max_output_len",
        ),
        (45, {"min_new_tokens": 16}, {}, InvalidRequestError, r"at least 16 new tokens, .*15 .*is 20, max_seq_len 60"),
        (0, {"max_new_tokens": 5}, {}, InvalidRequestError, "the prompt is empty"),
        (
            *(30, {"max_new_tokens": 10}, {"kv_blocks": 5, "draft_tokens": 10}, PromptTooLongError),
            "need 6 KV cache blocks, .*5",
        ),
        (
            *(30, {"max_new_tokens": 10}, {"kv_blocks": 4}, PromptTooLongError),
            r"30 .*10 new tokens need 5 KV cache blocks, .*4: .*option\.kv_cache_free_gpu_mem_fraction",
        ),
        (
            *(30, {"max_new_tokens": 10, "beam_width": 2}, {"kv_blocks": 9}, PromptTooLongError),
            "in 2 beams need 10 KV cache blocks, the engine has 9",
        ),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(
    prompt: int, fields: dict[str, object], engine: dict[str, int], error: type[RequestError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        SequenceLimits(BATCH, replace(ENGINE, **engine)).fit(asking(**fields), [5] * prompt)
    assert type(caught.value) is error


def test_truncation_keeps_the_end_of_the_prompt() -> None:
    limits, request = SequenceLimits(BATCH, ENGINE), asking(max_new_tokens=5, truncate=3)
    assert limits.fit(request, list(range(10, 80))) == ([77, 78, 79], 5)
    assert limits.fit(request, [5, 6]) == ([5, 6], 5)


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    assert SequenceLimits(BATCH, ENGINE).fit(asking(max_new_tokens=2), [3, 99]) == ([3, 99], 2)
    with pytest.raises(InvalidRequestError, match=r"a token with the id 100, .* its ids end at 99; leave that"):
        SequenceLimits(BATCH, ENGINE).fit(asking(max_new_tokens=2), [3, 100, 5])
    unbounded = dataclasses.replace(BATCH, vocab_size=None)
    assert SequenceLimits(unbounded, ENGINE).fit(asking(max_new_tokens=2), [1000]) == ([1000], 2)


def test_a_sequence_has_the_blocks_of_all_its_tokens_and_one_to_spare() -> None:
    blocks = SequenceLimits(BATCH, ENGINE).blocks
    assert [blocks(prompt, new) for prompt, new in ((1, 1), (9, 1), (9, 2), (30, 10), (30, 11))] == [2, 2, 3, 5, 6]


# -- what an engine does not honour ------------------------------------------------------------------------------------

VALUES: dict[str, object] = {
    **{"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": True, "temperature": 0.5, "top_k": 4, "top_p": 0.5},
    **{"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 0, "ignore_eos": True},
    **{"n": 2, "best_of": 2, "min_p": 0.1, "no_repeat_ngram_size": 1, "beam_width": 2, "length_penalty": 0.5},
    **{"early_stopping": True, "beam_search_diversity_rate": 0.5, "stop": ("x",), "stop_token_ids": (3,)},
    **{"logprobs": True, "asks_logprobs": True, "needs_logprobs": True, "top_logprobs": 2, "truncate": 4},
    **{"bad": ("x",), "adapter": "french", "default_new_tokens": 30, "template": {"tools": []}, "guide": GUIDE},
    **{"shown_tokens": ("<tool_call>",), "guide_from": "tool_choice", "prompt_only": True, "priority": -1},
    **{"prompt_logprobs": 0, "logit_bias": ((3, 1.0),), "cache_salt": "team"},
    "images": (ImageSource("data:,", "messages[0].content[0]"),),
    "thinking": ThinkingBudget(30, "<think>", ("</think>",)),
}
"""A value of each field that a client sets."""
NAMES = {
    **{"beam_width": "'num_beams' ('beam_width')", "bad": "'bad_words' ('bad_sequences')", "adapter": "'adapters'"},
    **{"needs_logprobs": "'logprobs' or 'best_of'", "guide": "a regular expression"},
    "images": "a content part with an image",
}
"""What clients call them, where that is not the field's name."""


def test_every_field_of_a_request_has_a_value_here() -> None:
    of_other_tasks = {"pooling", "pair"}
    assert set(VALUES) == set(FIELDS) - {"prompt", "prompt_ids", "messages", "sampling"} - of_other_tasks


@by_rows("name", VALUES)
def test_what_an_engine_does_not_honour_is_refused_by_name_and_the_server_honours_the_rest(name: str) -> None:
    trait = FIELDS[name].trait
    needed = Feature.REGEX if name == "guide" else trait.feature or name
    whole = {} if trait.part_of is None else {trait.part_of.name: VALUES[trait.part_of.name]}
    request = asking(**{name: VALUES[name], **whole})
    supported(request, ENGINE, EVERYTHING)
    if trait.honoured_by == "server":
        supported(request, ENGINE, frozenset())
        return
    with pytest.raises(UnsupportedParameterError) as caught:
        supported(request, ENGINE, EVERYTHING - {needed})
    shown = NAMES.get(name, f"'{name}'")
    assert str(caught.value).startswith(f"not supported by this backend: {shown}")
    assert (trait.advice or shown) in str(caught.value)
    assert ";" not in str(caught.value).replace(trait.advice, "") or name == "guide"
    if whole:
        supported(asking(**{name: VALUES[name]}), ENGINE, frozenset())  # no effect without what it is part of


@by_rows(
    ("kind", "feature"),
    [
        *((GuideKind.JSON_OBJECT, Feature.JSON), (GuideKind.JSON_SCHEMA, Feature.JSON)),
        *((GuideKind.REGEX, Feature.REGEX), (GuideKind.GRAMMAR, Feature.GRAMMAR)),
    ],
)
def test_a_guide_needs_an_engine_that_constrains_in_its_way(kind: GuideKind, feature: Feature) -> None:
    request = asking(guide=Guide(kind, "a"), guide_from="tool_choice")
    supported(request, ENGINE, frozenset({feature}))
    with pytest.raises(UnsupportedParameterError, match=r"'tool_choice', which needs a .*guided_decoding_backend"):
        supported(request, ENGINE, EVERYTHING - {feature})


def test_everything_that_is_missing_is_in_one_message() -> None:
    request = asking(bad=("x",), do_sample=True, min_p=0.1, guide=GUIDE)
    with pytest.raises(UnsupportedParameterError, match=r"'min_p': .*; 'bad_words' .*; a regular expression: "):
        supported(request, ENGINE, frozenset({"do_sample"}))


@by_rows(("asks", "needs", "free"), list(product((False, True), repeat=3)))
def test_log_probabilities_go_to_those_who_want_them_or_where_they_are_free(
    asks: bool, needs: bool, free: bool
) -> None:
    request = asking(logprobs=True, asks_logprobs=asks, needs_logprobs=needs)
    features = frozenset({Feature.LOGPROBS, Feature.FREE_LOGPROBS} if free else {Feature.LOGPROBS})
    assert supported(request, ENGINE, features).logprobs is (asks or needs or free)
    if not needs:
        assert not supported(request, ENGINE, features - {Feature.LOGPROBS}).logprobs


def test_beams_have_log_probabilities_where_the_engine_has_them_of_beams() -> None:
    request, features = asking(beam_width=2, logprobs=True, asks_logprobs=True), EVERYTHING - {Feature.BEAM_LOGPROBS}
    assert supported(request, ENGINE, EVERYTHING).logprobs
    assert not supported(request, ENGINE, features).logprobs  # an answer's format alone needs none
    with pytest.raises(UnsupportedParameterError, match="'logprobs' with 'num_beams'"):
        supported(replace(request, needs_logprobs=True), ENGINE, features)
    with pytest.raises(UnsupportedParameterError, match="'top_logprobs'"):
        supported(replace(request, top_logprobs=2), ENGINE, EVERYTHING)


# -- engines with a number of beams ------------------------------------------------------------------------------------


@by_rows(
    ("fields", "beams", "most", "changed"),
    [
        # A request without beams gets the engine's, and its best are returned.
        *(({"n": n, "max_new_tokens": 7}, 4, 0, {"beam_width": 4}) for n in (1, 3, 4)),
        ({"n": 3, "best_of": 4}, 4, 0, {"beam_width": 4, "best_of": None}),
        ({"beam_width": 4, "n": 2, "length_penalty": 0.5}, 4, 0, {}),
        *((fields, 0, 0, {}) for fields in ({}, {"do_sample": True}, {"beam_width": 3}, {"guide": GUIDE})),
        *(({"beam_width": width}, 0, 4, {}) for width in (1, 2, 4)),
    ],
)
def test_an_engine_runs_requests_with_its_number_of_beams(
    fields: dict[str, object], beams: int, most: int, changed: dict[str, object]
) -> None:
    limits = replace(ENGINE, beams=beams, most_beams=most)
    assert supported(asking(**fields), limits, EVERYTHING) == asking(**{**fields, **changed})


@by_rows(
    ("fields", "beams", "most", "problem"),
    [
        ({"beam_width": 3}, 4, 0, r"with 4 beams \(option.max_beam_width\): 'num_beams' .*is 3, expected 4, or none$"),
        ({"n": 5}, 4, 0, "'n' or 'best_of' is 5, expected at most 4$"),
        ({"best_of": 5}, 4, 0, "'n' or 'best_of' is 5, expected at most 4$"),
        ({"do_sample": True}, 4, 0, "beams are not sampled, send 'do_sample': false or 'temperature': 0"),
        ({"do_sample": True, "n": 5}, 4, 0, "'best_of' is 5, expected at most 4; beams are not sampled"),
        ({"beam_width": 5}, 0, 4, r"is 5, expected at most 4: .*option\.max_beam_width"),
        *(
            ({"guide": GUIDE, "beam_width": width}, 4, 0, "a guide with beams: .*leave out the guide")
            for width in (1, 4)
        ),
        ({"guide": GUIDE, "beam_width": 4}, 0, 0, "a guide with beams: .*leave out the guide"),
    ],
)
def test_what_cannot_run_with_that_many_beams_is_refused_with_the_reason(
    fields: dict[str, object], beams: int, most: int, problem: str
) -> None:
    with pytest.raises(UnsupportedParameterError, match=problem):
        supported(asking(**fields), replace(ENGINE, beams=beams, most_beams=most), EVERYTHING)


# -- what an executor gets of a request --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lower_case() -> Tokenizer:
    """Words by space, in lower case, with <s> before a text; <end> ends one and is not listed as special."""
    vocabulary = {word: number for number, word in enumerate(("<unk>", "<s>", "<end>", "the", "wolf", "ran"))}
    raw = RawTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["<unk>", "<s>"])
    return Tokenizer(raw, special_tokens={}, end_ids=[END], templates={}, origin=Path("words"))


def message(
    tokenizer: Tokenizer,
    request: GenerationRequest,
    max_new_tokens: int = 9,
    seed: int | None = None,
    adapter: Adapter | None = None,
) -> Submit:
    return Translator(tokenizer).message(7, request, [3, 4], max_new_tokens, seed, adapter)


def text_of(sequence: OutputSequence, *token_ids: int) -> str:
    take(sequence, token_ids)
    sequence.finish(FinishReason.LENGTH)
    return "".join(token.text for token in sequence.drain().tokens)


def test_the_most_likely_tokens_are_asked_for_and_their_texts_are_those_inside_a_text(tokenizer: Tokenizer) -> None:
    request = asking(top_logprobs=3, logprobs=True)
    assert message(tokenizer, request).top_logprobs == 3
    assert message(tokenizer, asking()).top_logprobs == 0
    (sequence,) = Translator(tokenizer).sequences(request, [3])
    (id_,) = tokenizer.encode("the wolf", False)[-1:]
    take(sequence, [5], [Ranked(-1.0, [id_], [-1.0])])
    (token,) = sequence.drain().tokens
    assert isinstance(token, RankedToken)
    assert [each.text for each in token.top] == [" wolf"]
    assert type(Translator(tokenizer).sequences(asking(), [3])[0]) is OutputSequence


def test_a_message_has_what_the_request_asks_of_the_engine_and_nothing_else(lower_case: Tokenizer) -> None:
    """tests/integration/test_request_fields.py goes through every field."""
    assert message(lower_case, asking()) == Submit(7, [3, 4], Sampling(9), [END])
    sampled = {"do_sample": True, "temperature": 0.7, "beam_width": 4, "length_penalty": 0.5, "n": 3, "seed": 5}
    guide, adapter = Guide(GuideKind.REGEX, "a+"), Adapter("french", 3, "adapters/french")
    fields: dict[str, Any] = {"bad": ("x", "y"), "guide": guide, "top_logprobs": 2, "prompt_logprobs": 1}
    fields["logit_bias"] = ((3, 1.0),)
    request = asking(**sampled, **fields, stop_token_ids=(4,), ignore_eos=True, cache_salt="team")
    origin = RequestOrigin("story-1", client="key:a", salt="key a")
    images = (Image(b"a wolf", 3, 2, 5),)
    sent = Translator(lower_case).message(7, request, [3, 4], 9, 11, adapter, origin, images)
    sampling = replace(request.sampling, max_new_tokens=9, seed=11)
    own: dict[str, Any] = {
        "adapter": adapter,
        "origin": "story-1",
        "client": "key:a",
        "cache_salt": "group team",
        "images": images,
    }
    assert sent == Submit(7, [3, 4], sampling, [4], **fields, **own)
    sent = Translator(lower_case).message(7, asking(), [3, 4], 9, None, None, origin)
    assert sent.cache_salt == "key a", "prompts of a key are reused for that key alone"


@pytest.mark.parametrize(
    ("fields", "asked"),
    [({}, False), ({"logprobs": True}, True), ({"best_of": 2}, True), ({"logprobs": True, "best_of": 2}, True)],
)
def test_ranking_asks_for_log_probabilities_too(lower_case: Tokenizer, fields: dict[str, object], asked: bool) -> None:
    request = asking(**fields)
    assert message(lower_case, request).logprobs is asked
    sequence = Translator(lower_case).sequences(request, [3])[0]
    take(sequence, [3], [-0.5])
    sequence.finish(FinishReason.LENGTH)
    assert sequence.finished is not None
    assert sequence.finished.cumulative_logprob == (-0.5 if asked else None)


def test_a_stop_string_goes_to_the_engine_where_its_tokens_mean_exactly_it(lower_case: Tokenizer) -> None:
    assert message(lower_case, asking(stop=("wolf", "Wolf", "the wolf", "ran"))).stop == ["wolf", "ran"]


@pytest.mark.parametrize(
    ("fields", "seeded", "seeds"),
    [
        ({"n": 3, "seed": 2**64 - 2}, True, [2**64 - 2, 2**64 - 1, 0]),
        ({"n": 2, "best_of": 3, "seed": 1}, True, [1, 2, 3]),
        ({"seed": 5}, False, [None]),
        ({"seed": 7, "do_sample": False}, True, [None]),
    ],
)
def test_each_sequence_has_a_seed_of_its_own_where_one_counts(
    lower_case: Tokenizer, fields: dict[str, object], seeded: bool, seeds: list[int | None]
) -> None:
    sequences = Translator(lower_case, seeded=seeded).sequences(asking(**{"do_sample": True, **fields}), [3])
    assert [(each.index, each.seed) for each in sequences] == [*enumerate(seeds)]


def test_each_request_without_a_seed_gets_another_unless_the_engine_samples_faster_without(
    lower_case: Tokenizer,
) -> None:
    drawn = [Translator(lower_case).sequences(asking(n=2, do_sample=True), [3]) for _ in range(50)]
    seeds = [first.seed for first, second in drawn if first.seed is not None and second.seed == first.seed + 1]
    assert len(set(seeds)) == 50
    assert 2**30 < max(seeds) < 2**32
    undrawn = Translator(lower_case, draws_seeds=False)
    for seed in (None, 7):
        (sequence,) = undrawn.sequences(asking(do_sample=True, seed=seed), [3])
        assert sequence.seed == seed


def test_end_ids_have_no_text_even_where_the_tokenizer_does_not_list_them_as_special(lower_case: Tokenizer) -> None:
    assert lower_case.end_ids.isdisjoint(lower_case.special_ids)
    sequences = Translator(lower_case).sequences(asking(n=2), [3])
    assert text_of(sequences[0], 4, END) == "wolf"
    assert text_of(sequences[1], 1, 4) == "wolf"


@pytest.mark.parametrize(
    ("engine_stops", "stops_ignored", "fields", "sent", "ends"),
    [
        (True, False, {}, ([END, 4], ["wolf"]), {}),
        (True, False, {"ignore_eos": True}, ([4], ["wolf"]), {}),
        (False, False, {}, ([], []), {4: FinishReason.STOP, END: FinishReason.END_TOKEN}),
        (False, False, {"ignore_eos": True}, ([], []), {4: FinishReason.STOP}),
        # A beam that is cut later would not be the best one.
        (False, False, {"beam_width": 2}, ([END, 4], ["wolf"]), {}),
        (True, True, {}, ([END, 4], ["wolf"]), {}),
        (True, True, {"ignore_eos": True}, ([], []), {4: FinishReason.STOP}),
    ],
)
def test_an_engine_that_does_not_stop_is_given_no_stops_and_the_sequences_know_them(
    lower_case: Tokenizer,
    engine_stops: bool,
    stops_ignored: bool,
    fields: dict[str, object],
    sent: tuple[list[int], list[str]],
    ends: dict[int, FinishReason],
) -> None:
    translator = Translator(lower_case, engine_stops, stops_ignored=stops_ignored)
    request = asking(stop=("wolf",), stop_token_ids=(4,), **fields)
    message = translator.message(1, request, [3], 9, None, None)
    assert (message.stop_token_ids, message.stop) == sent
    for stop_id in (4, END):
        one = translator.sequences(replace(request, stop=()), [3])[0]
        assert take(one, [5, stop_id, 3]) is (stop_id not in ends)
        assert (one.finished and one.finished.reason) == ends.get(stop_id)
    assert not take(translator.sequences(request, [3])[0], [5, 4])


def test_a_first_token_has_the_space_between_it_and_the_prompt(tokenizer: Tokenizer) -> None:
    prompt, ids = tokenizer.encode("the big", False), tokenizer.encode("the big wolf ran", False)
    (one,) = Translator(tokenizer).sequences(asking(), prompt)
    assert text_of(one, ids[len(prompt)]) == " wolf"


def test_only_special_tokens_are_shown_by_name(lower_case: Tokenizer) -> None:
    request = asking(shown_tokens=("<s>", "the", "<tool_call>"))
    (sequence,) = Translator(lower_case).sequences(request, [3, 4])
    assert text_of(sequence, 1, 4, 0) == "<s>wolf"
