"""LlamaIndex: its function agent, and a structured answer."""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from report import report, weather


async def main(url: str, name: str) -> None:
    model = OpenAILike(
        model=name,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=1024,
        max_tokens=64,
        temperature=0,
        max_retries=0,
    )
    for streaming in (False, True):
        agent = FunctionAgent(
            tools=[FunctionTool.from_defaults(weather)],
            llm=model,
            system_prompt="Answer with the weather.",
            initial_tool_choice="required",
            streaming=streaming,
        )
        report(str(await agent.run("How is the weather in Rome?")))


asyncio.run(main(*sys.argv[1:]))
