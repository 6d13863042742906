"""TRL's GRPOTrainer against ours on the same data: samples and CPU seconds until a reward.

    python -m benchmarks.evidence.peer

Runs what has no line in results/peer.jsonl yet; needs the `bench` extra. Addition and calculator
from the same warm starts, with the same rows in the same order, group size, learning rate, clips
and aggregation: TRL as it is, ours without a lag and with the lag forced to two versions. One
thread each, in turns; both are validated by our engine on the same rows every two steps
(peer_run.py). Some seven minutes of one core.
"""

import asyncio

from benchmarks.evidence.cells import SEEDS, Cell, job_of, run_cells, take_no_arguments
from benchmarks.evidence.lagged import Curve, LaggedRun

EXPERIMENT = "peer"
GAMES = ("addition", "calculator")
TEST_EVERY = 2
THEIRS, OURS = "TRL", "tinkermq"
PEERS = ((THEIRS, 0), (OURS, 0), (OURS, 2))
"""Each side and its lag."""


def cells() -> list[Cell]:
    """Return all runs, every seed's together: seconds are compared within some minutes."""
    return [
        Cell(game, method, lag, seed) for seed in SEEDS for game in GAMES for method, lag in PEERS
    ]


def measure(cell: Cell) -> Curve:
    """Run one of them."""
    job = job_of(cell)
    if cell.method == OURS:
        return asyncio.run(LaggedRun(job, lag=cell.lag, test_every=TEST_EVERY).run())
    from benchmarks.evidence.peer_run import train_with_trl

    return asyncio.run(train_with_trl(job, test_every=TEST_EVERY))


if __name__ == "__main__":
    take_no_arguments(__doc__)
    run_cells(EXPERIMENT, cells(), test_every=TEST_EVERY, measure=measure)
