"""`tinkermq notify`: be told of the end of a run, wherever you are by then."""

import os
import sys
from getpass import getpass

from ....schemas.job import FINAL_STATES, NOTIFY_URL, JobRecord
from ....schemas.wire.errors import ConfigError
from ...pool import Pool
from ..options import COMMON, Common
from ..output import print_json, say
from ..session import with_pool


def notify(run: str, /, *, common: Common = COMMON) -> int:
    """Be told when a run finishes, fails or no longer improves.

    The pool sends it, so your machine may sleep. Where to is a URL of apprise's, in
    `TINKERMQ_NOTIFY_URL` or on standard input: it is a secret, so no option takes it.

    Parameters
    ----------
    run
        Name or job id.
    """
    url = os.environ.get(NOTIFY_URL) or _read_url()

    async def work(pool: Pool) -> JobRecord:
        record = await pool.find(run)
        if record.state in FINAL_STATES:
            raise ConfigError(
                f"run {record.name} is {record.state}: there is nothing more to tell",
                hint=f"its end: `tinkermq ps --all`; let it go on: `tinkermq resume {record.name}`",
            )
        return await pool.hand_over(record.job, {NOTIFY_URL: url})

    record = with_pool(common.nats_url, work)
    if common.json:
        print_json(record.model_dump())
    else:
        say(f"the pool will tell of the end of {record.name}")
    return 0


def _read_url() -> str:
    url = getpass("URL: ") if sys.stdin.isatty() else sys.stdin.readline()
    if "://" not in url:
        raise ConfigError(
            "there is no URL to send notifications to",
            hint=f"export {NOTIFY_URL}=ntfys://ntfy.sh/my-topic, or another URL of apprise's",
        )
    return url.strip()
