"""Runs tasks of inspect-ai on a model, with its own default settings.

Usage: with_inspect.py MODEL URL [NAME=VALUE …]; the rest are options of generation.
"""

import json
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import choice, includes
from inspect_ai.solver import generate, multiple_choice, system_message, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(x: int, y: int):
        """Add two numbers.

        Args:
            x: First number.
            y: Second number.
        """
        return x + y

    return execute


def tasks(config: GenerateConfig) -> list[Task]:
    asked = [Sample(input="What is 2 + 2?", target="4"), Sample(input="And 3 + 4?", target="7")]
    chosen = [Sample(input="Which is a colour?", choices=["red", "two"], target="A")]
    return [
        Task(asked, name="plain", scorer=includes(), config=config),
        Task(
            asked,
            name="tools",
            solver=[system_message("Be brief."), use_tools(add()), generate()],
            scorer=includes(),
            config=config,
        ),
        Task(chosen, name="chosen", solver=multiple_choice(), scorer=choice(), config=config),
    ]


def main() -> None:
    model, url, *options = sys.argv[1:]
    config = GenerateConfig(**dict(json.loads(option) for option in options))
    logs = eval(tasks(config), model=model, model_base_url=url, display="none", log_dir="logs")
    for log in logs:
        print(json.dumps({"task": log.eval.task, "status": log.status}))
        if log.error:
            print(log.error.message)
    sys.exit(any(log.status != "success" for log in logs))


main()
