from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.config.compat.foreign_format import FormatError
from djl_trtllm.config.compat.text_format import Field, parse


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


def test_a_placeholder_is_a_value() -> None:
    assert parse("max_batch_size: ${triton_max_batch_size}") == (
        Field("max_batch_size", "${triton_max_batch_size}", 1),
    )


def fields(text: str) -> list[tuple[str, object]]:
    return without_lines(parse(text))


def test_fields_may_stand_with_or_without_separators() -> None:
    for text in ("a: 1 b: 2", "a: 1, b: 2", "a: 1; b: 2;", "a: 1,,;b: 2", "a:1\nb:2"):
        assert fields(text) == [("a", "1"), ("b", "2")]
    assert fields("") == fields("# nothing\n \t\n") == []


def test_a_message_has_braces_or_angle_brackets_with_or_without_a_colon() -> None:
    for text in ("a { b: 1 }", "a: { b: 1 }", "a < b: 1 >", "a: <b: 1,>"):
        assert fields(text) == [("a", [("b", "1")])]
    assert fields("a {}") == [("a", [])]


def test_a_list_is_one_field_for_each_member() -> None:
    assert fields("a: [1, 'x' \"y\", ${z}]") == [("a", "1"), ("a", "xy"), ("a", "${z}")]
    assert fields("a [ { b: 1 }, { } ]") == [("a", [("b", "1")]), ("a", [])]
    assert fields("a: [] b: [1,]") == [("b", "1")]


def test_words_are_numbers_names_and_signs() -> None:
    assert fields("a: -1.5e+3 b: KIND_CPU c: .5 d: +x e: true") == [
        ("a", "-1.5e+3"),
        ("b", "KIND_CPU"),
        ("c", ".5"),
        ("d", "+x"),
        ("e", "true"),
    ]


def test_texts_have_escapes_and_either_quote() -> None:
    assert fields(r"""a: "x\n\"\x41\101'" b: 'y"\''""") == [("a", "x\n\"AA'"), ("b", "y\"'")]
    assert fields("a: 'x # no comment' # a comment\nb: 1") == [("a", "x # no comment"), ("b", "1")]


def test_a_field_of_a_message_has_the_line_its_value_begins_on() -> None:
    (field,) = parse("\na:\n{\nb: 1 }")
    assert (field.name, field.line) == ("a", 3)
    assert field.value == (Field("b", "1", 4),)


def test_fifty_messages_may_stand_inside_each_other() -> None:
    assert len(parse("a {" * 50 + "}" * 50)) == 1
    with pytest.raises(FormatError, match=r"^more than 50 nested messages$"):
        parse("a {" * 51 + "}" * 51)


NO_MEANING = "has no meaning here; texts need quotes, and a comment begins with #"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb {\n", 2, "the { is not closed; a } is missing"),
        ("a <\n b: 1", 1, "the < is not closed; a > is missing"),
        ("a: [ 1, 2", 1, "the [ is not closed; a ] is missing"),
        ("a: [ 1 2 ]", 1, "there is no comma between the members of a"),
        ("a: [ 1,\n { } { } ]", 2, "there is no comma between the members of a"),
        ("a { ]", 1, "there is ] where the name of a field belongs"),
        ("a { >", 1, "there is > where the name of a field belongs"),
        ("}", 1, "there is } where the name of a field belongs"),
        ("\n, a: 1", 2, "there is , where the name of a field belongs"),
        ("a: 1 2: 3", 1, "there is 2 where the name of a field belongs"),
        ("a { '}' }", 1, "'}' has quotes, and names have none; write }:"),
        ('"a": 1', 1, '"a" has quotes, and names have none; write a:'),
        ("a = 1", 1, "there is = where a : belongs; write a: value"),
        ("1 = 1", 1, "there is = where a : belongs; write name: value"),
        ("a 1", 1, "a has no : behind it; write a: value"),
        ("a", 1, "a has no : behind it; write a: value"),
        ("a }", 1, "a has no : behind it; write a: value"),
        ("\na:\n", 2, "a has no value; write a: value"),
        *((f"a: {mark}", 1, "a has no value; write a: value") for mark in "}>]:,;"),
        ("a: [,1]", 1, "there is , where a value belongs"),
        ("a: [[1]]", 1, "there is [ where a value belongs"),
        ("a: /models/x", 1, "a path needs quotes, and a comment begins with #"),
        ("a: 1\n@", 2, f"'@' {NO_MEANING}"),
        ("X @", 1, f"'@' {NO_MEANING}"),
        ("a: %", 1, f"'%' {NO_MEANING}"),
        ('a: "x\nb: 1', 1, 'the " has no second one on this line; texts begin and end with a quote'),
        ("a: 'x\nb: 1", 1, "the ' has no second one on this line; texts begin and end with a quote"),
        ("a: ${x", 1, "the ${ has no } on this line; write the value itself in its place"),
        ('a: "\\x"', 1, '"\\x" has a \\ that begins no escape; write it twice'),
    ],
)
def test_a_mistake_is_reported_with_its_line_and_what_to_write(text: str, line: int, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse(text)
    assert (str(caught.value), caught.value.line) == (says, line)
