from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.config.compat.foreign_format import FormatError
from djl_trtllm.config.compat.triton import Field, parse
from tests.support.tables import by_table


def a_message_type() -> type[Message]:
    """`message M { string s = 1; repeated string r = 2; repeated M m = 3; int64 n = 4; }`"""
    file = descriptor_pb2.FileDescriptorProto(name="m.proto", syntax="proto3")
    message = file.message_type.add(name="M")
    kind = descriptor_pb2.FieldDescriptorProto
    types = {"s": kind.TYPE_STRING, "r": kind.TYPE_STRING, "m": kind.TYPE_MESSAGE, "n": kind.TYPE_INT64}
    for number, (name, type_) in enumerate(types.items(), start=1):
        label = kind.LABEL_REPEATED if name in "rm" else kind.LABEL_OPTIONAL
        of = ".M" if name == "m" else None
        message.field.add(name=name, number=number, type=type_, label=label, type_name=of, json_name=name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message_type: type[Message] = message_factory.GetMessageClass(pool.FindMessageTypeByName("M"))
    return message_type


M = a_message_type()


def fields_of(message: Message) -> list[list[object]]:
    """What `parse` is to find, without lines."""
    found: list[list[object]] = []
    if message.s:
        found.append(["s", message.s])
    found += [["r", text] for text in message.r]
    found += [["m", fields_of(inner)] for inner in message.m]
    if message.n:
        found.append(["n", str(message.n)])
    return found


def without_lines(fields: tuple[Field, ...]) -> list[list[object]]:
    return [
        [field.name, field.value if isinstance(field.value, str) else without_lines(field.value)] for field in fields
    ]


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_leaves = st.fixed_dictionaries(
    {}, optional={"s": _texts, "r": st.lists(_texts, max_size=3), "n": st.integers(-(2**62), 2**62)}
)
_trees = st.recursive(
    _leaves,
    lambda inner: st.builds(
        lambda leaf, members: {**leaf, "m": members}, _leaves, st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@given(_trees, st.booleans(), st.booleans(), st.booleans())
def test_it_reads_what_the_library_writes(tree: dict[str, object], utf8: bool, angle: bool, one_line: bool) -> None:
    message = M(**tree)
    text = text_format.MessageToString(
        message, as_utf8=utf8, pointy_brackets=angle, as_one_line=one_line, use_short_repeated_primitives=True
    )
    assert without_lines(parse(text)) == fields_of(message)


@given(st.text(alphabet=st.sampled_from("ab:{}<>[],;\"'\\\n# 1-.${}x")) | st.text())
def test_any_text_is_read_or_refused_with_its_line(text: str) -> None:
    try:
        parse(text)
    except FormatError as error:
        assert 1 <= error.line <= text.count("\n") + 1
        assert str(error)


def test_every_value_has_its_line() -> None:
    text = '# head\nname: "x"\nparameters {\n  key: "k"\n  value: { string_value:\n  "v"\n "w" } }\nd: [ 1,\n 2 ]\n'
    name, parameters, one, two = parse(text)
    assert (name.line, one.line, two.line) == (2, 8, 9)
    assert isinstance(parameters.value, tuple)
    key, value = parameters.value
    assert (key.value, key.line) == ("k", 4)
    assert value.value == (Field("string_value", "vw", 6),)


@by_table("text", "fields")
def test_fields_are_read_in_every_way_that_they_may_be_written(text: str, fields: list[list[object]]) -> None:
    assert without_lines(parse(text)) == fields


@by_table("text", "line", "says")
def test_a_mistake_is_reported_with_its_line_and_what_to_write(text: str, line: int, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse(text)
    assert (str(caught.value), caught.value.line) == (says, line)


def test_fifty_messages_may_stand_inside_each_other() -> None:
    assert len(parse("a {" * 50 + "}" * 50)) == 1
