"""Environment classes as users of TRL write them; nothing here knows of tinkermq."""

import functools
import random
from typing import Literal


class CounterEnv:
    """The kind that counts: the state is scored by a reward function."""

    def reset(self, **kwargs) -> str | None:
        self.counter = 0

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

    def double(self) -> int:
        """
        Double the internal counter.

        Returns:
            The updated counter value.
        """
        self.counter *= 2
        return self.counter

    def _reset_all(self):
        raise AssertionError("no tool")


def counted(environments, **kwargs):
    return [float(environment.counter) for environment in environments]


def near(completions, goal, environments, log_metric, **kwargs):
    log_metric("distance", abs(environments[0].counter - goal[0]))
    return [-abs(one.counter - wanted) for one, wanted in zip(environments, goal, strict=True)]


async def short(completions):
    return [1.0 if len(completion) < 3 else None for completion in completions]


class WordEnv:
    """The kind of Wordle: the text of reset is a task of its own, and errors end the game."""

    def __init__(self):
        self.words = ["crane", "slate", "audio"]

    def reset(self, word: str | None = None, **kwargs) -> str | None:
        self.word = word or random.choice(self.words)
        self.reward = 0.0
        self.done = False
        return f"Guess a word of {len(self.word)} letters. It begins with {self.word[0]}."

    def guess(self, guess: str) -> str:
        """
        Make a guess.

        Args:
            guess: The guessed word, of five
                letters.

        Returns:
            Each letter: G for the right place, Y for another one, X for none.
        """
        if self.done:
            raise ValueError("Game over.")
        if len(guess) != len(self.word):
            raise ValueError(f"{guess!r} has {len(guess)} letters")
        marks = [
            "G" if one == other else "Y" if one in self.word else "X"
            for one, other in zip(guess, self.word, strict=True)
        ]
        self.done = guess == self.word
        self.reward = 1.0 if self.done else marks.count("G") / 10
        return "".join(marks)

    def get_reward(self) -> float:
        return self.reward


class SearchEnv:
    """Tools with parameters of many types, and one that waits."""

    def reset(self, **kwargs) -> None:
        self.seen = kwargs

    async def search(
        self,
        query: str,
        limit: int = 3,
        tags: list[str] | None = None,
        order: Literal["new", "old"] = "new",
        weights: dict[str, float] | None = None,
        place: tuple[int, str] = (1, "a"),
        score: int | float = 0,
        kind: str = "any",
    ) -> list[dict]:
        """Search the pages.

        Each word counts.

        Args:
            query: What to look for: words.
            limit: How many.
            tags: Only of these.
            order: Which first.
            weights: By field.
            place: Page and
                column.
            score: At least.
            kind: What (choices: ["any", "text"])
        """
        return [{"type": "text", "text": f"{query} {limit} {order}"}, {"type": "text", "text": "x"}]

    async def get_reward(self) -> float:
        return 0.25


def make_search():
    return SearchEnv()


ENVIRONMENTS = {"words": WordEnv, "search": make_search}


class NoReset:
    def look(self) -> str:
        """Look."""
        return ""


class NoTools:
    def reset(self, **kwargs):
        return "go"

    def get_reward(self):
        return 0.0


class NoDoc(NoTools):
    def look(self, at: str) -> str:
        return at


class Untyped(NoTools):
    def look(self, at) -> str:
        """Look.

        Args:
            at: Where.
        """
        return at


class Undescribed(NoTools):
    def look(self, at: str) -> str:
        """Look."""
        return at


class AnyArguments(NoTools):
    def look(self, **places: str) -> str:
        """Look."""
        return ""


class Inexpressible(NoTools):
    def look(self, at: frozenset[str]) -> str:
        """Look.

        Args:
            at: Where.
        """
        return ""


class Typo(NoTools):
    def look(self, at: "Strng") -> str:  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
        """Look.

        Args:
            at: Where.
        """
        return ""


class NeedsAddress(NoTools):
    def __init__(self, url):
        self.url = url

    def look(self) -> str:
        """Look."""
        return ""


class Returns(NoTools):
    def reset(self, value=None, **kwargs):
        return value

    def look(self, part: str = "image") -> list:
        """Look.

        Args:
            part: Of which type.
        """
        return [{"type": part}]


NUMBER = 4


def of_tokens(completions, completion_ids):
    return [0.0]


def of_trainer(completions, trainer_state=None):
    return [float(trainer_state is None)]


def says_nothing(completions, **kwargs):
    return [None] * len(completions)


class Scored:
    """A reward function with a state."""

    def __init__(self, reward: float) -> None:
        self._reward = reward

    def __call__(self, completions, **kwargs):
        return [self._reward] * len(completions)


def _scored(completions, reward, **kwargs):
    return [reward] * len(completions)


def _same_name(reward: float):
    def correct(completions, **kwargs):
        return [reward] * len(completions)

    return correct


first_correct, second_correct = _same_name(1.0), _same_name(1.0)
two_points = Scored(2.0)
four_points = functools.partial(_scored, reward=4.0)


def too_many(completions, **kwargs):
    return [0.0, 1.0]


def raises(completions, **kwargs):
    raise KeyError("no such column")


def no_number(completions, **kwargs):
    return ["much"]


class Static(NoTools):
    """Has a tool that needs no instance."""

    @staticmethod
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    def get_reward(self):
        return 1.0
