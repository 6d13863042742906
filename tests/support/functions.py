"""Programs of the tests as functions of a user, in the sandbox in which a learner calls them."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from tinkermq.actors.training.functions.calls import OwnFunctions
from tinkermq.actors.training.functions.wire import CurriculumInputs, Kind
from tinkermq.envs.sandbox.shown import FOLDERS_VARIABLE

_MOST_CHARACTERS = 1 << 16
_RUNS = """
import contextlib, io
import numpy

def run(tasks):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(SOURCE, {"__name__": "__main__"})
    weights = numpy.zeros(len(tasks.tries_I))
    text = output.getvalue().encode()
    weights[: len(text)] = list(text)
    return weights
"""


@contextmanager
def sandboxed(
    folder: Path, source: str, kind: Kind, name: str, run: str = "runs/ada/r"
) -> Iterator[OwnFunctions]:
    """Yield the process of a function of a module, sandboxed as in a pool with users.

    The operator shows the module's folder, `folder/games`; the run lies in `folder/RUN`.
    """
    games = folder / "games"
    games.mkdir(exist_ok=True)
    (games / "mine.py").write_text(source)
    shown = os.pathsep.join(filter(None, [str(games), os.environ.get("PYTHONPATH", "")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDERS_VARIABLE, str(games))
        patch.setenv("PYTHONPATH", shown)
        functions = OwnFunctions({kind: f"mine:{name}"}, hidden=folder / run)
    with closing(functions):
        yield functions


def run_in_function(source: str, folder: Path) -> str:
    """Run a program in a function; return what it wrote to standard output."""
    module = f"SOURCE = {source!r}\n{_RUNS}"
    with sandboxed(folder, module, "curriculum", "run") as functions:
        function = functions.get("curriculum", "mine:run")
        assert function is not None
        zeros = np.zeros(_MOST_CHARACTERS)
        weights = function.weights(CurriculumInputs(zeros, zeros))
    return bytes(weights.astype(np.uint8)).rstrip(b"\0").decode()
