"""`tinkermq priority` and `tinkermq cost`."""

import time
from typing import Any

from ....broker.metering import held_slots, slot_seconds
from ....schemas.job import JobRecord
from ...pool import Pool
from ..options import COMMON, Common
from ..output import note, print_json, print_table, say
from ..session import with_pool

_HOUR_S = 3600.0


def priority(run: str, value: int, /, *, common: Common = COMMON) -> int:
    """Change the priority of a run that waits: higher ones are placed first.

    Parameters
    ----------
    run
        Name or job id.
    value
        From -10 to 10; 0 is usual.
    """

    async def work(pool: Pool) -> JobRecord:
        return await pool.priority((await pool.find(run)).job, value)

    record = with_pool(common.nats_url, work)
    if common.json:
        print_json(record.model_dump())
    else:
        say(f"{record.name} has priority {record.priority}")
    return 0


def cost(run: str | None = None, /, *, common: Common = COMMON) -> int:
    """Show the slot-hours that runs have used, by the role of their actors.

    Parameters
    ----------
    run
        Name or job id; without one, all runs.
    """

    async def work(pool: Pool) -> list[JobRecord]:
        return await pool.list_jobs(all=True) if run is None else [await pool.find(run)]

    now = time.time()
    rows = [_row(record, now) for record in with_pool(common.nats_url, work)]
    if common.json:
        print_json(rows)
    elif not rows:
        note("no runs")
    else:
        roles = sorted({role for row in rows for role in row["slot_hours"]})
        cells = [_cells(row, roles) for row in rows]
        print_table(("run", "state", *roles, "slot-hours", "slots now"), cells)
    return 0


def _row(record: JobRecord, now: float) -> dict[str, Any]:
    hours = {role: used / _HOUR_S for role, used in slot_seconds(record, now).items()}
    return {
        "run": record.name,
        "job": record.job,
        "state": record.state,
        "slot_hours": hours,
        "total": sum(hours.values()),
        "slots": sum(held_slots(record).values()),
    }


def _cells(row: dict[str, Any], roles: list[str]) -> list[str]:
    used = (f"{row['slot_hours'].get(role, 0):.2f}" for role in roles)
    return [row["run"], row["state"], *used, f"{row['total']:.2f}", str(row["slots"])]
