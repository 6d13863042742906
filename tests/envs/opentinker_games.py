"""Game classes as they are written for OpenTinker; only the import line below was changed.

There it reads `from opentinker.environment.base_game import AbstractGame, StepResult`.
"""

import re
from typing import Any

from tinkermq.envs import AbstractGame, StepResult


class OnlyReset(AbstractGame):
    """The four methods that must be there: `reset` gets nothing and takes what comes."""

    def reset(self, **kwargs) -> str:
        self.target = kwargs.get("target", 3)
        self.steps = 0
        return f"Say a number of at least {self.target}."

    def step(self, action: str) -> StepResult:
        self.steps += 1
        won = action.strip().isdigit() and int(action) >= self.target
        return StepResult(
            observation="right" if won else "too small",
            reward=1 if won else 0,
            done=won or self.steps >= 3,
        )

    def get_system_prompt(self) -> str:
        return "You say numbers."

    def get_initial_user_message(self) -> str:
        return "The game begins."

    def gold_action(self) -> str:
        return str(self.target)


class ResetAndState(OnlyReset):
    """States come from `generate_initial_state`, and reach `reset(**kwargs)`."""

    def generate_initial_state(self) -> dict[str, Any]:
        return {"target": self.rng.randint(10, 99)}

    def get_state(self) -> dict[str, Any]:
        return {"target": self.target}


class Board(AbstractGame):
    """All optional methods, a board drawn within `reset`, moves in tags, rewards of ten."""

    agent_loop_name = "generic_agent"
    max_return = 10.0
    move = re.compile(r"<move>\s*(\d+)\s*,\s*(\d+)\s*</move>", re.IGNORECASE)

    def __init__(self, board_size: int = 3, max_total_steps: int | None = None):
        super().__init__()
        self.size = board_size
        self.max_total_steps = max_total_steps or 40
        self.steps = 0
        self._init_board()

    def _init_board(self):
        self.free = (-1, -1)

    def generate_initial_state(self) -> dict[str, Any]:
        return {"blocked": self.rng.randrange(self.size)}

    def reset(self, blocked: int | None = None, seed: int | None = None, **kwargs) -> str:
        self._init_board()
        self.steps = 0
        if blocked is not None:
            columns = [column for column in range(self.size) if column != blocked]
            self.free = (self.rng.randrange(self.size), self.rng.choice(columns))
        return self._render()

    def _render(self) -> str:
        return "\n".join(
            "".join("." if (row, column) == self.free else "X" for column in range(self.size))
            for row in range(self.size)
        )

    def step(self, action: str) -> StepResult:
        self.steps += 1
        found = self.move.search(action)
        if found is None:
            over = self.steps >= self.max_total_steps
            return StepResult("Invalid format.", -1.0, over, {"valid": False})
        won = (int(found[1]), int(found[2])) == self.free
        return StepResult(self._render(), 10.0 if won else -10.0, True, {"success": won})

    def get_system_prompt(self) -> str:
        return "Reply <move>row,col</move>."

    def get_initial_user_message(self) -> str:
        return "Find the free place."

    def render_state_for_prompt(self, **state) -> str:
        return self.reset(**state)

    def get_user_message_with_state(self, **state) -> str:
        return f"{self.get_initial_user_message()}\n\n{self.render_state_for_prompt(**state)}"

    def get_state(self) -> dict[str, Any]:
        return {"board": self._render(), "step_count": self.steps}

    def get_interaction_name(self) -> str:
        return "board"

    def parse_action(self, raw: str) -> str:
        return raw

    def gold_action(self) -> str:
        return f"<move>{self.free[0]},{self.free[1]}</move>"


class MathGame(AbstractGame):
    """A dataset game: the row's `ground_truth`, `data_source` and `extra_info` reach `reset`."""

    def __init__(self, max_retries: int = 0, answer_pattern: str | None = None):
        self.max_retries = max_retries

    def reset(
        self,
        ground_truth: str | None = None,
        data_source: str = "math",
        extra_info: dict[str, Any] | None = None,
        **kwargs,
    ) -> str:
        self.ground_truth = ground_truth
        self.data_source = data_source
        self.extra_info = extra_info or {}
        return ""

    def step(self, action: str) -> StepResult:
        answer = re.search(r"\\boxed{([^}]*)}", action)
        score = float(answer is not None and answer[1] == self.ground_truth)
        info = {"ground_truth": self.ground_truth, "data_source": self.data_source}
        return StepResult(observation="", reward=score, done=True, info={**info, **self.extra_info})

    def get_system_prompt(self) -> str:
        return "Put the answer into \\boxed{}."

    def get_initial_user_message(self) -> str:
        return ""

    def gold_action(self) -> str:
        return f"\\boxed{{{self.ground_truth}}}"
