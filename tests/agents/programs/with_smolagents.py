"""An agent of smolagents, which calls tools or writes code.

python with_smolagents.py tools|code PROMPT
"""

import os
import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def search(query: str) -> str:
    """Search the library.

    Args:
        query: what to look for
    """
    return f"{query} is 7"


def main(mode: str, prompt: str) -> None:
    model = OpenAIModel(
        "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    kind = CodeAgent if mode == "code" else ToolCallingAgent
    agent = kind(tools=[search], model=model, max_steps=4, verbosity_level=0)
    Path("answer.txt").write_text(str(agent.run(prompt)))


main(*sys.argv[1:])
