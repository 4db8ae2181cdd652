"""`LLM`: prompts of all kinds on OpenVINO, vectors and scores; and `djl_trtllm` has its names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import djl_trtllm
from djl_trtllm import LLM, KvCacheConfig, SamplingParams, offline
from djl_trtllm.api.base import Prompt
from djl_trtllm.backends.scripted.executor import vector_of
from djl_trtllm.errors import (
    ConfigError,
    EngineError,
    ExecutorError,
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    PromptTooLongError,
    RequestTimeoutError,
    UnsupportedTaskError,
)
from djl_trtllm.model import Tokenizer, load_tokenizer
from djl_trtllm.offline.llm import CompletionOutput, OfflineResult, RequestOutput, Runner, open_offline_model
from djl_trtllm.request import FinishReason, GenerationRequest, OutputChunk, Sampling, SequenceResult, Token
from tests.offline.conftest import PROMPT, Make, Processes, repeated, stories
from tests.support.encoders import QUERY, TEXTS, scripted_encoder
from tests.support.models import scripted_model
from tests.support.processes import survivors, wait_until
from tests.support.tables import by_rows


@pytest.fixture(scope="module")
def story(tiny_stories: Path) -> Iterator[LLM]:
    """The bundled model on OpenVINO."""
    with LLM(tiny_stories, max_rolling_batch_size=16) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1, 2, 3], r"prompts\[0\] is 1: expected a text"),
        (["a", None], r"prompts\[1\] is None"),
        ([b"bytes"], r"prompts\[0\] is b'bytes'"),
        ([[1, 10**6]], r"token id 1000000"),
        ([[1, -1]], r"token id -1"),
        ([{"role": "user", "content": "a"}], r"prompts\[0\] is {'role'"),
        ([[{"content": "a"}]], r"prompts\[0\]: 'messages\[0\].role'"),
    ],
)
def test_what_is_no_prompt_is_refused_before_anything_runs(make: Make, prompts: list[object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make().generate(prompts)  # type: ignore[arg-type]


def test_there_are_as_many_parameters_as_prompts(make: Make) -> None:
    with pytest.raises(InvalidRequestError, match="3 prompts and 2 sampling_params"):
        make().generate(stories(3), [SamplingParams()] * 2)


def test_token_ids_are_a_prompt(story: LLM, tokenizer: Tokenizer) -> None:
    by_text, by_ids = story.generate([PROMPT, tokenizer.encode(PROMPT)])
    assert (by_ids.prompt, by_ids.prompt_token_ids) == (None, by_text.prompt_token_ids)
    assert by_ids.outputs == by_text.outputs


def test_without_parameters_it_is_greedy_and_32_tokens(story: LLM) -> None:
    (plain,) = story.generate(PROMPT)
    (greedy,) = story.generate(PROMPT, SamplingParams(temperature=0, max_tokens=32))
    assert len(plain.outputs[0].token_ids) == 32
    assert plain == greedy


def test_log_probabilities_go_with_the_tokens(story: LLM) -> None:
    (completion,) = story.generate(PROMPT, SamplingParams(max_tokens=8, logprobs=1))[0].outputs
    assert [list(entry) for entry in completion.logprobs] == [[id_] for id_ in completion.token_ids]
    total = sum(value.logprob for entry in completion.logprobs for value in entry.values())
    assert completion.cumulative_logprob == pytest.approx(total)
    (bare,) = story.generate(PROMPT, SamplingParams(max_tokens=8))[0].outputs
    assert (bare.logprobs, bare.cumulative_logprob) == ([], None)


# -- options -----------------------------------------------------------------------------------------------------------


@by_rows(
    ("options", "name", "value"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_degree", 4),
        ({"batch_scheduler_policy": "max_utilization"}, "batch_scheduler_policy", "max_utilization"),
        ({"capacity_scheduler_policy": "MAX_UTILIZATION"}, "batch_scheduler_policy", "max_utilization"),
        (
            {"context_chunking_policy": "equal_progress", "enable_chunked_prefill": True},
            "context_chunking_policy",
            "equal_progress",
        ),
        ({"free_gpu_memory_fraction": 0.95}, "kv_cache_free_gpu_mem_fraction", 0.95),
        ({"max_tokens_in_paged_kv_cache": 65536}, "max_tokens_in_paged_kv_cache", 65536),
        ({"max_tokens": 65536}, "max_tokens_in_paged_kv_cache", 65536),
        ({"max_attention_window": [4096, 8192]}, "max_attention_window", (4096, 8192)),
        ({"retry_threshold": 5}, "retry_threshold", 5),
        ({"kv_cache_config": KvCacheConfig(free_gpu_memory_fraction=0.5)}, "kv_cache_free_gpu_mem_fraction", 0.5),
        ({"kv_cache_config": {"max_tokens": 4096, "dtype": None}}, "max_tokens_in_paged_kv_cache", 4096),
    ],
)
def test_the_documents_options_have_their_names(
    tmp_path: Path, options: dict[str, object], name: str, value: object
) -> None:
    config = open_offline_model(scripted_model(tmp_path / "model"), options).config
    assert getattr(config.options, name) == value


def test_each_argument_without_effect_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = scripted_model(tmp_path / "model", **{"option.gemm_plugin": "auto"})
    open_offline_model(model, {"tokens_per_block": 64, "kv_cache_dtype": "int8", "retry_threshold": 5})
    warned = [record.getMessage().partition(" ")[0] for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ["option.tokens_per_block", "option.kv_cache_dtype"]


def test_what_is_no_option_is_an_error_with_a_suggestion(make: Make) -> None:
    with pytest.raises(ConfigError) as refused:
        make(max_input_length=5, decoding_config={"max_draft_len": 5}, zzz=1)
    length, nested, unknown = refused.value.problems
    assert "did you mean max_input_len?" in length
    assert "decoding_config is not one of TensorRT-LLM's configuration objects" in nested
    assert "docs/options.md" in unknown


# -- outputs -----------------------------------------------------------------------------------------------------------

TOKENS = [Token(5, "a", -0.25, False), Token(6, "b", None, False)]


def output(request: GenerationRequest, finished: SequenceResult) -> RequestOutput:
    answer = OfflineResult(4, request, wants_prompt_tokens=True)
    answer.begin(Prompt("as the model sees it", 1, [Token(9, "x", None, False)]))
    answer.encode(OutputChunk(0, TOKENS, finished))
    return RequestOutput.of(answer, request)


def ended(reason: FinishReason = FinishReason.LENGTH, stop: str | None = None) -> SequenceResult:
    return SequenceResult(reason, 2, -0.25, None, stop_sequence=stop)


@by_rows(
    ("finished", "reason", "stop"),
    [
        (ended(FinishReason.END_TOKEN), "stop", None),
        (ended(FinishReason.STOP, "wolf"), "stop", "wolf"),
        (ended(FinishReason.STOP), "stop", 6),
        (ended(FinishReason.LENGTH), "length", None),
        (ended(FinishReason.CANCELLED), "cancelled", None),
        (ended(FinishReason.ERROR), "error", None),
    ],
)
def test_reasons_are_tensorrt_llms(finished: SequenceResult, reason: str, stop: str | int | None) -> None:
    (completion,) = output(GenerationRequest(prompt="p"), finished).outputs
    assert (completion.finish_reason, completion.stop_reason) == (reason, stop)


def test_a_chat_is_shown_after_its_template_and_token_ids_have_no_text() -> None:
    messages = [{"role": "user", "content": "a"}]
    assert output(GenerationRequest(messages=messages), ended()).prompt == "as the model sees it"
    assert output(GenerationRequest(prompt_ids=[9]), ended()).prompt is None


def test_a_refused_prompt_has_an_output_that_says_why() -> None:
    request, refusal = GenerationRequest(prompt="p"), InvalidRequestError("too long")
    answer = OfflineResult(0, request, wants_prompt_tokens=True)
    answer.fail(refusal)
    assert RequestOutput.of(answer, request) == RequestOutput(
        0, "p", [], [CompletionOutput(0, "", [], None, [], "error", None)], refusal
    )


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


def test_it_works_where_an_event_loop_runs(make: Make) -> None:
    async def notebook_cell() -> int:
        return len(make().generate(stories(3)))

    assert asyncio.run(notebook_cell()) == 3


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


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)", "raise KeyboardInterrupt"])
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


def test_an_interrupt_between_two_results_ends_the_batch_though_its_traceback_is_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ended = Runner.run, []

    def watched(*given: Any, **more: Any) -> Iterator[OfflineResult]:
        try:
            yield from run(*given, **more)
        finally:
            ended.append(True)

    def interrupted(*given: object) -> RequestOutput:
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "run", watched)
    monkeypatch.setattr(RequestOutput, "of", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        make().generate(stories(2))
    assert kept.traceback and ended


def test_a_deadline_that_the_program_sets_counts(make: Make) -> None:
    llm = make({"steps_per_second": 50}, predict_timeout=0.1)
    (output,) = llm.generate(stories(1), SamplingParams(max_tokens=5000, ignore_eos=True))
    assert isinstance(output.error, RequestTimeoutError)


REFUSED: list[tuple[str, Callable[[LLM], object]]] = [
    ("truncate_prompt_tokens is 0", lambda llm: llm.embed("a", truncate_prompt_tokens=0)),
    ("truncate_prompt_tokens is -2", lambda llm: llm.embed("a", truncate_prompt_tokens=-2)),
    ("truncate_prompt_tokens is 515", lambda llm: llm.score("a", "b", truncate_prompt_tokens=515)),
    ("dimensions is 0", lambda llm: llm.embed("a", dimensions=0)),
    ("prompts[1] is 5", lambda llm: llm.embed(["a", 5])),  # type: ignore[list-item]
    ("data_1[0] is None", lambda llm: llm.score([None], "b")),  # type: ignore[list-item]
    ("data_2[1] is b'b'", lambda llm: llm.score("a", ["b", b"b"])),  # type: ignore[list-item]
]


def test_texts_become_vectors_in_their_order_and_one_that_fails_has_an_error(tmp_path: Path) -> None:
    model = scripted_encoder(tmp_path)
    tokenizer = load_tokenizer(model)
    texts = [*TEXTS[:20], " ".join(TEXTS), *TEXTS[20:25]]
    with LLM(model) as llm:
        (whole,) = llm.embed(texts[20], truncate_prompt_tokens=-1, use_tqdm=False)
        for name, refused_call in REFUSED:
            with pytest.raises(InvalidRequestError, match=re.escape(name)):
                refused_call(llm)
        found = llm.embed(texts, dimensions=5, use_tqdm=False)
        (cut,) = llm.embed(texts[20], truncate_prompt_tokens=7, use_tqdm=False)
        (refused,) = llm.score(QUERY, TEXTS[0], use_tqdm=False)
    assert isinstance(refused.error, UnsupportedTaskError)
    assert cut.prompt_tokens == 7
    assert whole.prompt_tokens == 514
    failed = found.pop(20)
    assert (failed.outputs, type(failed.error).__name__) == (None, "PromptTooLongError")
    for text, output in zip([*TEXTS[:25]], found, strict=True):
        ids = tokenizer.encode(text)
        vector = vector_of(ids, 8)[:5]
        assert output.outputs is not None and output.error is None
        assert output.prompt_tokens == len(ids)
        assert np.allclose(output.outputs.embedding, vector / np.linalg.norm(vector), atol=1e-6)


def test_a_model_of_lower_case_texts_needs_a_tokenizer_that_makes_them(tmp_path: Path) -> None:
    model = scripted_encoder(tmp_path)
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 128, "do_lower_case": true}')
    open_offline_model(model, {}).texts()
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EngineError, match="do_lower_case"):
        open_offline_model(model, {}).texts()


def test_pairs_become_scores(tmp_path: Path) -> None:
    with LLM(scripted_encoder(tmp_path, labels=1)) as llm:
        one_with_each = llm.score(QUERY, TEXTS[:3], use_tqdm=False)
        pairs = llm.score([QUERY] * 3, TEXTS[:3], use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="data_1"):
            llm.score([QUERY] * 2, TEXTS[:3])
    scores = [output.outputs.score for output in one_with_each if output.outputs is not None]
    assert len(set(scores)) == 3 and all(0 < score < 1 for score in scores)
    assert [output.outputs for output in pairs] == [output.outputs for output in one_with_each]


def test_every_name_of_the_offline_api_is_one_of_the_package() -> None:
    names: dict[str, object] = {}
    exec("from djl_trtllm import *", names)
    del names["__builtins__"]
    assert names.pop("create_app") is djl_trtllm.create_app
    assert names == {"__version__": djl_trtllm.__version__} | {name: getattr(offline, name) for name in offline.__all__}


@pytest.mark.parametrize("name", ["Path", "BatchingTypes", "run_prompts"])
def test_no_other_name_is(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'djl_trtllm' has no attribute '{name}'"):
        getattr(djl_trtllm, name)


def test_what_is_not_of_the_api_does_not_load_it() -> None:
    program = (
        "import sys, djl_trtllm.cli\n"
        "from djl_trtllm import errors, __version__\n"
        "hasattr(djl_trtllm, 'nothing')\n"
        "assert 'djl_trtllm.offline' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
