"""pydantic-ai: an agent with a tool, and one whose answer is an object."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import report, weather


class City(BaseModel):
    name: str


async def main(url: str, name: str) -> None:
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings = {"max_tokens": 64, "temperature": 0, "parallel_tool_calls": False}

    def first_calls(context: RunContext) -> dict:
        return {**settings, "tool_choice": "required" if context.run_step == 1 else "auto"}

    agent = Agent(model, tools=[weather], model_settings=first_calls)
    called = Agent(model, output_type=City, model_settings=settings)
    question = "How is the weather in Rome?"
    whole = await agent.run(question)
    report(whole.output)
    async with agent.run_stream(question) as stream:
        report(await stream.get_output())
    report((await called.run(question)).output.name)


asyncio.run(main(*sys.argv[1:]))
