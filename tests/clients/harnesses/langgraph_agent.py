"""LangGraph: a graph of a model that is bound to a tool, and its prebuilt node that runs the calls."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from report import report, weather

url, name = sys.argv[1:]
model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=name, max_tokens=64, temperature=0, max_retries=0)
tools = [tool(weather)]


def answer(state: MessagesState) -> dict[str, list]:
    called = state["messages"][-1].type == "tool"
    bound = model.bind_tools(tools, tool_choice="auto" if called else "required", parallel_tool_calls=False)
    return {"messages": [bound.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("model", answer)
graph.add_node("tools", ToolNode(tools))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
agent = graph.compile()
question = {"messages": [("user", "How is the weather in Rome?")]}
report(agent.invoke(question)["messages"][-1].content)
*_, last = agent.stream(question, stream_mode="values")
report(last["messages"][-1].content)
