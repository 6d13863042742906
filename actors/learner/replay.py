"""Train a run again from its log: `python -m tinkermq.actors.learner.replay --job JOB`.

The batch records name the groups of each step, and the rollout log holds them. Trained again from
the same initial weights on the same hardware, a run has the same bits: the result is compared with
the run's newest checkpoint, which also records how the steps were computed. If bits cannot be
reproduced (CUDA kernels without `learner.deterministic`, another GPU or torch), the weights are
compared within a bound. The run is not changed.
"""

import argparse
import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from ...broker.client.connection import Broker, connect
from ...broker.jobs import JobStore
from ...broker.rollouts import BatchLog, RolloutLog
from ...schemas.config.job import JobConfig
from ...schemas.config.load_config import parse_config
from ...schemas.job import JobRecord
from ...schemas.rollout import Group
from ...schemas.task import BatchRecord
from ...schemas.wire.errors import NotFoundError, TinkermqError
from ..policy.devices import own_card, own_device
from ..policy.lora import policy_tensors
from ..policy.policies import policy_folder, prefix_of
from ..runtime import service_parser
from ..storage.cache import with_checkpoints_here, with_models_here
from ..storage.stores import Stores
from ..training.checkpoint import CheckpointStore, load_state
from ..training.critic import saved_critic
from ..training.functions.calls import OwnFunctions
from ..training.functions.wire import STEP_KINDS
from ..training.numerics import settle_numerics
from ..training.parallel import check_num_threads, torch_thread
from ..training.policies import Policies, load_models
from ..training.state import Numerics
from .memory import with_chosen_settings
from .ranks.processes import ChildRanks
from .start import starting_point

T = TypeVar("T")
BOUND = 0.1
"""Largest distance from the run's weights of a replay that cannot reproduce the bits, as a share of
the distance between the run's initial and final weights."""


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay."""

    steps: int
    """Number of repeated steps."""
    differing: list[str]
    """Names of the tensors whose bits differ from the checkpoint's; empty if none differ."""
    checkpoint: Path
    """The checkpoint of the comparison."""
    repeated: list[int] = field(default_factory=list[int])
    """Positions of the data order that were trained more than once; empty in a sound run."""
    distance: float = 0.0
    """Distance of the weights from the checkpoint's, over the distance that the run moved the
    weights."""
    inexact: str = ""
    """Why bits may differ; empty: they may not differ."""

    @property
    def identical(self) -> bool:
        """Whether all bits are the same, and every position was trained at most once."""
        return not self.differing and not self.repeated

    @property
    def is_sound(self) -> bool:
        """Whether it is identical, or within the bound if bits may differ."""
        near = bool(self.inexact) and self.distance <= BOUND
        return not self.repeated and (not self.differing or near)


async def replay(
    broker: Broker, record: JobRecord, progress: Callable[[int, int], None] | None = None
) -> ReplayResult:
    """Train all recorded steps of a run again and compare with its newest checkpoint.

    Raises NotFoundError if the log no longer holds them, or there is no checkpoint.
    """
    scope, stores = record.scope, Stores(broker, record.scope)
    config = await asyncio.to_thread(with_models_here, parse_config(record.config), stores)
    checkpoints = CheckpointStore(Path(record.run_dir), keep_last=1, keep_every=0)
    newest = checkpoints.latest()
    if newest is None:
        raise NotFoundError(
            f"run {record.name!r} has no checkpoint to compare with",
            hint="replay a run that has ended",
        )
    last_step = checkpoints.steps()[-1]
    nothing = CheckpointStore(Path(record.run_dir) / "none", keep_last=1, keep_every=0)
    here = await asyncio.to_thread(with_checkpoints_here, record, stores)
    folder, state, *_ = starting_point(nothing, here.fork_dir)
    records = [item for _, item in await BatchLog(broker, scope).read_all()]
    saved_state = load_state(newest)
    total_steps, recorded = saved_state.total_steps, saved_state.numerics
    config = _as_recorded(config, recorded)
    config = await asyncio.to_thread(with_chosen_settings, config, own_card())
    settle_numerics(config.learner, on_gpu=own_device().type == "cuda")
    log = RolloutLog(broker, scope)
    todo = [item for item in records if state.step < item.step <= last_step]
    recorded_steps = {item.step for item in todo}
    if missing := [n for n in range(state.step + 1, last_step + 1) if n not in recorded_steps]:
        raise NotFoundError(
            f"run {record.name!r} has no record of step {missing[0]}",
            hint="the broker's store was set back (event `store_rewound`), and its checkpoints "
            "were newer: such a run cannot be replayed",
        )
    models = load_models(config, folder)
    hidden = Path(record.run_dir) if broker.login.is_authenticated else None
    functions = await asyncio.to_thread(OwnFunctions.of, config, hidden, STEP_KINDS)
    ranks = ChildRanks.start(config)
    thread = torch_thread(config.learner.threads)

    async def in_torch(work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(thread, work, *arguments)

    try:
        await in_torch(check_num_threads, config.learner.threads)
        opening = partial(
            Policies.open, total_steps=total_steps, functions=functions, folder=folder
        )
        policies = await in_torch(opening, config, models, ranks)
        positions: Counter[int] = Counter()
        for item in todo:
            groups = await _groups(log, item)
            positions.update(group.task.index for group in groups if group.task.index is not None)
            tokens = item.microbatch_tokens
            step = partial(policies.step, microbatch_tokens=tokens)
            await in_torch(step, groups, item.step, item.oldest)
            if progress is not None:
                progress(item.step, last_step)
        made, saved = await in_torch(policies.gather), load_models(config, newest)
        differing = await in_torch(_differing, policies, made, saved, newest)
        distance = 0.0
        if differing:
            begun = load_models(config, folder)
            distance = await in_torch(_distance, made, saved, begun)
        now = policies.numerics
        inexact = why_inexact(recorded or [now.model_copy(update={"sums": 0})], now)
    finally:
        await asyncio.to_thread(ranks.close)
        functions.close()
        thread.shutdown()
    repeated = sorted(position for position, times in positions.items() if times > 1)
    return ReplayResult(len(todo), differing, newest, repeated, distance, inexact)


def _as_recorded(config: JobConfig, recorded: Sequence[Numerics]) -> JobConfig:
    """Return the configuration with the dtype of the run's computations."""
    if not recorded:
        return config
    learner = config.learner.model_copy(update={"dtype": recorded[-1].dtype})
    return config.model_copy(update={"learner": learner})


def why_inexact(recorded: Sequence[Numerics], now: Numerics) -> str:
    """Return why steps may differ in bits between then and now; empty: they may not."""
    for then in recorded:
        if not then.repeats:
            return f"it was trained with {then}; learner.deterministic=true makes a run repeat"
        if then != now:
            return f"it was trained with {then}, and is replayed with {now}"
    return "" if now.repeats else f"it is replayed with {now}"


async def _groups(log: RolloutLog, record: BatchRecord) -> list[Group]:
    groups: list[Group] = []
    for seq in record.seqs:
        entry = await log.get(seq)
        if entry is None or entry.group is None:
            raise NotFoundError(
                f"step {record.step} trained entry {seq} of the rollout log, which is gone",
                hint="set training.keep_rollouts=true to be able to replay a run",
            )
        groups.append(entry.group)
    return groups


def _differing(
    policies: Policies,
    made_by_policy: Mapping[str, Mapping[str, Tensor]],
    saved: Mapping[str, torch.nn.Module],
    checkpoint: Path,
) -> list[str]:
    """Return the names of policies' and critics' tensors with bits unlike the checkpoint's.

    `saved` are the policies of the checkpoint, with their adapters where they have some.
    """
    differing: list[str] = []
    for policy, trainer in policies.trainers.items():
        saved_tensors, made = policy_tensors(saved[policy]), made_by_policy[policy]
        if trainer.critic is not None:
            critics = saved_critic(policy_folder(checkpoint, policy))
            saved_tensors |= {f"critic.{name}": value for name, value in critics.items()}
        differing += [
            f"{prefix_of(policy)}{name}"
            for name, tensor in made.items()
            if not torch.equal(_bits(tensor), _bits(saved_tensors[name]))
        ]
    return differing


def _distance(
    made_by_policy: Mapping[str, Mapping[str, Tensor]],
    saved: Mapping[str, torch.nn.Module],
    begun: Mapping[str, torch.nn.Module],
) -> float:
    """Return the distance of policies made and saved, over the distance that the run moved."""
    apart, moved = 0.0, 0.0
    for policy, made in made_by_policy.items():
        ends, starts = policy_tensors(saved[policy]), policy_tensors(begun[policy])
        for name in made.keys() & ends.keys():
            end = ends[name].detach().double()
            apart += float((made[name].double() - end).square().sum())
            moved += float((end - starts[name].detach().double()).square().sum())
    return math.sqrt(apart / moved) if moved else math.inf


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().view(torch.uint8)


async def _main(arguments: argparse.Namespace, console: Console) -> int:
    broker = await connect(arguments.nats, name="replay", deadline_s=10)
    try:
        record = await JobStore(broker).get(arguments.user, arguments.job)
        with Progress(console=console, transient=True) as bars:
            bar = bars.add_task(f"replaying {record.name}", total=None)

            def show(step: int, last: int) -> None:
                bars.update(bar, completed=step, total=last)

            result = await replay(broker, record, show)
    finally:
        await broker.close()
    if result.repeated:
        console.print(
            f"{len(result.repeated)} positions of the data order were trained more than once, "
            f"first {result.repeated[0]}",
            style="red",
            markup=False,
        )
    if result.identical:
        console.print(
            f"{result.steps} steps trained again: every bit equals {result.checkpoint}",
            markup=False,
        )
        return 0
    if result.differing:
        message = (
            f"{result.steps} steps trained again: {len(result.differing)} tensors differ from "
            f"{result.checkpoint}, first {result.differing[0]}"
        )
        if result.inexact:
            message += (
                f". Bits may differ: {result.inexact}. The distance is {result.distance:.2g} of "
                f"what the run moved its weights, at most {BOUND:g} is allowed"
            )
        console.print(message, style=None if result.is_sound else "red", markup=False)
    return 0 if result.is_sound else 1


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and replay; exit code 0 only if every bit is the same, or within the
    bound where bits may differ."""
    parser = service_parser("learner.replay")
    parser.add_argument("--user", default="local", help="owner of the job (default: local)")
    parser.add_argument("--job", required=True, help="job id or name of the run")
    console = Console(stderr=True, emoji=False)
    try:
        return asyncio.run(_main(parser.parse_args(argv), console))
    except TinkermqError as error:
        console.print(str(error), style="red", markup=False)
        return 2


if __name__ == "__main__":
    sys.exit(main())
