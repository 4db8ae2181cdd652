"""The record of requests: which are in it, what of their prompts, how large it gets, and that it can be replayed."""

from __future__ import annotations

import json
import random
import stat
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from djl_trtllm.batching.sequence import RequestState
from djl_trtllm.bench.apis import Prompt, read_prompts
from djl_trtllm.config import Options, load
from djl_trtllm.config.options.choices import RecordedPrompts
from djl_trtllm.errors import BenchmarkError, ConfigError
from djl_trtllm.request import GenerationRequest, Pooling, Sampling
from djl_trtllm.telemetry import ServedRequest, Telemetry
from djl_trtllm.telemetry.record import Recorder
from djl_trtllm.version import __version__
from tests.telemetry.requests import served, state

IDS = [1, 504, 563]
ASKED = GenerationRequest(
    prompt="a secret",
    stop=("a secret stop",),
    adapter="poems",
    sampling=Sampling(max_new_tokens=50, do_sample=True, temperature=0.5),
)


def ran(seed: int | None = 7) -> RequestState:
    """A state with a sequence of 5 tokens."""
    sequence = SimpleNamespace(token_ids=[9] * 5, prompt_ids=array("i", IDS), seed=seed)  # as a rolling batch keeps it
    return cast(RequestState, SimpleNamespace(record=state().record, sequences=[sequence]))


def options(path: Path, **changes: Any) -> Options:
    return Options(record_file=path / "requests.jsonl", record_share=1.0, **changes)


def recorded(path: Path, *requests: GenerationRequest, **changes: Any) -> list[dict[str, Any]]:
    """The lines that requests leave, each the only one of its call."""
    telemetry = Telemetry(record=Recorder(options(path, **changes)))
    for request in requests:
        call = served(ran(), asked=None)
        telemetry.began(call, (request,))
        telemetry.ended(call)
    telemetry.close()
    return [json.loads(line) for line in (path / "requests.jsonl").read_text().splitlines()]


def test_an_entry_has_ids_sampling_seed_and_versions_and_nothing_of_the_prompt(tmp_path: Path) -> None:
    (entry,) = recorded(tmp_path, ASKED)
    assert "secret" not in json.dumps(entry)
    assert entry.pop("time") > 1.7e9
    assert entry.pop("versions")["djl-trtllm"] == __version__
    assert entry == {
        "id": "r-1",
        "model": "story",
        "dialect": "lmi",
        "prompt_tokens": 7,
        "output_tokens": 5,
        "max_tokens": 5,
        "finish_reason": "length",
        "parameters": {"do_sample": True, "temperature": 0.5, "seed": 7, "adapters": "poems"},
    }


@pytest.mark.parametrize(
    ("prompts", "found"),
    [("lengths", {}), ("ids", {"prompt_ids": IDS}), ("text", {"prompt_ids": IDS, "prompt": "a secret"})],
)
def test_prompts_are_in_it_as_far_as_the_operator_says(tmp_path: Path, prompts: str, found: dict[str, Any]) -> None:
    (entry,) = recorded(tmp_path, ASKED, record_prompts=RecordedPrompts(prompts))
    assert {name: value for name, value in entry.items() if name in ("prompt", "messages", "prompt_ids")} == found


def test_messages_are_in_it_as_they_came(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "böse"}]
    (entry,) = recorded(tmp_path, GenerationRequest(messages=messages), record_prompts=RecordedPrompts.TEXT)
    assert entry["messages"] == messages


def test_a_share_of_the_requests_is_chosen() -> None:
    chosen = Recorder(Options(record_file=Path("/dev/null"), record_share=0.25), random.Random(3))
    assert sum(chosen.chooses() for _ in range(4000)) == pytest.approx(1000, rel=0.1)
    chosen.close()


def test_what_is_not_chosen_and_what_never_ran_leaves_nothing(tmp_path: Path) -> None:
    telemetry = Telemetry(record=Recorder(options(tmp_path, record_prompts=RecordedPrompts.TEXT)))
    refused, other = served(), served(ran())
    telemetry.began(refused, (ASKED,))
    for each in (refused, other):
        telemetry.ended(each)
    telemetry.close()
    assert (tmp_path / "requests.jsonl").read_text() == ""


def test_a_text_that_becomes_a_vector_is_not_in_it(tmp_path: Path) -> None:
    (entry,) = recorded(tmp_path, GenerationRequest(prompt="a text", pooling=Pooling()), ASKED)
    assert entry["parameters"]["adapters"] == "poems"


def test_without_a_file_no_request_is_kept() -> None:
    request = ServedRequest("r-1", "POST", "/invocations")
    Telemetry().began(request, (ASKED,))
    assert (request.recorded, request.asked) == ((), None)


def test_the_files_never_take_more_than_twice_the_bound(tmp_path: Path) -> None:
    """The last entry alone is larger than the bound, in bytes and not in characters, and loses its prompt."""
    small = [GenerationRequest(prompt=f"é {number}") for number in range(40)]
    large = GenerationRequest(prompt="é" * 3000)
    entries = recorded(tmp_path, *small, large, record_prompts=RecordedPrompts.TEXT, record_max_bytes=4096)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"requests.jsonl", "requests.jsonl.1"}
    assert max(sizes.values()) <= 4096
    assert "prompt" in entries[0] and "prompt" not in entries[-1]


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    recorded(tmp_path, ASKED)
    assert stat.S_IMODE((tmp_path / "requests.jsonl").stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record_file=.*nowhere.*cannot write it"):
        Telemetry.open(options(tmp_path / "nowhere"), {})


def test_a_disk_that_is_full_costs_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(record=Recorder(Options(record_file=Path("/dev/full"), record_share=1.0)))
    for _ in range(3):
        call = served(ran())
        telemetry.began(call, (ASKED,))
        telemetry.ended(call)
    telemetry.close()
    assert caplog.text.count("/dev/full: requests could not be recorded") == 1


def test_a_model_cannot_switch_it_on(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("record_file=/tmp/requests.jsonl\n")
    with pytest.raises(ConfigError, match="only by the environment variable SERVING_RECORD_FILE"):
        load(tmp_path, {})


def test_a_record_is_replayed(tmp_path: Path) -> None:
    asked = {"do_sample": True, "temperature": 0.5, "seed": 7, "adapters": "poems"}
    for prompts, expected in (
        (RecordedPrompts.LENGTHS, Prompt(5, tokens=7, parameters=asked)),
        (RecordedPrompts.IDS, Prompt(5, ids=IDS, parameters=asked)),
        (RecordedPrompts.TEXT, Prompt(5, "a secret", ids=IDS, parameters=asked)),
    ):
        folder = tmp_path / prompts.value
        folder.mkdir()
        recorded(folder, ASKED, record_prompts=prompts)
        assert read_prompts(folder / "requests.jsonl", 1, "--prompts") == [expected]


def test_a_record_of_nothing_is_no_prompts(tmp_path: Path) -> None:
    recorded(tmp_path)
    with pytest.raises(BenchmarkError, match="no prompts"):
        read_prompts(tmp_path / "requests.jsonl", 1, "--prompts")
