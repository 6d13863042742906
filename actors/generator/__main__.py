"""Start a generator: `python -m tinkermq.actors.generator --job JOB --name generator-0`."""

import sys
from collections.abc import Sequence

from ..runtime import JobContext, run_job_actor


async def _main(context: JobContext) -> None:
    if context.record.kind == "sft":
        from ..rollout.demonstrations import run_demonstrations
        from .generator import LearnerTurns, with_share

        if context.record.is_colocated:  # they overlap: there is one turn
            turn = await context.unless_stopping(LearnerTurns(context).begin(), None)
            if turn is None:
                return  # told to stop before it had the GPU
            context.config = with_share(context.config, turn)
        await run_demonstrations(context)
        return
    from .generator import run_generator

    await run_generator(context)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a generator until it is done or told to stop; return the exit code."""
    return run_job_actor("generator", _main, argv)


if __name__ == "__main__":
    sys.exit(main())
