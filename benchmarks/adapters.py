"""Environments of other packages: what a reset and a step of theirs cost as games of ours.

Each is played on one core with actions that change little; the seconds are the process's own. A
package that is not installed is left out.

    python -m benchmarks.adapters [--episodes 100]
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkermq.envs.adapters.gymnasium import GymnasiumGame
from tinkermq.envs.adapters.reasoning_gym import ReasoningGymGame
from tinkermq.envs.adapters.textarena import TextArenaGame
from tinkermq.envs.prompt import open_game

from benchmarks.report import Report, parser


@dataclass
class Case:
    """One environment, and what is said to it."""

    game: Any
    """Its class."""
    arguments: dict[str, Any]
    """Arguments of the class."""
    actions: Sequence[str]
    """What is said, turn by turn."""
    seconds: dict[str, float] = field(default_factory=lambda: {"reset": 0.0, "step": 0.0})
    steps: int = 0


CASES = {
    "gymnasium FrozenLake-v1": Case(
        GymnasiumGame,
        {"env_id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"]},
        ["left", "up"] * 5,
    ),
    "textarena Mastermind-v0": Case(
        TextArenaGame, {"env_id": "Mastermind-v0"}, ["[1 2 3 4]", "[1 2 3 5]", "[1 2 3 6]"]
    ),
    "reasoning_gym leg_counting": Case(
        ReasoningGymGame, {"datasets": "leg_counting"}, ["<answer>4</answer>"]
    ),
}


def play(case: Case, seed: int) -> None:
    """Play one episode and add up what it took."""
    started = time.process_time()
    game = case.game(**case.arguments)
    open_game(game, seed=seed, record=None, kwargs={})
    ready = time.process_time()
    for action in case.actions:
        case.steps += 1
        if game.step(action).done:
            break
    case.seconds["reset"] += ready - started
    case.seconds["step"] += time.process_time() - ready


def main() -> None:
    """Parse the arguments, play, print and write."""
    options = parser(__doc__)
    options.add_argument("--episodes", type=int, help="episodes of each (100; quick: 5)")
    arguments = options.parse_args()
    report = Report("adapters", "Environments of other packages", quick=arguments.quick)
    episodes = arguments.episodes or (5 if arguments.quick else 100)
    rows: list[list[str]] = []
    for name, case in CASES.items():
        if not case.game.needs.installed:
            report.note(f"{name} was left out: {case.game.needs.missing().message}")
            continue
        play(Case(case.game, case.arguments, case.actions), 0)
        for seed in range(episodes):
            play(case, seed)
        reset_ms = 1000 * case.seconds["reset"] / episodes
        step_ms = 1000 * case.seconds["step"] / case.steps
        rows.append([name, f"{reset_ms:.2f}", f"{step_ms:.3f}"])
        report.at_most(f"a step of {name}", step_ms, None, "ms")
    report.table("Milliseconds on one core", ["environment", "reset", "step"], rows)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
