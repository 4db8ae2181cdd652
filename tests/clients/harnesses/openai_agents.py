"""The OpenAI Agents SDK: `Runner.run` calls the tool that the model asked for and sends its result back."""

import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from report import report, weather


async def main(url: str, model: str) -> None:
    set_tracing_disabled(disabled=True)
    agent = Agent(
        name="forecaster",
        instructions="Answer with the weather.",
        tools=[function_tool(weather)],
        # It sets tool_choice back to auto after a call, so that the next turn is the answer.
        model_settings=ModelSettings(tool_choice="required", max_tokens=64, temperature=0),
        model=OpenAIChatCompletionsModel(model, AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)),
    )
    whole = await Runner.run(agent, "How is the weather in Rome?")
    report(whole.final_output)
    stream = Runner.run_streamed(agent, "How is the weather in Rome?")
    async for _ in stream.stream_events():
        pass
    report(stream.final_output)


asyncio.run(main(*sys.argv[1:]))
