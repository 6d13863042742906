"""A loss that looks for the runs of others, and learns nothing where it finds one."""

from pathlib import Path
from typing import Any


def nosy(inputs: Any) -> Any:
    """Return REINFORCE's loss; raise for any run folder that is not that of run-bob."""
    found = [str(path) for path in Path("/tmp").rglob("config.json")]
    strangers = [path for path in found if "run-" in path and "run-bob" not in path]
    if strangers or not any("run-bob" in path for path in found):
        raise ValueError(f"a learner sees {strangers} of {found}")
    return -inputs.logprobs_N * inputs.advantages_N
