"""An agent of openai-agents with a calculator, as one writes it for use: nothing here trains.

python agent.py "What is 47 * 38?"
"""

import operator
import re
import sys

from agents import Agent, Runner, function_tool

OPERATION = re.compile(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*", re.ASCII)
OPERATIONS = {"*": operator.mul, "+": operator.add, "-": operator.sub}
MAX_TURNS = 3


@function_tool
def calculate(expression: str) -> str:
    """Compute one operation on two numbers.

    Args:
        expression: Such as 12 * 34.
    """
    found = OPERATION.fullmatch(expression)
    if found is None:
        return "Error: write two numbers with *, + or - between them"
    left, sign, right = found.groups()
    return str(OPERATIONS[sign](int(left), int(right)))


calculator = Agent("calculator", model="policy", tools=[calculate])

if __name__ == "__main__":
    print(Runner.run_sync(calculator, sys.argv[1], max_turns=MAX_TURNS).final_output)
