"""What an executor gets of a request."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from djl_trtllm.batching.sequence import OutputSequence
from djl_trtllm.batching.translation import Translator
from djl_trtllm.executor.protocol import Ranked, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import Adapter, FinishReason, GenerationRequest, Guide, GuideKind, RankedToken, Sampling

END = 2


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


def asking(**fields: object) -> GenerationRequest:
    """`fields` are those of Sampling and of GenerationRequest."""
    sampling = {name: fields.pop(name) for name in Sampling.__struct_fields__ if name in fields}
    parameters = Sampling(**sampling)  # type: ignore[arg-type]
    return GenerationRequest(prompt_ids=[3], sampling=parameters, **fields)  # type: ignore[arg-type]


def message(
    tokenizer: Tokenizer,
    request: GenerationRequest,
    max_new_tokens: int = 9,
    seed: int | None = None,
    adapter: Adapter | None = None,
) -> Submit:
    return Translator(tokenizer).message(7, request, [3, 4], max_new_tokens, seed, adapter)


def text_of(sequence: OutputSequence, *token_ids: int) -> str:
    sequence.take(token_ids, None)
    sequence.finish(FinishReason.LENGTH)
    return "".join(token.text for token in sequence.drain().tokens)


def test_the_most_likely_tokens_are_asked_for_and_their_texts_are_those_inside_a_text(tokenizer: Tokenizer) -> None:
    request = asking(top_logprobs=3, logprobs=True)
    assert message(tokenizer, request).top_logprobs == 3
    assert message(tokenizer, asking()).top_logprobs == 0
    (sequence,) = Translator(tokenizer).sequences(request, [3])
    (id_,) = tokenizer.encode("the wolf", False)[-1:]
    sequence.take([5], [Ranked(-1.0, [id_], [-1.0])])
    (token,) = sequence.drain().tokens
    assert isinstance(token, RankedToken)
    assert [each.text for each in token.top] == [" wolf"]
    assert type(Translator(tokenizer).sequences(asking(), [3])[0]) is OutputSequence


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_plain_message_has_the_prompt_the_end_ids_and_nothing_else(lower_case: Tokenizer) -> None:
    assert message(lower_case, asking()) == Submit(7, [3, 4], Sampling(9), [END])


def test_the_executor_gets_the_requests_sampling_with_its_own_length_and_seed(lower_case: Tokenizer) -> None:
    """tests/integration/test_request_fields.py goes through every field."""
    request = asking(do_sample=True, temperature=0.7, beam_width=4, length_penalty=0.5, n=3, seed=5, max_new_tokens=0)
    expected = msgspec.structs.replace(request.sampling, max_new_tokens=9, seed=11)
    assert message(lower_case, request, seed=11).sampling == expected


def test_words_guides_and_adapters_reach_the_executor(lower_case: Tokenizer) -> None:
    guide, adapter = Guide(GuideKind.REGEX, "a+"), Adapter("french", 3, "adapters/french")
    submit = message(lower_case, asking(guide=guide, bad=("x", "y")), adapter=adapter)
    assert (submit.guide, submit.adapter, submit.bad) == (guide, adapter, ["x", "y"])


def test_the_executor_gets_the_clients_id_of_the_request(lower_case: Tokenizer) -> None:
    assert message(lower_case, asking()).origin == ""
    assert Translator(lower_case).message(7, asking(), [3], 9, None, None, "story-1").origin == "story-1"


def test_end_ids_are_stop_ids_unless_they_are_ignored(lower_case: Tokenizer) -> None:
    assert message(lower_case, asking(stop_token_ids=(4,))).stop_token_ids == [END, 4]
    assert message(lower_case, asking(stop_token_ids=(4,), ignore_eos=True)).stop_token_ids == [4]


@pytest.mark.parametrize(
    ("fields", "asked"),
    [({}, False), ({"logprobs": True}, True), ({"best_of": 2}, True), ({"logprobs": True, "best_of": 2}, True)],
)
def test_ranking_asks_for_log_probabilities_too(lower_case: Tokenizer, fields: dict[str, object], asked: bool) -> None:
    request = asking(**fields)
    assert message(lower_case, request).logprobs is asked
    sequence = Translator(lower_case).sequences(request, [3])[0]
    sequence.take([3], [-0.5])
    sequence.finish(FinishReason.LENGTH)
    assert sequence.finished is not None
    assert sequence.finished.cumulative_logprob == (-0.5 if asked else None)


def test_a_stop_string_goes_to_the_engine_where_its_tokens_mean_exactly_it(lower_case: Tokenizer) -> None:
    assert message(lower_case, asking(stop=("wolf", "Wolf", "the wolf", "ran"))).stop == ["wolf", "ran"]


def test_a_stop_string_is_looked_at_as_it_stands_with_no_token_put_before_it_or_left_out(
    lower_case: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def encode(*arguments: object) -> list[int]:
        asked.append(arguments)
        return [4]

    def decode(*arguments: object) -> str:
        asked.append(arguments)
        return "wolf"

    monkeypatch.setattr(lower_case, "encode", encode)
    monkeypatch.setattr(lower_case, "decode", decode)
    translator = Translator(lower_case)
    for _ in range(3):
        translator.message(1, asking(stop=("wolf",)), [3], 9, None, None)
    assert asked == [("wolf", False), ([4], False)]  # and once is enough


# -- sequences ---------------------------------------------------------------------------------------------------------


def test_there_are_as_many_sequences_as_are_generated(lower_case: Tokenizer) -> None:
    sequences = Translator(lower_case).sequences(asking(n=2, best_of=3), [3])
    assert [sequence.index for sequence in sequences] == [0, 1, 2]


def test_seeds_count_up_from_the_given_one(lower_case: Tokenizer) -> None:
    sequences = Translator(lower_case).sequences(asking(n=3, do_sample=True, seed=2**64 - 2), [3])
    assert [sequence.seed for sequence in sequences] == [2**64 - 2, 2**64 - 1, 0]


def test_a_seed_of_its_own_is_drawn_for_each_request(lower_case: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def draw(bits: int) -> int:
        drawn.append(bits)
        return 100 * len(drawn)

    monkeypatch.setattr("secrets.randbits", draw)
    translator = Translator(lower_case)
    seeds = [[sequence.seed for sequence in translator.sequences(asking(n=2, do_sample=True), [3])] for _ in range(2)]
    assert seeds == [[100, 101], [200, 201]]
    assert drawn == [32, 32]


def test_greedy_sequences_have_no_seed(lower_case: Tokenizer) -> None:
    (sequence,) = Translator(lower_case).sequences(asking(seed=7), [3])
    assert sequence.seed is None
    assert message(lower_case, asking(), seed=None).sampling.seed is None


def test_end_ids_have_no_text_even_where_the_tokenizer_does_not_list_them_as_special(lower_case: Tokenizer) -> None:
    assert lower_case.end_ids.isdisjoint(lower_case.special_ids)
    sequences = Translator(lower_case).sequences(asking(n=2), [3])
    assert text_of(sequences[0], 4, END) == "wolf"
    assert text_of(sequences[1], 1, 4) == "wolf"


def test_sequences_know_their_stop_strings_and_the_prompt(tokenizer: Tokenizer) -> None:
    prompt, ids = tokenizer.encode("the big", False), tokenizer.encode("the big wolf ran", False)
    new = ids[len(prompt) :]
    assert ids[: len(prompt)] == prompt
    sequences = Translator(tokenizer).sequences(asking(n=2, stop=("ran",)), prompt)
    assert text_of(sequences[0], *new[:1]) == " wolf"
    assert not sequences[1].take(new, None)


# -- an engine that is given no stops --------------------------------------------------------------------------------


def test_an_engine_that_does_not_stop_is_given_neither_stop_strings_nor_stop_ids(lower_case: Tokenizer) -> None:
    translator = Translator(lower_case, engine_stops=False)
    told = translator.message(1, asking(stop=("wolf",), stop_token_ids=(4,)), [3], 9, None, None)
    assert (told.stop_token_ids, told.stop) == ([], [])


def test_its_sequences_know_their_stop_ids_and_what_each_means(lower_case: Tokenizer) -> None:
    translator = Translator(lower_case, engine_stops=False)
    (one,) = translator.sequences(asking(stop_token_ids=(4,)), [3])
    assert not one.take([5, 4], None)
    assert one.finished is not None and one.finished.reason is FinishReason.STOP
    (one,) = translator.sequences(asking(stop_token_ids=(4,)), [3])
    assert not one.take([5, END], None)
    assert one.finished is not None and one.finished.reason is FinishReason.END_TOKEN
    (one,) = translator.sequences(asking(stop_token_ids=(4,), ignore_eos=True), [3])
    assert one.take([5, END], None)


def test_beams_are_ended_by_every_engine(lower_case: Tokenizer) -> None:
    translator = Translator(lower_case, engine_stops=False)
    request = asking(stop=("wolf",), stop_token_ids=(5,), beam_width=2)
    told = translator.message(1, request, [3], 9, None, None)
    assert (told.stop_token_ids, told.stop) == ([END, 5], ["wolf"])
    assert all(sequence.take([3, 5], None) for sequence in translator.sequences(request, [3]))


def test_an_engine_that_stops_is_left_to_it(lower_case: Tokenizer) -> None:
    (one,) = Translator(lower_case).sequences(asking(stop_token_ids=(4,)), [3])
    assert one.take([5, 4, 6], None)


def test_sequences_have_no_seed_where_the_engine_ignores_it(lower_case: Tokenizer) -> None:
    request = asking(do_sample=True, seed=5)
    assert [sequence.seed for sequence in Translator(lower_case).sequences(request, [3])] == [5]
    assert [sequence.seed for sequence in Translator(lower_case, seeded=False).sequences(request, [3])] == [None]


def test_only_special_tokens_are_shown_by_name(lower_case: Tokenizer) -> None:
    request = asking(shown_tokens=("<s>", "the", "<tool_call>"))
    (sequence,) = Translator(lower_case).sequences(request, [3, 4])
    assert text_of(sequence, 1, 4, 0) == "<s>wolf"
