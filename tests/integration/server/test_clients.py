"""OpenAI's and Hugging Face's clients, unmodified, on every address, and Truss's requests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import GenerationError

from djl_trtllm.model import Tokenizer
from tests.api.test_openai_tools import TIME, WEATHER
from tests.integration.server.conftest import with_every_executor
from tests.support.models import PROMPT, TINY_STORIES, echoing_model
from tests.support.server import Server, serving

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.slow

NAMED: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]


ADDRESSES = (
    "/v1",
    *("/endpoints/story/openai/v1", "/endpoints/story/inference-components/adapter-1/openai/v1"),
    *("/invocations", "/invocations/v1"),
)


@contextmanager
def openai_client(server: Server, address: str = "/v1") -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=server.url + address, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


@pytest.mark.parametrize("address", ADDRESSES)
def test_openais_client(server: Server, tokenizer: Tokenizer, address: str) -> None:
    import openai

    asked: dict[str, Any] = {"model": "", "messages": MESSAGES, "max_tokens": 7, "temperature": 0}
    with openai_client(server, address) as client:
        whole = client.chat.completions.create(**asked, logprobs=True, n=2, seed=1)
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage and whole.usage.completion_tokens == 14
        assert whole.choices[1].logprobs and len(whole.choices[1].logprobs.content or []) == 7
        *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        assert chunks[0].choices[0].delta.role == "assistant"
        assert last.usage and last.usage.completion_tokens == 7
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content != ""
        assert [model.id for model in client.models.list()] == ["scripted"]
        if "endpoints" not in address:
            expected = tokenizer.decode(tokenizer.encode(PROMPT)[:7])
            asked = {"model": "", "max_tokens": 7, "temperature": 0}
            completion = client.completions.create(prompt=[PROMPT, PROMPT], echo=True, **asked)
            assert [choice.text for choice in completion.choices] == [PROMPT + expected] * 2
            events = client.completions.create(prompt=tokenizer.encode(PROMPT), stream=True, **asked)
            assert "".join(event.choices[0].text for event in events) == expected
        with pytest.raises(openai.NotFoundError, match="no model named 'gpt-5'"):
            client.chat.completions.create(model="gpt-5", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="", messages=MESSAGES, max_tokens=0)


@pytest.mark.parametrize("address", ["", "/invocations"])
def test_hugging_faces_client(server: Server, tokenizer: Tokenizer, address: str) -> None:
    client = InferenceClient(server.url + address)
    text = tokenizer.decode(tokenizer.encode(PROMPT)[:7])
    assert client.text_generation(PROMPT, max_new_tokens=7) == text
    assert "".join(client.text_generation(PROMPT, max_new_tokens=7, stream=True)) == text
    whole = client.text_generation(PROMPT, max_new_tokens=7, details=True)
    assert whole.details and whole.details.tokens[0].logprob is not None
    *_, last = client.text_generation(PROMPT, max_new_tokens=7, stream=True, details=True)
    assert last.details and (last.details.generated_tokens, last.generated_text) == (7, text)
    with pytest.raises(GenerationError, match="scripted error"):
        list(client.text_generation(PROMPT, max_new_tokens=77, stream=True))
    chat = client.chat_completion(MESSAGES, max_tokens=7, temperature=0)  # type: ignore[arg-type]
    stream = client.chat_completion(MESSAGES, max_tokens=7, temperature=0, stream=True)  # type: ignore[arg-type]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert streamed == chat.choices[0].message.content != ""


def test_errors_raise_what_the_client_has_for_them(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="", messages=MESSAGES, temperature=1.5, extra_body={"mirostat": 2})
    assert (refused.value.param, refused.value.code) == ("mirostat", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError, match="there is no model named 'gpt-5'"):
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="max_output_len"):
        client.completions.create(model="", prompt=PROMPT, max_tokens=10**9)
    with pytest.raises(openai.InternalServerError, match="scripted"):
        client.completions.create(model="", prompt=PROMPT, max_tokens=77)
    with pytest.raises(openai.APIError, match="scripted"):
        list(client.completions.create(model="", prompt=PROMPT, max_tokens=77, stream=True))


@with_every_executor
def test_the_most_likely_tokens_come_from_an_engine_that_has_them(client: openai.OpenAI, executor: str) -> None:
    import openai

    def ask() -> openai.types.chat.ChatCompletion:
        return client.chat.completions.create(
            model="", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
        )

    if executor == "scripted":
        with pytest.raises(openai.BadRequestError, match=r"'top_logprobs'.* chosen token's log-probability only"):
            ask()
        return
    logprobs = ask().choices[0].logprobs
    assert logprobs and logprobs.content
    assert [len(token.top_logprobs) for token in logprobs.content] == [3] * 4
    assert all(token.top_logprobs[0].token == token.token for token in logprobs.content)
    completion = client.completions.create(model="", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2)
    shown = completion.choices[0].logprobs
    assert shown and [len(top) for top in shown.top_logprobs or []] == [2] * 4


# -- OpenAI's own client, unmodified, on models that say what the user says: tool calls and reasoning ------------------

ARGUMENTS = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OUTPUTS = {
    "hermes": f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{CALL}",
    "llama3_json": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
}


@pytest.fixture(params=OUTPUTS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model for each format."""
    store = tmp_path_factory.mktemp("tools")
    for name in OUTPUTS:
        echoing_model(store / name, name)
    with serving(None, SERVING_MODEL_STORE=str(store), SERVING_LOAD_MODELS="ALL") as started:
        yield started


@pytest.fixture
def tool_client(tool_server: Server) -> Iterator[openai.OpenAI]:
    with openai_client(tool_server) as client:
        yield client


def ask(tool_client: openai.OpenAI, model: str, text: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return tool_client.chat.completions.create(model=model, messages=messages, temperature=0, **more)


def test_calls_are_answered_whole(tool_client: openai.OpenAI, model: str) -> None:
    answer = ask(tool_client, model, OUTPUTS[model], tools=[WEATHER, TIME], n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", ARGUMENTS)] * len(
            calls
        )
        assert len({call.id for call in calls}) == len(calls) == (2 if model == "hermes" else 1)
        assert choice.message.content == ("I look." if model == "hermes" else None)
        assert getattr(choice.message, "reasoning_content", None) == ("Where?" if model == "hermes" else None)
    assert answer.usage.completion_tokens > 20


def test_calls_are_streamed(tool_client: openai.OpenAI, model: str) -> None:
    chunks = list(ask(tool_client, model, OUTPUTS[model], tools=[WEATHER, TIME], stream=True, logprobs=True))
    calls: dict[int, list[str]] = {}
    reasoning = content = ""
    for choice in [chunk.choices[0] for chunk in chunks]:
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id:
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert list(calls.values()) == [["weather", ARGUMENTS]] * (2 if model == "hermes" else 1)
    assert (content, reasoning) == (("I look.", "Where?") if model == "hermes" else ("", ""))


def test_forced_calls_follow_a_guide(tool_client: openai.OpenAI, model: str) -> None:
    listed = f'[{{"name": "weather", "parameters": {ARGUMENTS}}}]'
    for text, choice in ((listed, "required"), (ARGUMENTS, NAMED)):
        (call,) = ask(tool_client, model, text, tools=[WEATHER], tool_choice=choice).choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)


def test_the_embedded_engine_makes_the_calls_that_it_has_to(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(TINY_STORIES / "engine", directory)
    template = "{# tools <tool_call> #}{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["files"]["chat_template.jinja"]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with (
        serving(directory) as server,
        openai_client(server) as tool_client,
    ):
        required: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
        for more in (required, {"tool_choice": NAMED}):
            choice = ask(
                tool_client, "", "The wolf went to Rome.", tools=[WEATHER, TIME], max_tokens=200, **more
            ).choices[0]
            (call,) = choice.message.tool_calls
            assert call.function.name in ("weather", "time")
            assert choice.finish_reason == "tool_calls" and type(json.loads(call.function.arguments)) is dict


# -- the request of Truss's README, as `requests` and curl send it -----------------------------------------------------


@pytest.mark.parametrize("path", ["/predict", "/v1/models/model:predict"])
def test_text_comes_raw_and_in_pieces(server: Server, path: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "bad_words_list": [""], "stop_words_list": [""], "beam_width": 1}
    with server.http.stream("POST", path, json=body) as answer:
        pieces = list(answer.iter_raw())
    assert answer.status_code == 200 and len(pieces) > 2
    whole = server.http.post(path, json={**body, "stream": False})
    assert whole.json() == {"text": b"".join(pieces).decode()}


def test_a_stream_that_fails_has_no_end_and_a_whole_answer_a_status(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 77}
    whole = server.http.post("/predict", json={**body, "stream": False})
    assert (whole.status_code, whole.json()) == (500, {"error": "scripted error"})
    for _ in range(50):
        try:
            # A busy server may have the error before it has sent anything, and answers with its status then.
            assert server.http.post("/predict", json=body).status_code == 500
        except httpx.RemoteProtocolError:
            return
    pytest.fail("a stream that failed was ended as if it were whole")
