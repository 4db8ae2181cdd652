"""A batch on the scripted executor: order, room, failures, and the end of the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from djl_trtllm import LLM, SamplingParams
from djl_trtllm.errors import (
    ExecutorError,
    ExecutorStartError,
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    PromptTooLongError,
    RequestTimeoutError,
)
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import GenerationRequest, Sampling
from tests.offline.helpers import Make, Processes, repeated, stories
from tests.support.models import scripted_model
from tests.support.waiting import survivors, wait_until


def test_outputs_have_the_order_of_the_prompts(make: Make, tokenizer: Tokenizer) -> None:
    prompts = stories(100)
    # The later a prompt comes, the sooner it ends.
    params = [SamplingParams(max_tokens=101 - number, ignore_eos=True) for number in range(100)]
    outputs = make().generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [output.request_id for output in outputs] == list(range(100))
    for output, each in zip(outputs, params, strict=True):
        assert output.prompt_token_ids == tokenizer.encode(output.prompt or "")
        assert output.outputs[0].token_ids == repeated(tokenizer, output.prompt or "", each.max_tokens or 0)
        assert (output.outputs[0].finish_reason, output.error) == ("length", None)


def test_more_prompts_than_the_queue_holds_wait_for_room(make: Make) -> None:
    llm = make(file={"option.max_rolling_batch_size": 2, "job_queue_size": 1})
    outputs = llm.generate(stories(60), SamplingParams(max_tokens=5, n=2, temperature=1.0))
    assert [(len(output.outputs), output.error) for output in outputs] == [(2, None)] * 60


def test_the_engine_process_may_send_its_output_together(make: Make) -> None:
    engine = make()._runner._service._engine
    assert engine is not None
    assert engine._start.send_interval > 0


def test_a_request_for_more_sequences_than_ever_fit_fails_alone(make: Make) -> None:
    llm = make(file={"option.max_rolling_batch_size": 2, "job_queue_size": 1})
    one, four = SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, n=4, temperature=1.0)
    outputs = llm.generate(stories(3), [one, four, one])
    assert [type(output.error) for output in outputs] == [type(None), InvalidRequestError, type(None)]
    assert "room for 3" in str(outputs[1].error)


def test_prompts_that_fail_cost_the_others_nothing(make: Make) -> None:
    llm = make({"faults": [{"action": "error", "at_token": 3, "max_new_tokens": 7}]}, file={"option.max_input_len": 50})
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True) for tokens in (5, 7, 5, 5, 5)]
    outputs = llm.generate(["a wolf", "a wolf", "a wolf " * 100, "\ud800", "a wolf"], params)
    kinds = [type(output.error) for output in outputs]
    assert kinds == [type(None), GenerationError, PromptTooLongError, InvalidRequestError, type(None)]
    broken, refused = outputs[1].outputs[0], outputs[2].outputs[0]
    assert (len(broken.token_ids), broken.finish_reason) == (3, "error")
    assert (refused.text, refused.token_ids, refused.finish_reason) == ("", [], "error")
    assert outputs[0].outputs[0].token_ids == outputs[4].outputs[0].token_ids


def test_an_error_of_what_gives_the_requests_ends_their_run_and_not_the_model(make: Make) -> None:
    def requests() -> Iterator[GenerationRequest]:
        yield GenerationRequest(prompt="a wolf", sampling=Sampling(3))
        raise OSError("the file has ended")

    runner = make()._runner
    with pytest.raises(OSError, match="the file has ended"):
        list(runner.run(requests()))
    before = runner.generated_tokens
    (result,) = runner.run([GenerationRequest(prompt="a wolf", sampling=Sampling(4))])
    assert result.failure is None
    assert runner.generated_tokens >= before + 4


def test_a_model_generates_again_and_again(make: Make) -> None:
    llm = make()
    first, second = (llm.generate(stories(5), SamplingParams(max_tokens=9)) for _ in range(2))
    assert first == second


def test_several_threads_share_a_model(make: Make, tokenizer: Tokenizer) -> None:
    llm = make(file={"option.max_rolling_batch_size": 3, "job_queue_size": 2})

    def generate(tokens: int) -> list[list[int]]:
        outputs = llm.generate(stories(20), SamplingParams(max_tokens=tokens, ignore_eos=True))
        return [output.outputs[0].token_ids for output in outputs]

    with ThreadPoolExecutor(4) as pool:
        for tokens, ids in zip(range(3, 7), pool.map(generate, range(3, 7)), strict=True):
            assert ids == [repeated(tokenizer, prompt, tokens) for prompt in stories(20)]


def test_it_works_where_an_event_loop_runs(make: Make) -> None:
    async def notebook_cell() -> int:
        return len(make().generate(stories(3)))

    assert asyncio.run(notebook_cell()) == 3


def test_an_engine_process_that_dies_costs_nothing(make: Make, tokenizer: Tokenizer) -> None:
    # Later than the engine process keeps its output back: a request that gets nowhere each time is ended.
    llm = make(
        {"steps_per_second": 500, "faults": [{"action": "die", "at_token": 40, "max_new_tokens": 60}]},
        file={"option.max_rolling_batch_size": 2, "job_queue_size": 100},
    )
    lengths = [60 if number == 10 else 20 for number in range(30)]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = llm.generate(stories(30), params)
    for output, story, length in zip(outputs, stories(30), lengths, strict=True):
        assert output.error is None
        assert output.outputs[0].token_ids == repeated(tokenizer, story, length)
    assert llm._runner._service.restarts == 1


def test_without_resuming_an_engine_process_that_dies_costs_what_ran_on_it(make: Make, tokenizer: Tokenizer) -> None:
    llm = make(
        {"steps_per_second": 500, "faults": [{"action": "die", "at_token": 2, "max_new_tokens": 9}]},
        file={
            "option.max_rolling_batch_size": 2,
            "job_queue_size": 100,
            "option.resume_after_restart": "false",
        },
    )
    deadly = 10
    params = [SamplingParams(max_tokens=9 if number == deadly else 20, ignore_eos=True) for number in range(30)]
    outputs = llm.generate(stories(30), params)
    failed = [number for number, output in enumerate(outputs) if output.error is not None]
    assert deadly in failed
    assert len(failed) <= 2
    assert all("may be repeated" in str(outputs[number].error) for number in failed)
    for number in set(range(30)) - set(failed):
        assert outputs[number].outputs[0].token_ids == repeated(tokenizer, stories(30)[number], 20)
    assert llm.generate("a wolf")[0].error is None


def test_an_engine_process_that_dies_for_good_fails_the_rest_and_says_why(make: Make) -> None:
    llm = make(
        {"faults": [{"action": "die", "at_token": 2, "max_new_tokens": 9}]},
        file={"option.max_rolling_batch_size": 1},
        retry_threshold=0,
    )
    params = [SamplingParams(max_tokens=9 if number == 5 else 4, ignore_eos=True) for number in range(50)]
    outputs = llm.generate(stories(50), params)
    assert [output.error for output in outputs[:5]] == [None] * 5
    assert isinstance(outputs[5].error, GenerationError)
    assert all("SIGKILL" in str(output.error) for output in outputs[6:])
    with pytest.raises(ExecutorError, match="SIGKILL"):
        llm.generate("a wolf")


def test_a_models_own_formatters_are_reported_to_be_for_http(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = scripted_model(tmp_path / "model")
    (model / "model.py").write_text(
        "from djl_python.input_parser import input_formatter\n"
        "@input_formatter\ndef read(payload: dict) -> dict:\n    return payload\n"
    )
    with LLM(model):
        assert "formatters of model.py" in caplog.text


def test_a_model_that_does_not_load_leaves_nothing(make: Make) -> None:
    with pytest.raises(ExecutorStartError, match="no such engine"):
        make({"start_error": "no such engine"})


def test_an_interrupt_while_it_loads_leaves_nothing(make: Make, new_processes: Processes) -> None:
    def interrupt() -> None:
        """While the host loads, and not while this process still gets ready."""
        wait_until(lambda: bool(new_processes()), what="a host")
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        make({"start_seconds": 60})


def test_a_closed_model_refuses(make: Make, new_processes: Processes) -> None:
    llm = make()
    (host,) = new_processes()
    llm.close()
    assert not host.is_running()
    llm.shutdown()
    with pytest.raises(NotReadyError, match="closed"):
        llm.generate("a wolf")


def test_closing_ends_a_batch_of_another_thread(make: Make) -> None:
    llm = make({"steps_per_second": 50}, file={"option.max_rolling_batch_size": 1})
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(llm.generate, stories(2000), SamplingParams(max_tokens=1000))
        time.sleep(0.3)
        llm.close()
        with pytest.raises(NotReadyError, match="closed"):
            batch.result(20)


def test_a_model_that_nobody_refers_to_ends_its_engine_process(
    tmp_path: Path, nothing_left: None, new_processes: Processes
) -> None:
    llm = LLM(scripted_model(tmp_path / "model"))
    (host,) = new_processes()
    del llm
    wait_until(lambda: not host.is_running(), what="the end of the host")


@pytest.mark.parametrize("end", ["pass", "os._exit(0)", "os.kill(os.getpid(), 9)", "raise KeyboardInterrupt"])
def test_the_engine_process_never_outlives_the_process(tmp_path: Path, end: str) -> None:
    model = scripted_model(tmp_path / "model")
    program = f"""if True:
        import os, psutil
        from djl_trtllm import LLM
        llm = LLM({str(model)!r})
        llm.generate(["a wolf"])
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        {end}"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout, ended.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        assert not survivors([psutil.Process(int(ended.stdout))])


def test_an_interrupt_ends_the_batch_and_not_the_model(make: Make) -> None:
    llm = make({"steps_per_second": 50}, file={"option.max_rolling_batch_size": 2})
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(stories(50), SamplingParams(max_tokens=1000, ignore_eos=True))
    assert llm.generate("a wolf", SamplingParams(max_tokens=3))[0].error is None


def test_prompts_may_wait_longer_than_a_client_would(make: Make) -> None:
    llm = make({"steps_per_second": 100}, file={"option.predict_timeout": 0.1, "option.max_rolling_batch_size": 1})
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert [output.error for output in llm.generate(stories(3), params)] == [None] * 3


def test_a_deadline_that_the_program_sets_counts(make: Make) -> None:
    llm = make({"steps_per_second": 50}, predict_timeout=0.1)
    (output,) = llm.generate(stories(1), SamplingParams(max_tokens=5000, ignore_eos=True))
    assert isinstance(output.error, RequestTimeoutError)
