"""Give all machines of a pool back, and wait until they are gone: what `tinkermq down` does last.

`python -m tinkermq.actors.scheduler.machines --nats URL --machines WHERE`; no scheduler may run.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from ....schemas.machines import machines_config
from ....schemas.wire.errors import DeadlineError, TinkermqError
from .source import MachineSource
from .sources import machine_source

DEADLINE_S = 45.0
_POLL_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Return all machines to their cluster; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tinkermq.actors.scheduler.machines")
    parser.add_argument("--nats", required=True, help="URL of the broker, which names the pool")
    parser.add_argument("--machines", required=True, help="where they are from")
    arguments = parser.parse_args(argv)
    config = machines_config(arguments.machines)
    try:
        asyncio.run(give_all_back(machine_source(config, config.url or arguments.nats)))
    except TinkermqError as error:
        sys.stderr.write(f"{error.message}; {error.hint}\n")
        return 1
    return 0


async def give_all_back(source: MachineSource) -> None:
    """Return the machines of a pool; raises DeadlineError with those that have not ended.

    Requests that never started are printed and not awaited: Ray drops them.
    """
    machines = await source.list_machines()
    for machine in machines:
        await source.release_machine(machine, drain=True)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while machines := [  # noqa: ASYNC110  the cluster sends no events
                item for item in await source.list_machines() if item.state != "asked"
            ]:
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        left = ", ".join(f"{item.name} ({item.id})" for item in machines)
        raise DeadlineError(
            f"machines have not ended after {DEADLINE_S:g} s: {left}",
            hint="they are still draining; end them in the cluster by their ids",
        ) from error


if __name__ == "__main__":
    sys.exit(main())
