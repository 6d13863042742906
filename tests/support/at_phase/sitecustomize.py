"""A fault in a phase of a learner's rank: with this folder in PYTHONPATH, for all of its processes.

The file that TEST_FAULT names holds a rank, a phase, and the number of a signal, or 0: the thread
waits until something is written into the pipe `.held` beside it, while the others of its process
run.
"""

import contextlib
import os
import sys
from pathlib import Path

_FILE = Path(os.environ["TEST_FAULT"])


def _at_phase(event: str, arguments: tuple[object, ...]) -> None:
    if event != "tinkermq.phase" or not arguments[0]:
        return
    rank = int("tinkermq.actors.learner.ranks.worker" in sys.orig_argv)
    with contextlib.suppress(FileNotFoundError):
        wanted_rank, phase, signal = _FILE.read_text().split()
        if (int(wanted_rank), phase) != (rank, arguments[0]):
            return
        held = _FILE.with_suffix(".held")
        _FILE.unlink()
        if not int(signal):
            os.mkfifo(held)
        _FILE.with_suffix(".own").write_text(str(os.getpid()))
        _FILE.with_suffix(".own").rename(_FILE.with_suffix(".pid"))
        if int(signal):
            os.kill(os.getpid(), int(signal))
        else:
            held.read_text()
            held.unlink()


sys.addaudithook(_at_phase)
