from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.config.text_format import Field, TextFormatError, parse


def a_message_type() -> type[Message]:
    """`message M { string s = 1; repeated string r = 2; repeated M m = 3; int64 n = 4; }`"""
    file = descriptor_pb2.FileDescriptorProto(name="m.proto", syntax="proto3")
    message = file.message_type.add(name="M")
    kind = descriptor_pb2.FieldDescriptorProto
    for number, (name, type_, label) in enumerate(
        (
            ("s", kind.TYPE_STRING, kind.LABEL_OPTIONAL),
            ("r", kind.TYPE_STRING, kind.LABEL_REPEATED),
            ("m", kind.TYPE_MESSAGE, kind.LABEL_REPEATED),
            ("n", kind.TYPE_INT64, kind.LABEL_OPTIONAL),
        ),
        start=1,
    ):
        message.field.add(
            name=name, number=number, type=type_, label=label, type_name=".M" if name == "m" else None, json_name=name
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message_type: type[Message] = message_factory.GetMessageClass(pool.FindMessageTypeByName("M"))
    return message_type


M = a_message_type()


def fill(message: Message, tree: dict[str, object]) -> Message:
    for name, value in tree.items():
        if name == "m":
            for inner in value:  # type: ignore[attr-defined]
                fill(message.m.add(), inner)
        elif name == "r":
            message.r.extend(value)
        else:
            setattr(message, name, value)
    return message


def fields_of(message: Message) -> list[tuple[str, object]]:
    """What `parse` is to find, without lines."""
    found: list[tuple[str, object]] = []
    if message.s:
        found.append(("s", message.s))
    found += [("r", text) for text in message.r]
    found += [("m", fields_of(inner)) for inner in message.m]
    if message.n:
        found.append(("n", str(message.n)))
    return found


def without_lines(fields: tuple[Field, ...]) -> list[tuple[str, object]]:
    return [
        (field.name, field.value if isinstance(field.value, str) else without_lines(field.value)) for field in fields
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
    message = fill(M(), tree)
    text = text_format.MessageToString(
        message, as_utf8=utf8, pointy_brackets=angle, as_one_line=one_line, use_short_repeated_primitives=True
    )
    assert without_lines(parse(text)) == fields_of(message)


@given(st.text(alphabet=st.sampled_from("ab:{}<>[],;\"'\\\n# 1-.${}x")) | st.text())
def test_any_text_is_read_or_refused_with_its_line(text: str) -> None:
    try:
        parse(text)
    except TextFormatError as error:
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


def test_a_placeholder_is_a_value() -> None:
    assert parse("max_batch_size: ${triton_max_batch_size}") == (
        Field("max_batch_size", "${triton_max_batch_size}", 1),
    )


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb {\n", 2, "a } is missing"),
        ("a: [ 1, 2", 1, "a ] is missing"),
        ("a: [ 1 2 ]", 1, "no comma"),
        ("a = 1", 1, "write a: value"),
        ("a 1", 1, "write a: value"),
        ("\na:\n", 2, "write a: value"),
        ('"a": 1', 1, "write a:"),
        ("a: /models/x", 1, "a path needs quotes"),
        ('a: "x\nb: 1', 1, "no second one"),
        ("a: ${x", 1, "write the value itself"),
        ('a: "\\x"', 1, "write it twice"),
        ("}", 1, "where the name of a field belongs"),
        ("a {" * 60, 1, "inside each other"),
    ],
)
def test_a_mistake_is_told_with_what_to_write(text: str, line: int, says: str) -> None:
    with pytest.raises(TextFormatError, match=says) as caught:
        parse(text)
    assert caught.value.line == line
