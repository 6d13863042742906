"""Train the model of agent.py: `python examples/agents/products/train.py products-chats`.

The argument is the run, or checkpoint of it, whose weights it starts from. The agent is imported
from agent.py as it is and runs in this process, for each episode with a client of its own: as a
command (`agent.command`) each episode would import openai-agents, more than a second of a core. It
needs `pip install tinkermq openai-agents openai`, and a pool (`tinkermq up`).
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from agent import MAX_TURNS, calculator
from agents import OpenAIProvider, RunConfig, Runner
from agents.exceptions import AgentsException
from tinkermq.clients import AgentEnvironment, AgentEpisode, SchedulerClient, ServiceClient

CONFIG = Path(__file__).parents[2] / "products_openai_agents.yaml"
NUMBER = re.compile(r"\d+")


async def answer(_: dict[str, Any], model: AgentEpisode) -> float:
    """Return 1 if the last number of the agent's answer is the product, else 0."""
    question = str(model.prompt[-1]["content"])
    async with model.async_openai() as client:
        provider = OpenAIProvider(openai_client=client)
        settings = RunConfig(model_provider=provider, tracing_disabled=True)
        try:
            result = await Runner.run(
                calculator, question, max_turns=MAX_TURNS, run_config=settings
            )
        except AgentsException:  # a tool that does not exist, or no answer in so many turns
            return 0.0
    left, right = map(int, NUMBER.findall(question))
    return float(NUMBER.findall(str(result.final_output))[-1:] == [str(left * right)])


def main() -> None:
    """Submit the run, host its episodes, and follow it to its end."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    url = os.environ.get("TINKERMQ_NATS_URL", "nats://127.0.0.1:4222")
    job = SchedulerClient(url).submit_job(config, from_run=sys.argv[1])
    with (
        AgentEnvironment(answer, config, job_id=job["job_id"]) as environment,
        ServiceClient(job["server_url"]) as client,
    ):
        client.set_config(config, environment)
        client.fit(environment)


if __name__ == "__main__":
    main()
