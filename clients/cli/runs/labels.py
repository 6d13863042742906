"""`tinkermq label`."""

from collections.abc import Sequence
from typing import Any

from ....schemas.job import JobRecord
from ...pool import Pool
from ..options import COMMON, Common
from ..output import print_json, say, say_plain
from ..session import with_pool


def label(
    run: str,
    /,
    *,
    tag: list[str] | None = None,
    untag: list[str] | None = None,
    group: str | None = None,
    notes: str | None = None,
    common: Common = COMMON,
) -> int:
    """Change what a run is found by, its tags, group and notes; print them as they are then.

    `tags`, `group` and `notes` of the configuration set them from the start.

    Parameters
    ----------
    run
        Name or job id.
    tag
        Add this one; may be given several times.
    untag
        Take this one away.
    group
        Put it into this group; "" takes it out of the one that it is in.
    notes
        What is to be remembered of it; "" removes them.
    """

    async def work(pool: Pool) -> JobRecord:
        record = await pool.find(run)
        if not (tag or untag or group is not None or notes is not None):
            return record
        tags = changed_tags(record.tags, tag or (), untag or ()) if tag or untag else None
        return await pool.label(record.job, tags=tags, group=group, notes=notes)

    record = with_pool(common.nats_url, work)
    if common.json:
        print_json(_labels(record))
        return 0
    say(f"{record.name}  tags {', '.join(record.tags) or 'none'}; group {record.group or 'none'}")
    if record.notes:
        say_plain(record.notes)
    return 0


def changed_tags(tags: Sequence[str], more: Sequence[str], fewer: Sequence[str]) -> list[str]:
    """Return tags with more of them behind, each once, and without some."""
    return [one for one in dict.fromkeys((*tags, *more)) if one not in fewer]


def _labels(record: JobRecord) -> dict[str, Any]:
    return {
        "job": record.job,
        "name": record.name,
        "tags": record.tags,
        "group": record.group,
        "notes": record.notes,
    }
