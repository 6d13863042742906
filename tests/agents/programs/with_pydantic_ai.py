"""A program of pydantic-ai, through any of three APIs.

python with_pydantic_ai.py chat|responses|messages PROMPT
"""

import sys
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}


def search(query: str) -> str:
    """Search the library."""
    return f"{query} is 7"


def main(mode: str, prompt: str) -> None:
    agent = Agent(MODELS[mode]("policy"), instructions="You search.", tools=[search])
    Path("answer.txt").write_text(agent.run_sync(prompt).output)


main(*sys.argv[1:])
