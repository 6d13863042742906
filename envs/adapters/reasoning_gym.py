"""Tasks of reasoning-gym: one question, one answer, judged by the task's own scorer.

The policy answers between `<answer>` and `</answer>`, or, for models that do not write tags, in its
last line. The reward is the score, from 0 to 1; many tasks give partial credit.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from ..game import AbstractGame, StepResult
from ..reasoning import tagged, tagged_or_last_line
from ..registry import extra, refuse_unknown
from ..running.global_random import GlobalRandom

FULL_SCORE = 1.0
_UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, SyntaxError)
"""Errors that scorers raise for answers that they cannot parse."""
SYSTEM_PROMPT = (
    "Solve the task. Think first if you need to, then give the final answer, and nothing else, "
    "between <answer> and </answer>."
)
PLAIN_SYSTEM_PROMPT = "Reply with the final answer only."
"""Instructions without tags."""


class ReasoningGymGame(AbstractGame):
    """Answer a question of one of reasoning-gym's tasks."""

    isolation: ClassVar[Literal["thread", "process"]] = "process"
    needs = extra("reasoning_gym", "reasoning-gym")

    def __init__(
        self,
        datasets: str | Sequence[str] | Mapping[str, Mapping[str, Any]],
        system_prompt: str | None = None,
        needs_tags: bool = True,
    ) -> None:
        """Choose the tasks: a name, several, or a map from names to their configuration.

        Each episode draws one of them. Without `needs_tags` the last line of a reply that has no
        tags is its answer.
        """
        self._package = self.needs.load()
        self._configs = _configs(datasets)
        known = sorted(self._package.factory.DATASETS)
        refuse_unknown(self._configs, known, "reasoning-gym has no task", f"it has {known}")
        default = SYSTEM_PROMPT if needs_tags else PLAIN_SYSTEM_PROMPT
        self._system_prompt = default if system_prompt is None else system_prompt
        self._find_answer = tagged if needs_tags else tagged_or_last_line
        self._dice: GlobalRandom
        self._dataset: Any = None
        self._name = ""
        self._entry: dict[str, Any] = {}

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw a task and its seed."""
        name = self.rng.choice(list(self._configs))
        return {"dataset": name, "seed": self.rng.getrandbits(31)}

    def reset(self, *, dataset: str = "", seed: int = 0, **_: Any) -> str:
        """Make the question of a seed."""
        self._name = dataset
        self._dice = GlobalRandom(seed)
        config = {"size": 1, **self._configs[dataset], "seed": seed}
        with self._dice.lent():
            self._dataset = self._package.create_dataset(dataset, **config)
            self._entry = self._dataset[0]
        return str(self._entry["question"])

    def step(self, action: str) -> StepResult:
        """Score the answer: 0 without one, or for one that the task's scorer cannot parse."""
        score = self._score(self._find_answer(action, "answer"))
        info = {
            "type": self._name,
            "success": score is not None and score >= FULL_SCORE,
            "readable": score is not None,
        }
        return StepResult("", score or 0.0, done=True, info=info)

    def get_system_prompt(self) -> str:
        """Return how to answer."""
        return self._system_prompt

    def get_state(self) -> dict[str, Any]:
        """Return the task and the gold answer."""
        return {"dataset": self._name, "answer": str(self._entry.get("answer"))}

    def gold_action(self) -> str:
        """Return the task's own answer."""
        return f"<answer>{self._entry['answer']}</answer>"

    def _score(self, answer: str | None) -> float | None:
        if answer is None:
            return None
        try:
            with self._dice.lent():
                return float(self._dataset.score_answer(answer, self._entry))
        except _UNREADABLE:
            return None


def _configs(
    datasets: str | Sequence[str] | Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    if isinstance(datasets, str):
        datasets = [datasets]
    if isinstance(datasets, Mapping):
        return {name: dict(config or {}) for name, config in datasets.items()}
    return {name: {} for name in datasets}
