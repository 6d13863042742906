"""The calculator's agent of openai-agents, with the calculator as a tool.

python calculator_with_openai_agents.py QUESTION    answers it, and writes answer.txt
python calculator_with_openai_agents.py             answers many at a time: each line that it reads
    is JSON with `id`, `question`, `base_url` and `api_key`, each that it writes with `id`, `answer`
"""

import asyncio
import json
import operator
import re
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool
from agents.exceptions import AgentsException
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

FORMULA = re.compile(r"(\d{1,9})([*+-])(\d{1,9})", re.ASCII)
OPERATIONS = {"*": operator.mul, "+": operator.add, "-": operator.sub}


@function_tool
def calc(f: str) -> str:
    """Calculate a formula."""
    formula = FORMULA.fullmatch(f)
    if formula is None:
        return "?"
    left, sign, right = formula.groups()
    return str(OPERATIONS[sign](int(left), int(right)))


async def answer(question: str, client: AsyncOpenAI) -> str:
    """Return the agent's last word; nothing where it has none after two turns."""
    model = OpenAIResponsesModel("policy", client)
    agent = Agent("calculator", model=model, tools=[calc])
    try:
        return str((await Runner.run(agent, question, max_turns=2)).final_output)
    except AgentsException:
        return ""


async def answer_many() -> None:
    """Answer questions as they come, until nobody asks any more."""
    http = DefaultAsyncHttpxClient()
    lines = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    async def one(asked: dict[str, str]) -> None:
        client = AsyncOpenAI(base_url=asked["base_url"], api_key=asked["api_key"], http_client=http)
        said = await answer(asked["question"], client)
        print(json.dumps({"id": asked["id"], "answer": said}), flush=True)

    async with asyncio.TaskGroup() as group:
        while line := await lines.readline():
            group.create_task(one(json.loads(line)))


if __name__ == "__main__":
    if sys.argv[1:]:
        Path("answer.txt").write_text(asyncio.run(answer(sys.argv[1], AsyncOpenAI())))
    else:
        asyncio.run(answer_many())
