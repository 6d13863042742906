"""Soak: kills and stops at random over all roles, then every group of every run accounted for.

    python -m benchmarks.soak --kills 200 --seed 1

A pool of real processes with limits at their defaults runs four kinds of tiny jobs beside each
other, while SIGKILL meets learners, generators, environment hosts, evaluators, schedulers, nodes
with all their actors, nats-server, the gateway, the auth service and users' programs, also two at
the same moment, and nats-server again while it restarts. Between them are SIGTERM, SIGSTOP, actors
that stay frozen, partitions of an actor or of a whole node (just behind a batch record, too; what
was held back arrives late or never), schedulers whose clocks are wrong, stopped and resumed, paused
and resumed jobs. In the end
`account.py` reads streams and files raw, and `tinkermq replay` trains every run again. Exit code 0
only if nothing is wrong.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinkermq.schemas.config.load_config import parse_config

from benchmarks.soak.account import Account, Run, account
from benchmarks.soak.injector import WEIGHTS, Injector
from benchmarks.soak.lanes import Finished, Lane, Watcher
from benchmarks.soak.pool import Pool, tinkermq
from benchmarks.soak.recipes import RECIPES, num_rows
from tests.support.waiting import eventually

_TEND_S = 0.5
_REPLAY_S = 600.0
_GONE_S = 60.0
_ACCOUNTANTS = 2


@dataclass(frozen=True)
class Options:
    """What a soak is made of."""

    kills: int
    seed: int
    folder: Path
    roles: frozenset[str] = frozenset(WEIGHTS)
    lanes: tuple[str, ...] = tuple(one.name for one in RECIPES)
    steps: int = 120
    pause_s: float = 6.0
    users: bool = False
    """Whether the pool has users, and so an auth service."""


@dataclass
class Outcome:
    """What came of it."""

    runs: list[tuple[Finished, Account]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What is wrong beside the runs."""
    remarks: list[str] = field(default_factory=list)
    table: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and not any(
            done.problems or found.problems for done, found in self.runs
        )


async def soak(options: Options, model: Path, say: Callable[[str], None] = print) -> Outcome:
    """Run a soak; everything it started has ended when it returns."""
    began = time.monotonic()

    def tell(line: str) -> None:
        say(f"[{time.monotonic() - began:7.1f}] {line}")

    outcome = Outcome()
    async with Pool(options.folder, users=options.users) as pool:
        watcher = Watcher()
        await watcher.open(pool.looking_url)
        rng = random.Random(options.seed)
        by_name = {one.name: one for one in RECIPES}
        done: asyncio.Queue[Finished | None] = asyncio.Queue()
        lanes = [
            Lane(n, by_name[name], pool, watcher, model, options.steps, _apart(rng), tell, done)
            for n, name in enumerate(options.lanes)
        ]
        injector = Injector(
            pool, lanes, _apart(rng), options.roles, options.kills, options.pause_s, tell
        )

        async def account_all() -> None:
            while (one := await done.get()) is not None:
                outcome.runs.append((one, await _account(pool, watcher, one)))
                tell(_line(*outcome.runs[-1]))

        await _let_run(injector, lanes, outcome, account_all, done)
        outcome.problems += injector.faults
        outcome.remarks += pool.ended
        await _check_pool(pool, outcome)
        await watcher.close()
    await _check_nothing_left(pool, outcome)
    outcome.table = _table(options, injector, outcome, time.monotonic() - began)
    return outcome


def _apart(rng: random.Random) -> random.Random:
    """Return a stream of random numbers of its own, so that what draws when does not matter."""
    return random.Random(rng.getrandbits(64))


async def _let_run(
    injector: Injector,
    lanes: Sequence[Lane],
    outcome: Outcome,
    account_all: Callable[[], Coroutine[None, None, None]],
    done: "asyncio.Queue[Finished | None]",
) -> None:
    """Kill while the lanes run jobs; account for those that have ended while the last ones do."""
    over = asyncio.Event()
    running = [asyncio.create_task(lane.run(over)) for lane in lanes]
    tending = asyncio.create_task(_tend(injector))
    killing = asyncio.create_task(injector.run())
    await asyncio.wait([killing, *running], return_when=asyncio.FIRST_COMPLETED)
    over.set()
    if not killing.done():  # a lane has failed, and its error is told below
        killing.cancel()
    await _settle([killing], outcome)
    accounting = [asyncio.create_task(account_all()) for _ in range(_ACCOUNTANTS)]
    await _settle(running, outcome)
    for _ in accounting:
        done.put_nowait(None)
    await _settle(accounting, outcome)
    tending.cancel()


async def _settle(tasks: "Sequence[asyncio.Task[None]]", outcome: Outcome) -> None:
    """Wait for tasks; their errors are told with the outcome, and the rest is looked at."""
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if result is not None:
            outcome.problems.append(f"{type(result).__name__}: {result}")


async def _tend(injector: Injector) -> None:
    """Start again what ended by itself, as systemd or a user does, for ever."""
    while True:
        for name in injector.pool.tend():
            injector.start_now(name)
        await asyncio.sleep(_TEND_S)


# -- looking at what is left ---------------------------------------------------------------------


async def _check_pool(pool: Pool, outcome: Outcome) -> None:
    """The gateway answers, and no actor of a job runs any more."""

    async def answers() -> bool:
        return await pool.gateway().alive()

    async def gone() -> bool:
        return not any(one.job for one in pool.targets())

    for attempt, what in ((answers, "the gateway to answer"), (gone, "all actors to end")):
        try:
            await eventually(attempt, what, _GONE_S)
        except (TimeoutError, AssertionError) as error:
            running = ", ".join(str(one) for one in pool.targets() if one.job)
            outcome.problems.append(f"{error} {running}")


async def _check_nothing_left(pool: Pool, outcome: Outcome) -> None:
    async def none() -> bool:
        return not await asyncio.to_thread(pool.left_over)

    try:
        await eventually(none, "all processes to end", _GONE_S)
    except TimeoutError:
        outcome.problems.append(f"processes are left over: {pool.left_over()}")


async def _account(pool: Pool, watcher: Watcher, done: Finished) -> Account:
    record = done.job.record
    if done.problems:
        return Account()
    run = Run(
        record.job,
        record.user,
        Path(record.run_dir),
        parse_config(record.config).model_dump(),
        watcher.issued[record.job],
        num_rows(record.config) if done.recipe.has_rows else None,
    )
    try:
        found = await account(pool.looking_url, run)
    except Exception as error:  # noqa: BLE001  what cannot be read is what is wrong with the run
        return Account([f"its data cannot be read: {type(error).__name__}: {error}"])
    await _replay(pool, record.name, found)
    return found


async def _replay(pool: Pool, name: str, found: Account) -> None:
    process = tinkermq(pool.server.url, "replay", name)
    try:
        out, _ = await asyncio.to_thread(process.communicate, None, _REPLAY_S)
    finally:
        process.kill()
    told = " ".join(out.decode(errors="replace").split())
    found.expect(process.returncode == 0, f"replay ended with {process.returncode}: {told[-400:]}")


# -- telling -------------------------------------------------------------------------------------


def _line(done: Finished, found: Account) -> str:
    """Tell one run in a line, and each problem in one of its own."""
    drops = ", ".join(f"{count} {reason}" for reason, count in sorted(found.dropped.items()))
    problems = [*done.problems, *found.problems]
    lines = [
        f"{done.job.record.name:<20} {done.job.record.state:<10} steps {found.num_steps:>3}  "
        f"groups {found.num_trained:>4}  dropped {drops or 'none'}  "
        f"attempts {done.job.record.attempt}{' (once after its end)' if done.resumed else ''}  "
        f"told again {found.num_reported_again}  of two learners {found.num_foreign}  "
        f"{'' if problems else 'accounted for, replay equal'}"
    ]
    return "\n".join(lines + [f"      WRONG: {one}" for one in problems])


def _table(options: Options, injector: Injector, outcome: Outcome, spent_s: float) -> str:
    def told(counter: Counter[str]) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(counter.items())) or "none"

    killed = injector.killed
    lines = [
        f"seed {options.seed}: {killed.total()} kills ({injector.num_pairs} pairs at one moment), "
        f"{injector.stopped.total()} stops, {spent_s:.0f} s",
        f"killed  {told(killed)}",
        f"stopped {told(injector.stopped)}",
        *(_line(*run) for run in outcome.runs),
        *(f"WRONG: {one}" for one in outcome.problems),
        *(f"remark: {one}" for one in outcome.remarks),
        "nothing is wrong" if outcome.is_clean else "SOMETHING IS WRONG",
    ]
    return "\n".join(lines)


def main() -> int:
    """Parse the command line and run; the folder is kept where something is wrong."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.soak", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs in all (default: 200)")
    parser.add_argument("--seed", type=int, help="default: drawn, and printed")
    parser.add_argument("--roles", nargs="+", choices=sorted(WEIGHTS), default=sorted(WEIGHTS))
    names = [one.name for one in RECIPES]
    parser.add_argument("--lanes", nargs="+", choices=names, default=names, help="kinds of jobs")
    parser.add_argument("--steps", type=int, default=120, help="of each job (default: 120)")
    parser.add_argument("--pause", type=float, default=6.0, help="seconds between kills, about")
    parser.add_argument(
        "--folder", type=Path, help="keep everything here (default: a temporary one)"
    )
    parser.add_argument("--users", action="store_true", help="let in who has a key only")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    folder = given.folder or Path(tempfile.mkdtemp(prefix="tinkermq-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, folder {folder}", flush=True)

    from tinkermq.actors.policy.tiny_models import save_tiny_model

    model = save_tiny_model(folder / "model", width=64, layers=2, seed=1)
    options = Options(
        given.kills,
        seed,
        folder,
        frozenset(given.roles),
        tuple(given.lanes),
        given.steps,
        given.pause,
        given.users,
    )
    outcome = asyncio.run(soak(options, model, lambda line: print(line, flush=True)))
    print(f"\n{outcome.table}", flush=True)
    return 0 if outcome.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
