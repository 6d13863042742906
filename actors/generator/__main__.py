"""Start a generator: `python -m tinkermq.actors.generator --job JOB --name generator-0`."""

import sys

from ..runtime import JobContext, run_job_actor


async def _main(context: JobContext) -> None:
    from .generator import run_generator

    await run_generator(context)


if __name__ == "__main__":
    sys.exit(run_job_actor("generator", _main))
