"""An agent with a calculator: it asks its model by the openai package and knows of no training.

The model is asked the question on the command line. An answer that is a formula, `=12*34`, calls
the tool: the model is told the result and asked once more. The last answer goes to answer.txt.
"""

import operator
import re
import sys
from pathlib import Path

from openai import OpenAI

FORMULA = re.compile(r"=(\d{1,9})([*+-])(\d{1,9})", re.ASCII)
OPERATIONS = {"*": operator.mul, "+": operator.add, "-": operator.sub}


def calculate(formula: re.Match[str]) -> str:
    """Return the tool's result."""
    left, sign, right = formula.groups()
    return str(OPERATIONS[sign](int(left), int(right)))


def main() -> None:
    """Answer one question."""
    client = OpenAI()
    messages = [{"role": "user", "content": sys.argv[1]}]

    def ask() -> str:
        answer = client.chat.completions.create(model="policy", messages=messages)  # type: ignore
        return answer.choices[0].message.content or ""

    said = ask()
    if formula := FORMULA.fullmatch(said.strip()):
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": calculate(formula)})
        said = ask()
    Path("answer.txt").write_text(said, encoding="utf-8")


if __name__ == "__main__":
    main()
