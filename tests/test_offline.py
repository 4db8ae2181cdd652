"""Offline batches on the scripted executor and on the bundled model."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from djl_trtllm import LLM, GuidedDecodingParams, SamplingParams
from djl_trtllm.errors import (
    ConfigError,
    ExecutorError,
    ExecutorStartError,
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    PromptTooLongError,
    RequestTimeoutError,
    UnsupportedParameterError,
)
from djl_trtllm.model import Tokenizer
from djl_trtllm.offline.options import open_model
from djl_trtllm.offline.progress import batch_progress
from tests.support.serving_process import scripted_model, wait_until

Make = Callable[..., LLM]
PROMPT = "Once upon a time, in a dark wood,"


def offline_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "offline batch"]


Processes = Callable[[], set[psutil.Process]]


@pytest.fixture
def new_processes() -> Processes:
    """What this process has started since the test began; other tests' servers may live beside it."""
    before = set(psutil.Process().children(recursive=True))
    return lambda: set(psutil.Process().children(recursive=True)) - before


@pytest.fixture
def nothing_left(new_processes: Processes) -> Iterator[None]:
    """No process and no thread of a test outlives it."""
    threads = len(offline_threads())
    yield
    assert not new_processes()
    assert len(offline_threads()) <= threads


@pytest.fixture
def make(tmp_path: Path, nothing_left: None) -> Iterator[Make]:
    """`make(script, file=..., **options)`: a scripted model, `file` in its serving.properties; closed at the end."""
    with ExitStack() as stack:

        def make_one(
            script: dict[str, object] | None = None, file: dict[str, object] | None = None, **options: object
        ) -> LLM:
            return stack.enter_context(LLM(scripted_model(tmp_path / "model", script, **(file or {})), **options))

        yield make_one


@pytest.fixture(scope="module")
def story(tiny_stories: Path) -> Iterator[LLM]:
    """The bundled model on OpenVINO."""
    with LLM(tiny_stories, max_rolling_batch_size=16) as llm:
        yield llm


def stories(count: int) -> list[str]:
    return [f"this is the story number {number} of the wolf" for number in range(count)]


def repeated(tokenizer: Tokenizer, prompt: str, tokens: int) -> list[int]:
    """What the scripted executor generates."""
    return list(itertools.islice(itertools.cycle(tokenizer.encode(prompt)), tokens))


# -- order, room, failures ---------------------------------------------------------------------------------------------


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


def test_no_prompts_are_no_outputs(make: Make) -> None:
    assert make().generate([]) == []


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


# -- the executor host -------------------------------------------------------------------------------------------------


def test_a_host_that_dies_costs_only_what_ran_on_it(make: Make, tokenizer: Tokenizer) -> None:
    llm = make(
        {"steps_per_second": 500, "faults": [{"action": "die", "at_token": 2, "max_new_tokens": 9}]},
        file={"option.max_rolling_batch_size": 2, "job_queue_size": 100},
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


def test_a_host_that_dies_for_good_fails_the_rest_and_says_why(make: Make) -> None:
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


def test_a_model_that_nobody_refers_to_ends_its_host(
    tmp_path: Path, nothing_left: None, new_processes: Processes
) -> None:
    llm = LLM(scripted_model(tmp_path / "model"))
    (host,) = new_processes()
    del llm
    wait_until(lambda: not host.is_running(), what="the end of the host")


@pytest.mark.parametrize("end", ["pass", "os._exit(0)", "os.kill(os.getpid(), 9)", "raise KeyboardInterrupt"])
def test_the_host_never_outlives_the_process(tmp_path: Path, end: str) -> None:
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
    wait_until(lambda: not psutil.pid_exists(int(ended.stdout)), what="the end of the host")


def test_an_interrupt_ends_the_batch_and_not_the_model(make: Make) -> None:
    llm = make({"steps_per_second": 50}, file={"option.max_rolling_batch_size": 2})
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(stories(50), SamplingParams(max_tokens=1000, ignore_eos=True))
    assert llm.generate("a wolf", SamplingParams(max_tokens=3))[0].error is None


# -- options -----------------------------------------------------------------------------------------------------------


def test_keyword_options_win_over_the_models_file_in_any_spelling(make: Make) -> None:
    llm = make(file={"option.max_input_len": 5}, max_input_len=500, tensor_parallel_size=1, dtype=None)
    assert llm.generate(stories(1))[0].error is None


@pytest.mark.parametrize(
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
    ],
)
def test_the_documents_options_have_their_names(
    tmp_path: Path, options: dict[str, object], name: str, value: object
) -> None:
    config = open_model(scripted_model(tmp_path / "model"), options).config
    assert getattr(config.options, name) == value


def test_a_models_own_formatters_are_told_to_be_for_http(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = scripted_model(tmp_path / "model")
    (model / "model.py").write_text(
        "from djl_python.input_parser import input_formatter\n"
        "@input_formatter\ndef read(payload: dict) -> dict:\n    return payload\n"
    )
    open_model(model, {})
    assert "formatters of model.py" in caplog.text


def test_what_is_no_option_is_an_error_with_a_suggestion(make: Make) -> None:
    with pytest.raises(ConfigError) as refused:
        make(max_input_length=5, kv_cache_config={"max_tokens": 5}, zzz=1)
    length, nested, unknown = refused.value.problems
    assert "did you mean max_input_len?" in length
    assert "kv_cache_free_gpu_mem_fraction=0.9" in nested
    assert "docs/options.md" in unknown


def test_a_wrong_value_is_an_error(make: Make) -> None:
    with pytest.raises(ConfigError, match="max_input_len=many"):
        make(max_input_len="many")


def test_prompts_may_wait_longer_than_a_client_would(make: Make) -> None:
    llm = make({"steps_per_second": 100}, file={"option.predict_timeout": 0.1, "option.max_rolling_batch_size": 1})
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert [output.error for output in llm.generate(stories(3), params)] == [None] * 3


def test_a_deadline_that_the_program_sets_counts(make: Make) -> None:
    llm = make({"steps_per_second": 50}, predict_timeout=0.1)
    (output,) = llm.generate(stories(1), SamplingParams(max_tokens=5000, ignore_eos=True))
    assert isinstance(output.error, RequestTimeoutError)


# -- prompts -----------------------------------------------------------------------------------------------------------


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


def test_a_chat_is_a_prompt(story: LLM, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "tell me a story"}]
    (output,) = story.generate([messages])
    assert output.prompt == tokenizer.render_chat(messages)
    assert output.prompt_token_ids == tokenizer.encode_chat(messages)
    assert output.outputs[0].text


def test_an_empty_prompt_fails_alone(story: LLM) -> None:
    empty, full = story.generate([[], PROMPT])
    assert "empty" in str(empty.error)
    assert full.error is None


# -- sampling on the bundled model -------------------------------------------------------------------------------------


def test_without_parameters_it_is_greedy_and_32_tokens(story: LLM) -> None:
    (plain,) = story.generate(PROMPT)
    (greedy,) = story.generate(PROMPT, SamplingParams(temperature=0, max_tokens=32))
    assert len(plain.outputs[0].token_ids) == 32
    assert plain == greedy


def test_without_a_limit_it_ends_at_the_end_of_the_text(story: LLM, tokenizer: Tokenizer) -> None:
    (output,) = story.generate(PROMPT, SamplingParams(max_tokens=None))
    (completion,) = output.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.token_ids[-1] in tokenizer.end_ids
    assert completion.text == tokenizer.decode(completion.token_ids)


def test_seeds_repeat_and_no_seed_does_not(story: LLM) -> None:
    def texts(seed: int | None) -> list[str]:
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=20)
        return [output.outputs[0].text for output in story.generate([PROMPT] * 3, params)]

    assert len(set(texts(7))) == 1
    assert texts(7) == texts(7) != texts(8)
    assert len(set(texts(None))) > 1


def test_n_sequences_have_the_seeds_that_follow(story: LLM) -> None:
    def ids(n: int, seed: int) -> list[list[int]]:
        params = SamplingParams(temperature=1.0, seed=seed, n=n, max_tokens=10)
        return [completion.token_ids for completion in story.generate(PROMPT, params)[0].outputs]

    assert ids(3, 5) == ids(1, 5) + ids(1, 6) + ids(1, 7)


def test_the_best_sequences_come_first(story: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=1, n=2, best_of=6, max_tokens=10, logprobs=0)
    (output,) = story.generate(PROMPT, params)
    best, second = output.outputs
    assert (best.cumulative_logprob or 0) > (second.cumulative_logprob or 0)
    (all_six,) = story.generate(PROMPT, SamplingParams(temperature=1.5, seed=1, n=6, max_tokens=10, logprobs=0))
    assert best.token_ids == max(all_six.outputs, key=lambda each: each.cumulative_logprob or -1e9).token_ids


def test_log_probabilities_go_with_the_tokens(story: LLM) -> None:
    (completion,) = story.generate(PROMPT, SamplingParams(max_tokens=8, logprobs=1))[0].outputs
    assert [list(entry) for entry in completion.logprobs] == [[id_] for id_ in completion.token_ids]
    total = sum(value.logprob for entry in completion.logprobs for value in entry.values())
    assert completion.cumulative_logprob == pytest.approx(total)
    (bare,) = story.generate(PROMPT, SamplingParams(max_tokens=8))[0].outputs
    assert (bare.logprobs, bare.cumulative_logprob) == ([], None)


def test_a_stop_string_ends_the_text_before_it(story: LLM) -> None:
    (whole,) = story.generate(PROMPT, SamplingParams(max_tokens=30))[0].outputs
    word = whole.text.split()[3]
    (cut,) = story.generate(PROMPT, SamplingParams(max_tokens=30, stop=word))[0].outputs
    assert cut.text == whole.text.partition(word)[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", word)


def test_a_stop_id_is_the_reason(story: LLM) -> None:
    (whole,) = story.generate(PROMPT, SamplingParams(max_tokens=10))[0].outputs
    (cut,) = story.generate(PROMPT, SamplingParams(max_tokens=10, stop_token_ids=[whole.token_ids[4]]))[0].outputs
    assert (cut.finish_reason, cut.stop_reason) == ("stop", whole.token_ids[4])


# -- sampling parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.7, "top_k": 1}, True),
        ({"temperature": 0.7, "top_p": 0.0}, True),
        ({"temperature": 1.0}, False),
        ({"top_p": 1.0}, False),
        ({"top_k": 0}, False),
        ({"seed": 3}, True),
    ],
)
def test_greedy_is_what_tensorrt_llm_takes_for_greedy(fields: dict[str, float], greedy: bool) -> None:
    sampling = SamplingParams(**fields).template().sampling  # type: ignore[arg-type]
    assert sampling.do_sample is not greedy


def test_parameters_become_those_of_the_request() -> None:
    request = SamplingParams(
        n=2,
        best_of=3,
        max_tokens=None,
        min_tokens=4,
        temperature=1.5,
        top_p=0.9,
        top_k=40,
        seed=5,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        logprobs=1,
        truncate_prompt_tokens=9,
    ).template()
    sampling = request.sampling
    assert (sampling.n, sampling.best_of, sampling.max_new_tokens, sampling.min_new_tokens) == (2, 3, 0, 4)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.5, 0.9, 40, 5)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (sampling.do_sample, sampling.ignore_eos) == (True, True)
    assert (request.stop, request.stop_token_ids, request.logprobs, request.truncate) == (("a", "b"), (1, 2), True, 9)
    assert (request.prompt, request.prompt_ids, request.messages) == (None, None, None)


def test_n_sequences_are_not_ranked_unless_more_are_generated() -> None:
    assert SamplingParams(n=3, temperature=1.0).template().sampling.best_of is None
    assert SamplingParams(n=3, best_of=3, temperature=1.0).template().sampling.best_of is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "'temperature' is -1"),
        ({"top_p": 1.5}, "'top_p' is 1.5"),
        ({"max_tokens": 0}, "'max_tokens' is 0"),
        ({"max_tokens": "9"}, "'max_tokens' is \"9\""),
        ({"n": 2}, "greedy decoding gives the same"),
        ({"best_of": 2}, "greedy decoding gives the same"),
        ({"n": 3, "best_of": 2, "temperature": 1}, "'best_of' is 2"),
        ({"stop": ""}, "'stop' is"),
    ],
)
def test_wrong_parameters_are_refused_when_they_are_made(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert "payload" not in str(refused.value)


def test_more_log_probabilities_than_there_are_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedParameterError, match="'top_logprobs' is 5"):
        SamplingParams(logprobs=5)


def test_what_it_does_not_have_is_no_argument() -> None:
    with pytest.raises(TypeError, match="detokenize"):
        SamplingParams(detokenize=False)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        ({"json": {"type": "object"}}, {"guided_json": {"type": "object"}}),
        ({"regex": "a+"}, {"guided_regex": "a+"}),
        ({"grammar": "root ::= x"}, {"guided_grammar": "root ::= x"}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
    ],
)
def test_a_guide_is_one_of_the_lmi_schemas(fields: dict[str, object], parameters: dict[str, object]) -> None:
    assert GuidedDecodingParams(**fields).parameters() == parameters  # type: ignore[arg-type]


def test_there_is_one_guide() -> None:
    for guide in (GuidedDecodingParams(), GuidedDecodingParams(regex="a", json_object=True)):
        with pytest.raises(InvalidRequestError, match="exactly one"):
            guide.parameters()


# -- progress, imports -------------------------------------------------------------------------------------------------


def test_a_log_gets_a_line_now_and_then() -> None:
    written = io.StringIO()
    with batch_progress(5, lambda: 9, Console(file=written), log_seconds=0.01) as advance:
        advance()
        wait_until(lambda: "1 of 5 prompts" in written.getvalue())
    with batch_progress(5, lambda: 9, Console(file=(quiet := io.StringIO()))):
        pass
    assert quiet.getvalue() == ""


def test_a_terminal_gets_a_bar() -> None:
    written = io.StringIO()
    with batch_progress(5, lambda: 9, Console(file=written, force_terminal=True, width=100)) as advance:
        advance()
    assert "1/5" in written.getvalue()
    assert "tokens/s" in written.getvalue()


def test_importing_the_package_is_cheap() -> None:
    program = "import djl_trtllm, sys; print(sorted(name for name in sys.modules if name.startswith('djl_trtllm.')))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
    with pytest.raises(AttributeError, match="Sampling"):
        __import__("djl_trtllm").Sampling  # noqa: B018
