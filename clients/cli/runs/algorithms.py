"""`tinkermq algorithm check`: functions of one's own, on small random tensors."""

import importlib.util
import json as json_format
import subprocess
import sys
from typing import Literal

from ....envs.check import CheckResult
from ....schemas.wire.errors import ConfigError
from ..games.envs import say_checks

_DEADLINE_S = 120.0


def check(
    function: str,
    /,
    *,
    kind: Literal["loss", "advantage", "correction", "mask", "filter", "curriculum"] = "loss",
    json: bool = False,
) -> int:
    """Check a function of your own that learners run, without a model or a pool.

    One finite value for each token, the same twice; a loss keeps a finite gradient, makes tokens
    with positive advantages likelier, and a token's loss hangs on its own sequence alone.

    Parameters
    ----------
    function
        `module:function`, also of the working folder, or a name that a package has registered.
    kind
        What it is.
    json
        Print JSON.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "`algorithm check` needs torch, which is not installed here",
            hint="pip install 'tinkermq[worker]'",
        )
    done = subprocess.run(
        [sys.executable, "-m", "tinkermq.actors.learner.custom_check", kind, function],
        capture_output=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(f"{function} cannot be checked: {' '.join(last)}")
    answers = json_format.loads(done.stdout.splitlines()[-1])
    return say_checks([CheckResult(**answer) for answer in answers], json=json)
