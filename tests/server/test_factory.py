from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm import create_app
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from tests.support.asgi import Client, lifespan
from tests.support.in_process import Hosts
from tests.support.models import scripted_model
from tests.support.virtual_time import in_virtual_time


@in_virtual_time
async def test_options_win_over_the_models_file_and_the_environment(
    tmp_path: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = scripted_model(tmp_path / "story", None, **{"option.model_name": "red", "max_request_size": 100})
    monkeypatch.setenv("SERVING_MAX_REQUEST_SIZE", "200")
    app = create_app(model, {"model_name": "blue", "max_request_size": 300}, wait_until_ready=True)
    async with lifespan(app):
        assert list((await Client(app).get("/ping")).json) == ["blue"]
        assert (await Client(app).post("/invocations", b" " * 301)).status == 413
        assert (await Client(app).post("/invocations", b" " * 300)).status != 413


def test_what_is_no_option_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean max_input_len"):
        create_app(scripted_model(tmp_path / "story"), {"max_input_length": 5})


def test_the_environment_names_the_model_if_the_program_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DjlTrtllmError, match="no model given"):
        create_app()
    monkeypatch.setenv("SERVING_LOAD_MODELS", f"red={scripted_model(tmp_path / 'story')}")
    assert list(create_app().registry.models) == ["red"]
