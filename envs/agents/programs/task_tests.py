"""The tests of a Harbor task: copied in after its program, and read for their reward.

They run when no process of the program is left, in what it has left of the task's files. What is
theirs is new: `/tests`, `/logs`, their home and their environment. A reward that the program has
written lies in an earlier `/logs`, which they do not see.
"""

import json
import math
from pathlib import Path
from typing import Any, cast

from ....schemas.wire.errors import RewardError
from ...task_folders import HarborTask
from .folders import ProgramFolder
from .sandbox import TESTS

TEST_COMMAND = ("bash", f"{TESTS}/test.sh")
REWARD_JSON, REWARD_TEXT = "reward.json", "reward.txt"
_REWARD_BYTES = 64 << 10
_MAX_METRICS = 64
_SHOWN_CHARS = 200
_FORM = (
    "tests/test.sh writes a number into /logs/verifier/reward.txt, or a map with `reward` into "
    "/logs/verifier/reward.json, also where the program has done nothing"
)


def write_tests(folder: ProgramFolder, task: HarborTask, most_bytes: int) -> None:
    """Put the tests of a task beside what its program has left; blocks."""
    folder.add("tests", task.folder / "tests", most_bytes)
    (folder["tests"] / "test.sh").chmod(0o755)
    for part in ("logs", "verifier", "test_home"):
        folder.add(part)
    for name in ("agent", "artifacts", "verifier"):
        (folder["logs"] / name).mkdir()
    folder.give_away("tests", "logs", "verifier", "test_home")


def read_reward(folder: ProgramFolder) -> tuple[str, bytes] | None:
    """Return which file holds the reward, and what it holds; blocks. None: there is none."""
    for name in (REWARD_JSON, REWARD_TEXT):
        written = folder.read("verifier", name, _REWARD_BYTES)
        if written is not None:
            return name, written
    return None


def parse_task_reward(
    written: tuple[str, bytes] | None, task: str, printed: str
) -> tuple[float, dict[str, float]]:
    """Return the reward, and the other numbers of a map; RewardError for what is no reward."""
    if written is None:
        raise RewardError(
            f"the tests of task {task} wrote no reward",
            hint=f"{_FORM}; they printed: {printed or 'nothing'}",
        )
    name, content = written
    text = content.decode("utf-8", "replace").strip()
    try:
        value: Any = float(text) if name == REWARD_TEXT else json.loads(text)
    except (ValueError, RecursionError):
        raise _refusal(task, name, text, "neither a number nor a map of numbers") from None
    if not isinstance(value, dict):
        return _number(value, task, name, text), {}
    fields = cast("dict[str, Any]", value)
    if "reward" not in fields:
        raise _refusal(task, name, text, "no `reward`")
    if len(fields) > _MAX_METRICS:
        raise _refusal(task, name, text, f"more than {_MAX_METRICS} numbers")
    numbers = {key: _number(one, task, name, text) for key, one in fields.items()}
    return numbers.pop("reward"), {key: one for key, one in numbers.items() if key.isprintable()}


def _number(value: Any, task: str, name: str, text: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(task, name, text, f"{value!r}"[:_SHOWN_CHARS])
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refusal(task, name, text, "a number that is not finite")
    return number


def _refusal(task: str, name: str, text: str, what: str) -> RewardError:
    return RewardError(
        f"the tests of task {task} wrote {what} into {Path('/logs/verifier') / name}: "
        f"{text[:_SHOWN_CHARS]!r}",
        hint=_FORM,
    )
