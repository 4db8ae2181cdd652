"""The declaration of one option: everything about it except its type and default, which its field holds."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from pydantic import Field
from pydantic.fields import FieldInfo


class Scope(enum.Enum):
    """Whose an option is, which decides its order of precedence (see `resolve.precedence`).

    MODEL options travel with the model. SERVER options configure the process, and the operator's settings override a
    model's. OPERATOR options let a model do something to the machine, so no file of a model directory can set them.
    PERMISSION options let code of the model run: a model directory may set them unless the operator sets them.
    """

    MODEL = "model"
    SERVER = "server"
    OPERATOR = "operator"
    PERMISSION = "permission"


@dataclass(frozen=True)
class Option:
    """Documentation and limits of one option, which a field of `Options` carries (see `option`).

    `key` is what users write (`option.max_num_tokens`, or a bare server key) and `aliases` are further spellings.
    `at_least`, `above`, `at_most`, `below` and `power_of_two` bound a number. `value_aliases` maps other spellings to
    values.
    `effect` says what the value does whatever the backend; where that is "", the backends' option maps say it.
    `legacy` says what happens instead, of an option that is accepted and has no effect; `warn` whether setting it is a
    warning, and `under_djl` what it does inside DJL Serving, if that is anything.
    `default_note` explains a default that is not a plain value; `example` is shown where the default is empty.
    """

    key: str
    description: str
    aliases: tuple[str, ...] = ()
    unit: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    power_of_two: bool = False
    value_aliases: Mapping[str, str] = field(default_factory=dict)
    effect: str = ""
    legacy: str = ""
    under_djl: str = ""
    warn: bool = False
    source: str = ""
    default_note: str = ""
    example: str = ""
    scope: Scope = Scope.MODEL

    @property
    def effect_everywhere(self) -> str:
        """What the option does on every backend, "" where each has its own effect."""
        if self.legacy:
            return f"no effect{' any more' if self.warn else ''}: {self.legacy}"
        return self.effect

    @property
    def range_text(self) -> str:
        """The numeric bounds as text, "" if there are none."""
        bounds = (
            ("at least", self.at_least),
            ("greater than", self.above),
            ("at most", self.at_most),
            ("less than", self.below),
        )
        texts = ["a power of two"] if self.power_of_two else []
        return " and ".join([*texts, *(f"{text} {bound:g}" for text, bound in bounds if bound is not None)])

    def allows(self, number: float) -> bool:
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
            and (not self.power_of_two or int(number).bit_count() == 1)
        )


_EXTRA = "option"


def option(default: Any, description: str, *, key: str = "", **declared: Any) -> Any:
    """A field of an option group: its default, and all that `Option` says.

    Without `key` users write `option.` and the field's name.
    """
    return Field(default, json_schema_extra={_EXTRA: Option(key, description, **declared)})  # type: ignore[dict-item]


def declaration(name: str, info: FieldInfo) -> Option:
    """What a field of an option group says of its option."""
    assert isinstance(info.json_schema_extra, dict)
    found = cast(Option, info.json_schema_extra[_EXTRA])
    return replace(found, key=found.key or f"option.{name}")
