"""Shared by the tests of services."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.model import load_tokenizer
from djl_trtllm.service.lifecycle import ModelService, ServedModel
from djl_trtllm.service.model import Model
from tests.support.in_process import Hosts, played_model
from tests.support.virtual_time import at_end


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Every `ModelService` has its engine processes here."""
    stage = Stage()
    with stage.installed():
        yield stage


TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "serving" / "models" / "tiny-stories")


class Stage(Hosts):
    """Played engine processes, and what runs on them, which is closed at the end of the test.

    `reported` has the errors that models failed with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[DjlTrtllmError] = []

    def model(self, directory: Path = Path("/story"), **options: Any) -> Model:
        """See `played_model`."""
        return played_model(TOKENIZER, directory, **options)

    def service(self, **shared: Any) -> ModelService:
        """A service without a model."""
        made = ModelService("story", on_failed=self.reported.append, **shared)
        at_end(made.close)
        return made

    async def load(self, model: Model | None = None, **options: Any) -> ModelService:
        """A service of a model, by default of a played one with these options."""
        service = self.service()
        await service.load(model or self.model(**options))
        return service

    def served(self, **more: Any) -> ServedModel:
        """A model of a server that is not loaded."""
        made = ServedModel("story", "/store/story", on_failed=self.reported.append, **more)
        at_end(made.close)
        return made

    async def serve(self, workers: int = 1, model: Model | None = None, **options: Any) -> ServedModel:
        """A loaded model of a server."""
        served, prepared = self.served(), model or self.model(**options)
        await served.load(lambda: prepared, workers)
        return served
