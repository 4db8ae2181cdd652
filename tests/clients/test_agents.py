"""Agents run a loop with a tool to its end: the SDKs of Anthropic and OpenAI, the Agents SDK, litellm, and programs.

The bundled model calls a tool only where it has to. Claude Code and Codex leave that to the model, so a proxy forces
the call (`forcing.py`); another model of theirs repeats the last message: the call that the user wrote, then the tool's
output.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import litellm
import openai
import pytest
from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool
from pydantic import BaseModel

from tests.clients.conftest import MODEL
from tests.clients.forcing import ANSWER, Forced, forcing
from tests.support.models import echoing_model
from tests.support.server import Server, serving

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ARGUMENTS = {"city": "Paris"}
QUESTION: Any = {"role": "user", "content": "What is the weather?"}
PROGRAMS = Path(__file__).parents[2] / ".venv-ai" / "node_modules" / ".bin"


# -- SDKs, with the bundled model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_sdk(server: Server, stream: bool) -> None:
    tools: Any = [{"name": "weather", "description": "The weather of a city", "input_schema": SCHEMA}]
    messages = [QUESTION]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:

        def ask(choice: Any) -> anthropic.types.Message:
            given: Any = {"model": MODEL, "max_tokens": 64, "messages": messages, "tools": tools, "tool_choice": choice}
            if not stream:
                return client.messages.create(**given)
            with client.messages.stream(**given) as events:
                return events.get_final_message()

        called = ask({"type": "any", "disable_parallel_tool_use": True})
        (call,) = called.content
        assert called.stop_reason == "tool_use" and call.type == "tool_use" and call.input == ARGUMENTS
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
        messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        answered = ask({"type": "none"})
        assert answered.stop_reason in ("end_turn", "max_tokens") and answered.content[0].type == "text"
        counted = client.messages.count_tokens(model=MODEL, messages=[QUESTION])
        usage = client.messages.create(model=MODEL, max_tokens=1, messages=[QUESTION]).usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="hen", max_tokens=1, messages=[QUESTION])


@pytest.mark.parametrize("stream", [False, True])
def test_openais_sdk(server: Server, stream: bool) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        def ask(**given: Any) -> Any:
            if not stream:
                return client.responses.create(model=MODEL, tools=tools, parallel_tool_calls=False, **given)
            with client.responses.stream(model=MODEL, tools=tools, parallel_tool_calls=False, **given) as events:
                return events.get_final_response()

        called = ask(input=[QUESTION], tool_choice="required")
        (call,) = called.output
        assert call.name == "weather" and json.loads(call.arguments) == ARGUMENTS
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
        answered = ask(input=[result], previous_response_id=called.id, tool_choice="none")
        assert answered.status == "completed" and answered.output_text
        assert client.responses.retrieve(answered.id).output_text == answered.output_text
        client.responses.delete(answered.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answered.id)


class Answer(BaseModel):
    """What the model has to answer with."""

    rains: bool


def test_openais_sdk_parses_an_answer_with_a_schema(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        parsed = client.responses.parse(model=MODEL, input="Does it rain?", text_format=Answer).output_parsed
    assert parsed is not None and type(parsed.rains) is bool


@pytest.mark.parametrize("stream", [False, True])
def test_the_agents_sdk(server: Server, stream: bool) -> None:
    asked: list[str] = []

    @function_tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "It rains."

    async def run() -> str:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        # `tool_choice` is reset after the first call.
        settings = ModelSettings(tool_choice="weather", max_tokens=64, extra_body={"seed": 3})
        model = OpenAIResponsesModel(MODEL, client)
        agent = Agent(name="clerk", instructions="You know it.", model=model, tools=[weather], model_settings=settings)
        config = RunConfig(tracing_disabled=True)
        if not stream:
            return str((await Runner.run(agent, "What is the weather?", run_config=config)).final_output)
        streamed = Runner.run_streamed(agent, "What is the weather?", run_config=config)
        async for _ in streamed.stream_events():
            pass
        return str(streamed.final_output)

    assert asyncio.run(run()) and len(asked) == 1


def test_litellms_messages(server: Server) -> None:
    """Whole: for a stream litellm imports its proxy, which wants other versions of many packages."""
    tools: Any = [{"name": "weather", "description": "The weather of a city", "input_schema": SCHEMA}]
    messages = [QUESTION]

    def ask(**choice: Any) -> Any:
        given: Any = {"model": f"anthropic/{MODEL}", "api_base": server.url, "api_key": "none", "max_tokens": 64}
        asked = litellm.anthropic.messages.acreate(messages=messages, tools=tools, tool_choice=choice, **given)
        return asyncio.run(asked)

    called = ask(type="any", disable_parallel_tool_use=True)
    (call,) = called["content"]
    assert called["stop_reason"] == "tool_use" and call["input"] == ARGUMENTS
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "It rains."}
    messages += [{"role": "assistant", "content": called["content"]}, {"role": "user", "content": [result]}]
    answered = ask(type="none")
    assert answered["content"][0]["text"] and answered["stop_reason"] in ("end_turn", "max_tokens")


# -- programs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(echoing_model(tmp_path_factory.mktemp("repeating") / "model", "hermes")) as started:
        yield started


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def run_program(name: str, *arguments: str, folder: Path, **environ: str) -> str:
    """What a program prints."""
    if not (PROGRAMS / name).exists():
        pytest.skip(f"{PROGRAMS / name} is missing: scripts/test-clients installs it by npm")
    path = os.pathsep.join([str(Path(shutil.which("node") or "node").parent), "/usr/bin", "/bin"])
    environ = {"PATH": path, "HOME": str(folder), "NO_PROXY": "127.0.0.1", **environ}
    done = subprocess.run(
        [PROGRAMS / name, *arguments],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


WOLF = "echo wolf > wolf.txt; echo howled"
BASH = {"command": WOLF, "description": "howls"}
EXEC = {"cmd": WOLF}


def run_claude_code(url: str, model: str, prompt: str, folder: Path) -> str:
    environ = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    arguments = ("-p", prompt, "--model", model, "--allowedTools", "Bash")
    return run_program("claude", *arguments, folder=folder, **environ).strip()


def run_codex(url: str, model: str, prompt: str, folder: Path) -> str:
    settings = folder / ".codex" / "config.toml"
    settings.parent.mkdir()
    settings.write_text(
        f'model = "{model}"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\nenv_key = "LOCAL_KEY"\n'
    )
    arguments = ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", prompt)
    return run_program("codex", *arguments, folder=folder, LOCAL_KEY="none").strip()


PROGRAMS_RUN = [(run_claude_code, "Bash", BASH), (run_codex, "exec_command", EXEC)]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "tool", "arguments"), PROGRAMS_RUN, ids=["Claude Code", "Codex"])
def test_a_program_runs_the_calls_of_a_model_that_repeats(
    repeating: Server, tmp_path: Path, run: Any, tool: str, arguments: dict[str, str]
) -> None:
    assert run(repeating.url, "hermes", call(tool, **arguments), tmp_path).endswith("howled")
    assert (tmp_path / "wolf.txt").read_text() == "wolf\n"


@pytest.mark.slow
@pytest.mark.parametrize(("run", "tool", "arguments"), PROGRAMS_RUN, ids=["Claude Code", "Codex"])
def test_a_program_runs_a_call_that_a_guide_forces_on_the_bundled_model(
    server: Server, tmp_path: Path, run: Any, tool: str, arguments: dict[str, str]
) -> None:
    forced = Forced(tool, arguments)
    with forcing(server.url, forced) as url:
        assert json.loads(run(url, MODEL, "Howl like a wolf.", tmp_path)) == ANSWER
    assert (tmp_path / "wolf.txt").read_text() == "wolf\n"
    assert (forced.calls, forced.answers, forced.failures) == (1, 1, [])


ROOT = Path(__file__).parents[2]
HARNESSES = Path(__file__).parent / "harnesses"
AGENTS = ("openai_agents", "langgraph_agent", "pydantic_ai_agent", "instructor_answer")


def loops(*command: str | Path, folder: Path) -> list[dict[str, Any]]:
    """Run a program to its end: what it prints of each loop."""
    environ = {**os.environ, "HOME": str(folder), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found: list[dict[str, Any]], *, called: int = 2) -> None:
    """The first `called` loops had one call each, and every loop an answer."""
    assert [len(loop["calls"]) for loop in found] == [1] * called + [0] * (len(found) - called)
    assert all(isinstance(loop["answer"], str) and loop["answer"] for loop in found)


@pytest.mark.parametrize("program", AGENTS)
def test_a_tool_loop_ends_with_an_answer(server: Server, tmp_path: Path, program: str) -> None:
    python = ROOT / ".venv-agents" / "bin" / "python"
    found = loops(python, HARNESSES / f"{program}.py", server.url, MODEL, folder=tmp_path)
    assert len(found) >= 2
    check(found)


def test_a_tool_loop_of_llama_index_ends_with_an_answer(server: Server, tmp_path: Path) -> None:
    python = ROOT / ".venv-llama-index" / "bin" / "python"
    whole, streamed = loops(python, HARNESSES / "llama_index_agent.py", server.url, MODEL, folder=tmp_path)
    check([whole, streamed])
    assert whole == streamed


def test_a_tool_loop_of_vercels_ai_ends_with_an_answer(server: Server, tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("needs node and npm")
    shutil.copy(HARNESSES / "ai_sdk.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(ROOT / ".venv-ai" / "node_modules")
    whole, streamed = loops("node", "ai_sdk.mjs", server.url, MODEL, folder=tmp_path)
    check([whole, streamed])
    assert whole == streamed
