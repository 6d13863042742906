"""An environment of TRL of the kind of Wordle, and demonstrations of it that are mostly guesses."""

import json
import random
from typing import Any

WORDS = ("ant", "bee", "cat", "dog", "eel", "fox")
TOKENS = (
    '<tool_call>{"name": "guess", "arguments": {"word": ',
    "}}</tool_call>",
    "It begins with ",
    *(f'"{word}"' for word in WORDS),
)


class WordEnv:
    """Guess a word of which the first letter is known."""

    def __init__(self):
        self.word = ""

    def reset(self, **kwargs) -> str | None:
        self.word = random.choice(WORDS)
        self.reward = 0.0
        self.done = False
        return f"It begins with {self.word[0]}"

    def guess(self, word: str) -> str:
        """
        Make a guess.

        Args:
            word: An animal of three letters.

        Returns:
            G for a letter in its place, X for any other.
        """
        if self.done:
            raise ValueError("Game over.")
        marks = ["G" if one == other else "X" for one, other in zip(word, self.word, strict=False)]
        self.done = word == self.word
        self.reward = 1.0 if self.done else 0.1 * marks.count("G")
        return "".join(marks)

    def get_reward(self) -> float:
        return self.reward


def demonstrations(rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation of one guess."""
    env = WordEnv()
    env.reset()
    env.word = rng.choice(WORDS)
    word = rng.choice(WORDS) if rng.random() < 0.6 else env.word
    return [
        {"role": "system", "content": "guess"},
        {"role": "user", "content": f"It begins with {env.word[0]}"},
        {"role": "assistant", "content": f"{TOKENS[0]}{json.dumps(word)}{TOKENS[1]}"},
        {"role": "user", "content": env.guess(word)},
        {"role": "assistant", "content": "."},
    ]
