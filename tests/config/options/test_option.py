from __future__ import annotations

from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option, Scope, declaration, option


def test_bounds_include_or_exclude_their_number() -> None:
    closed = Option("k", "d", at_least=1, at_most=3)
    assert [number for number in (0.9, 1, 2, 3, 3.1) if closed.allows(number)] == [1, 2, 3]
    open_ = Option("k", "d", above=1, below=3)
    assert [number for number in (1, 1.1, 2.9, 3) if open_.allows(number)] == [1.1, 2.9]
    assert Option("k", "d").allows(-1e9)
    powers = Option("k", "d", power_of_two=True)
    assert [number for number in (1, 2, 3, 48, 64, 65) if powers.allows(number)] == [1, 2, 64]
    assert [number for number in (-1, 0, 5) if Option("k", "d", at_least=0).allows(number)] == [0, 5]
    assert [number for number in (-1, 0, 5) if Option("k", "d", at_most=0).allows(number)] == [-1, 0]


def test_bounds_are_reported_in_words() -> None:
    assert Option("k", "d", at_least=1, at_most=65535).range_text == "at least 1 and at most 65535"
    assert Option("k", "d", above=0, below=1).range_text == "greater than 0 and less than 1"
    assert Option("k", "d", at_least=0.5).range_text == "at least 0.5"
    assert Option("k", "d", at_least=1, power_of_two=True).range_text == "a power of two and at least 1"
    assert Option("k", "d").range_text == ""


def test_an_effect_on_every_backend_is_that_of_the_declaration() -> None:
    assert Option("k", "d", effect="E").effect_everywhere == "E"
    assert Option("k", "d").effect_everywhere == ""


def test_an_option_without_effect_says_what_happens_instead() -> None:
    assert Option("k", "d", legacy="use another").effect_everywhere == "no effect: use another"
    assert Option("k", "d", legacy="use another", warn=True).effect_everywhere == "no effect any more: use another"


def test_an_option_is_the_models_unless_it_says_otherwise() -> None:
    assert Option("k", "d").scope is Scope.MODEL
    assert [scope.value for scope in Scope] == ["model", "server", "operator", "permission"]


class Fields(OptionGroup):
    tokens: int = option(7, "Tokens.", unit="tokens", aliases=("option.length",))
    port: int | None = option(None, "A port.", key="port", scope=Scope.SERVER)


def test_a_field_has_its_default_and_all_that_is_declared() -> None:
    assert Fields().model_dump() == {"tokens": 7, "port": None}
    assert declaration("tokens", Fields.model_fields["tokens"]) == Option(
        "option.tokens", "Tokens.", unit="tokens", aliases=("option.length",)
    )
    assert declaration("port", Fields.model_fields["port"]) == Option("port", "A port.", scope=Scope.SERVER)
