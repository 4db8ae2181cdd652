"""The base of every group of options."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class OptionGroup(BaseModel):
    """A frozen group of options; unknown names are refused."""

    # protected_namespaces: half of the documented options begin with `model_`.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
