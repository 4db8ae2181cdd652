from __future__ import annotations

import json

from djl_trtllm.api.base import Prompt
from djl_trtllm.api.output import CollectedSequence, SequenceCollector, WholeEncoder, dump_line
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from tests.api.scripts import FAILED, FAILURE, answer, several


def test_sequences_grow_and_end_one_by_one() -> None:
    collector = SequenceCollector(2)
    updates = several(2)
    assert [collector.add(update) for update in updates] == [False, False, False, True]
    assert [sequence.text for sequence in collector.sequences] == ["00 01", "10 11"]
    assert [sequence.finished for sequence in collector.sequences] == [updates[2].finished, updates[3].finished]
    assert CollectedSequence().text == ""


def test_a_chunk_may_end_a_sequence_and_add_to_it() -> None:
    collector = SequenceCollector(1)
    finished = SequenceResult(FinishReason.LENGTH, 1, None, None)
    assert collector.add(OutputChunk(0, [Token(1, "a", None, False)], finished))
    assert (collector.sequences[0].text, collector.sequences[0].finished) == ("a", finished)


def test_a_line_has_no_character_that_ends_a_line() -> None:
    text = "".join(map(chr, (*range(0x20), 0x7F, 0x85, 0x2028, 0x2029, 0xFEFF, 0xE9)))
    line = dump_line({"text": text})
    assert json.loads(line) == {"text": text}
    assert len(line.decode().splitlines()) == 1
    assert dump_line("a\x85é\u2028🦊\u2029") == '"a\\u0085é\\u2028🦊\\u2029"'.encode()
    assert dump_line({"a": [1, None]}) == b'{"a":[1,null]}'


def test_each_generation_has_its_own_sequences() -> None:
    collector = SequenceCollector(2, 2)
    for generation, first in ((1, "c"), (0, "a")):
        for index in (0, 1):
            finished = SequenceResult(FinishReason.LENGTH, 1, None, None)
            token = Token(1, chr(ord(first) + index), None, False)
            done = collector.add(OutputChunk(index, [token], finished, generation))
    assert done
    assert [each.text for each in collector.sequences] == ["a", "b", "c", "d"]


class Texts(WholeEncoder):
    """The texts of all sequences."""

    def begin(self, prompt: Prompt) -> None:
        pass

    def _body(self) -> bytes:
        return " ".join(sequence.text for sequence in self._output.sequences).encode()


def test_a_whole_answer_comes_when_every_sequence_has_ended() -> None:
    encoder = Texts(2)
    assert (encoder.stream, encoder.content_type, encoder.wants_prompt_tokens) == (False, "application/json", False)
    assert [encoder.encode(chunk) for chunk in several(2)] == [b"", b"", b"", b"00 01 10 11"]
    assert len(Texts(2, 3)._output.sequences) == 6


def test_a_whole_answer_never_comes_with_an_error() -> None:
    assert answer(Texts(1), FAILED) == Texts(1).error(FAILURE) == b""
