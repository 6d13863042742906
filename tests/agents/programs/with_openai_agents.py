"""A program of openai-agents: one agent with a tool, or two, of which one leads or asks the other.

python with_openai_agents.py responses|chat|streamed|handoff|as_tool PROMPT
"""

import asyncio
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def search(query: str) -> str:
    """Search the library."""
    return f"{query} is 7"


def agent(mode: str) -> Agent:
    helper = Agent("helper", instructions="You search.", model="policy", tools=[search])
    if mode == "handoff":
        return Agent("first", instructions="You choose.", model="policy", handoffs=[helper])
    if mode == "as_tool":
        tool = helper.as_tool("ask_helper", "Ask somebody who searches.")
        return Agent("first", instructions="You ask.", model="policy", tools=[tool])
    return helper


async def answer(mode: str, prompt: str) -> str:
    if mode == "chat":
        set_default_openai_api("chat_completions")
    if mode != "streamed":
        result = await Runner.run(agent(mode), prompt, max_turns=8)
    else:
        result = Runner.run_streamed(agent(mode), prompt, max_turns=8)
        async for _ in result.stream_events():
            pass
    return result.final_output


Path("answer.txt").write_text(asyncio.run(answer(*sys.argv[1:])))
