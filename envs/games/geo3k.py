r"""Geometry3k: a geometry problem with a drawing, an answer in `\boxed{}`, graded by math-verify.

`Geo3KGame` takes one answer; `Geo3KToolGame` shows the policy its result and lets it try again.
`examples/prepare_math.py` makes the data; its images are in the first prompt. `make_data` and
`demonstrations` are a tiny task in the same form, for a vision-language model of some hundred
thousand parameters: count the corners of a drawn shape. Most answers of its warm start do not
depend on the drawing and are right one time in three; reinforcement learning selects those that do.
"""

import io
import random
from collections.abc import Mapping
from math import cos, pi, sin
from typing import Any

from ..dataset import IMAGE_TAG
from ..game import ChatMessage, StepResult
from ..math.grading import ANSWER, answer_of
from ..registry import extra
from ..write_data import DataMaker, verl_row
from .math import MathGame

WEIGHTS = {ANSWER: 0.9, "think": 0.1}
"""Weights of accuracy and format."""
PENALTY = -0.05
"""Reward of a try that is not better than the earlier ones."""
HABIT = 0.7
"""Share of the demonstrations with a random shape."""
CORNERS = (0, 3, 4)
"""The shapes of the tiny task: circle, triangle and square."""
QUESTION = f"{IMAGE_TAG}Corners?"
SIDE = 16
"""Width and height of a drawing in pixels."""


class Geo3KGame(MathGame):
    """Answer a geometry question about a drawing in one turn."""

    def __init__(self, rewards: Mapping[str, float] | None = None, system_prompt: str = "") -> None:
        """Take the weights of the rules and the system prompt; the data holds the instructions."""
        super().__init__(rewards or WEIGHTS, system_prompt)


class Geo3KToolGame(MathGame):
    """Answer a geometry question about a drawing; wrong answers may be corrected."""

    def __init__(self, max_tries: int = 3, system_prompt: str = "") -> None:
        """Set the maximum number of answers of an episode."""
        if max_tries < 1:
            raise ValueError(f"max_tries={max_tries} must be at least 1")
        super().__init__({ANSWER: 1.0}, system_prompt)
        self._max_tries = max_tries
        self._tries = 0
        self._best = 0.0

    def reset(self, *, ground_truth: str, **_: Any) -> str:
        """Start with the answer of a row; the question is the row's prompt."""
        self._tries, self._best = 0, 0.0
        return super().reset(ground_truth=ground_truth)

    def step(self, action: str) -> StepResult:
        """Judge a try: the last one earns its reward, a worse earlier one costs a penalty."""
        result = super().step(action)
        total = result.reward
        self._tries += 1
        better, self._best = total > self._best, max(total, self._best)
        done = total == 1.0 or self._tries == self._max_tries
        reward = total if done else 0.0 if better else PENALTY
        answer = answer_of(action) or "(no boxed answer)"
        observation = "" if done else f"Current parsed answer={answer} reward={total}"
        return StepResult(observation, reward, done, {**result.info, "tries": self._tries})


def demonstrations(rng: random.Random) -> list[ChatMessage]:
    """Return one conversation for the warm start; `HABIT` of them do not look at the drawing."""
    corners = rng.choice(CORNERS)
    named = corners if rng.random() >= HABIT else rng.choice(CORNERS)
    answer = rf"\boxed{{{named}}}"
    image = {"type": "image", "image": draw(rng, corners)}
    text = {"type": "text", "text": QUESTION.removeprefix(IMAGE_TAG)}
    return [{"role": "user", "content": [image, text]}, {"role": "assistant", "content": answer}]


def draw(rng: random.Random, corners: int) -> bytes:
    """Draw a shape of a random size and colour about the middle of a square, as a PNG file."""
    pillow = extra("PIL", "vision")
    radius = rng.uniform(6, 7)
    x, y = ((SIDE - 1) / 2 + rng.uniform(-0.5, 0.5) for _ in range(2))
    dark, light = (tuple(rng.randrange(low, low + 30) for _ in range(3)) for low in (0, 226))
    image = pillow.load("Image").new("RGB", (SIDE, SIDE), light)
    pen = pillow.load("ImageDraw").Draw(image)
    if corners:
        start = pi / 4 if corners == 4 else pi / 2
        angles = [start + 2 * pi * corner / corners for corner in range(corners)]
        pen.polygon([(x + radius * cos(a), y - radius * sin(a)) for a in angles], fill=dark)
    else:
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=dark)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    corners = rng.choice(CORNERS)
    row = verl_row(QUESTION, str(corners), data_source="shapes", split=split, index=index)
    return {**row, "images": [{"bytes": draw(rng, corners), "path": None}]}


make_data = DataMaker(_row)
