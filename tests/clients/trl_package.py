"""A new package of the kind `tools`, its game replaced by environment classes as TRL has them."""

from pathlib import Path

ENVIRONMENTS = '''
import random


class CountEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.goal = random.randint(1, 9)
        return f"Count to {self.goal}."

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: What to add.

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter

    def get_reward(self) -> float:
        return 1.0 if self.counter == self.goal else 0.0


class WordEnv:
    WORDS = ["ant", "bee", "cat", "dog", "eel", "fox"]

    def reset(self, **kwargs) -> str | None:
        self.word = random.choice(self.WORDS)
        self.reward = 0.0
        self.done = False
        return f"Guess the animal. It begins with {self.word[0]}."

    def guess(self, word: str) -> str:
        """
        Guess the word.

        Args:
            word: An animal of three letters.

        Returns:
            G for a letter in its place, X for any other.
        """
        if self.done:
            raise ValueError("Game over.")
        marks = ["G" if pair[0] == pair[1] else "X" for pair in zip(word, self.word)]
        self.done = word == self.word
        self.reward = 1.0 if self.done else 0.1 * marks.count("G")
        return "".join(marks)

    def get_reward(self) -> float:
        return self.reward
'''

DEMONSTRATIONS = '''
"""Calls of the tool with arguments that are mostly guessed."""

import json
import random
import sys

from tinkermq.envs.prompt import open_game
from tinkermq.envs.registry import load_game
from tinkermq.envs.write_data import write_rows

GAME = load_game("trl:my_game.environments:CLASS")


def conversations(count):
    rng = random.Random(0)
    for number in range(count):
        game = GAME()
        messages = open_game(game, seed=10**6 + number, record=None, kwargs={})
        right = game.get_state()[KEY]
        guessed = rng.choice(CHOICES) if rng.random() < 0.35 else right
        call = {"name": TOOL, "arguments": {ARGUMENT: guessed}}
        said = f"<tool_call>{json.dumps(call)}</tool_call>"
        messages.append({"role": "assistant", "content": said})
        results = game.step(said).tool_results
        messages += [{"role": "tool", "content": text} for text in results]
        messages.append({"role": "assistant", "content": "done"})
        yield {"messages": messages, "tools": game.get_tools()}


if __name__ == "__main__":
    print(write_rows(sys.argv[1], conversations(4096)))
'''


def replace_game(folder: Path, environment: str) -> None:
    """Let the package play an environment of its own module `environments`."""
    choices = {"CountEnv": [*range(1, 10)], "WordEnv": ["ant", "bee", "cat", "dog", "eel", "fox"]}
    words = {
        "CountEnv": ("goal", "increment", "step"),
        "WordEnv": ("word", "guess", "word"),
    }[environment]
    script = DEMONSTRATIONS.replace("CLASS", environment)
    for name, value in zip(("KEY", "TOOL", "ARGUMENT"), words, strict=True):
        script = script.replace(name, repr(value))
    script = script.replace("CHOICES", repr(choices[environment]))
    (folder / "my_game" / "environments.py").write_text(ENVIRONMENTS)
    (folder / "my_game" / "demonstrations.py").write_text(script)
    for name in ("sft", "train"):
        path = folder / "tiny" / f"{name}.yaml"
        text = path.read_text()
        text = text.replace("game: my-game", f"game: trl:my_game.environments:{environment}")
        text = text.replace("max_prompt_tokens: 96", "max_prompt_tokens: 400")
        path.write_text(text.replace("max_response_tokens: 120", "max_response_tokens: 160"))
