"""A ReAct agent of LangGraph, through any of three APIs, and one that trims its history.

python with_langgraph.py chat|responses|messages|trimmed PROMPT
"""

import sys
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import before_model
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import RemoveMessage, trim_messages
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph.message import REMOVE_ALL_MESSAGES

KEPT = 4
"""Messages that `trimmed` keeps behind the first."""


@tool
def search(query: str) -> str:
    """Search the library."""
    return f"{query} is 7"


@before_model
def trimmed(state: Any, runtime: Any) -> dict[str, Any]:
    """Forget the oldest messages."""
    first, *rest = state["messages"]
    kept = trim_messages(rest, max_tokens=KEPT, token_counter=len, start_on="ai")
    return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), first, *kept]}


def model(mode: str) -> Any:
    if mode == "messages":
        return ChatAnthropic(model="policy")
    return ChatOpenAI(model="policy", use_responses_api=mode == "responses")


def main(mode: str, prompt: str) -> None:
    middleware = [trimmed] if mode == "trimmed" else []
    agent = create_agent(model(mode), [search], system_prompt="Search.", middleware=middleware)
    result = agent.invoke({"messages": [{"role": "user", "content": prompt}]})
    Path("answer.txt").write_text(result["messages"][-1].text)


main(*sys.argv[1:])
