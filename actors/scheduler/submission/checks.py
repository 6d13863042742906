"""The checks of a job by the scheduler and its nodes, for submissions and for dry runs.

A submission raises the error of the first check that fails; a dry run returns all results (see
`schemas/checks.py`). Checks that no node answers in time pass; the job itself then finds problems.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ....broker.client.connection import Broker
from ....broker.client.rpc import call
from ....envs.registry import named_objects
from ....schemas.checks import CheckReply, CheckResult, failed_check, run_check
from ....schemas.config.algorithm import is_checkpoint
from ....schemas.config.job import EnvConfig, JobConfig
from ....schemas.config.sections import is_url, model_paths
from ....schemas.job import ActorPlacement, JobRecord
from ....schemas.node import LookQuestion, ModelQuestion, NodeStatus
from ....schemas.plan.plan import plan_for_pool
from ....schemas.plan.settings import refuse_models
from ....schemas.wire import errors
from ....schemas.wire.message import Message
from ....schemas.wire.subjects import node as node_subject
from ...storage.access import own_folders, shown_from, without_tilde
from ..jobs import states
from ..jobs.view import JobsView
from ..reconciler import Reconciler
from .access import FileReads

ANSWER_S = 12.0
MAX_ASKED = 8
"""Number of nodes to ask; further nodes of a larger pool count as without answer."""
_SCHEDULER = "scheduler"


class Reader(NamedTuple):
    """The user of a check, and the files whose existence the user may learn."""

    user: str
    own: Sequence[Path]
    """Folders of the user's runs."""
    roots: Sequence[Path]
    """Folders in which the user's jobs may write; empty: the user may read everything."""

    def may_know(self, model: str) -> bool:
        """Return whether the answer may reveal what is at a path."""
        try:
            place = Path(os.path.realpath(without_tilde(model)))
        except ValueError:  # a null byte: not a path
            return True
        return not self.roots or shown_from(place, self.own, self.roots) is not None


class JobChecks:
    """Checks jobs before they are queued."""

    def __init__(
        self, broker: Broker, view: JobsView, reconciler: Reconciler, files: FileReads
    ) -> None:
        """Check against the quotas of `view`, the nodes of `reconciler`, and `files`."""
        self._broker = broker
        self._view = view
        self._reconciler = reconciler
        self._files = files

    async def run(self, record: JobRecord, config: JobConfig) -> AsyncIterator[CheckResult]:
        """Yield the results for a job whose record has its actors, quick checks first."""
        nodes = self._reconciler.nodes()
        reader = self.reader(record)
        yield run_check("slots", lambda: self._check_slots(record, nodes), _SCHEDULER)
        async for result in self._check_memory(record, config, nodes, reader):
            yield result
        by_nodes = await asyncio.gather(
            self._check_models(record, config, nodes, reader),
            self._check_inputs(record, config, nodes),
        )
        for result in itertools.chain(*by_nodes):
            yield result

    def _check_slots(self, record: JobRecord, nodes: Sequence[NodeStatus]) -> str:
        self.refuse_placing(record.user, record.actors)
        available = sum(node.slots for node in nodes)
        on = errors.counted(len(nodes), "node")
        return f"{states.slots_of(record.actors)} of {available} on {on}"

    def refuse_placing(self, user: str, actors: Sequence[ActorPlacement]) -> None:
        """Raise PlacementError or QuotaError for actors that this pool cannot place."""
        self._reconciler.refuse_impossible(actors)
        self._view.check_alone(user, actors)

    async def _check_memory(
        self, record: JobRecord, config: JobConfig, nodes: Sequence[NodeStatus], reader: Reader
    ) -> AsyncIterator[CheckResult]:
        """Check the memory of a training job on the pool's GPUs.

        There is no check if it may run on a CPU or on machines still to be requested, or if the
        model is unknown to the scheduler or hidden from the reader.
        """
        if not record.trains or self._reconciler.may_grow or not all(node.gpus for node in nodes):
            return
        if not await self._may_know_all(models_of(config), reader):
            return
        gpus = [(gpu.model, gpu.memory_bytes) for node in nodes for gpu in node.gpus]
        plan = await self._files.read(reader.user, plan_for_pool, config, gpus)
        if plan is None:
            return
        if plan.refusal is not None:
            yield failed_check("memory", plan.refusal, _SCHEDULER)
        else:
            yield _passed("memory", "\n".join(plan.lines()))

    async def refuse_models(self, config: JobConfig, reader: Reader, *, trains: bool) -> None:
        """Raise ModelError or ConfigError for models that cannot be used, as config.json says.

        Models unknown to the scheduler or hidden from the reader are checked by the generators.
        """
        if await self._may_know_all(models_of(config), reader):
            await self._files.read(reader.user, refuse_models, config, trains=trains)

    async def _check_models(
        self, record: JobRecord, config: JobConfig, nodes: Sequence[NodeStatus], reader: Reader
    ) -> list[CheckResult]:
        try:
            await self.refuse_models(config, reader, trains=record.trains)
        except (errors.ModelError, errors.ConfigError) as error:
            return [failed_check("model", error, _SCHEDULER)]
        if record.fork_dir:
            text = f"it begins with {record.fork_of}: {record.fork_dir}"
            return [_passed("model", text)]
        known = await self._known_models(models_of(config), reader)
        user = reader.user
        asking = (self._check_model(nodes, model, known[model], user) for model in known)
        return list(await asyncio.gather(*asking))

    async def _check_model(
        self, nodes: Sequence[NodeStatus], model: str, may_know: bool, user: str
    ) -> CheckResult:
        question = ModelQuestion(model=model, alike=not may_know, user=user)
        replies = await self._ask_nodes(nodes, "model", question)
        return _combine("model", model, nodes, replies)

    async def _check_inputs(
        self, record: JobRecord, config: JobConfig, nodes: Sequence[NodeStatus]
    ) -> list[CheckResult]:
        """Check the data, game and functions read by actors of the pool; clients read their own.

        Programs bring their own environment.
        """
        files, game = list(config.sft.data) if record.trains else [], ""
        functions = _functions_of_learner(config) if record.trains else []
        if any(actor.role == "environment" for actor in record.actors):
            files += [*config.env.train_data, *config.env.val_data]
            game = "" if config.agent.runs_programs else config.env.game or ""
            functions += _functions_of_hosts(config.env)
        question = LookQuestion(
            files=list(dict.fromkeys(files)), game=game, functions=functions, user=record.user
        )
        subjects = {
            "data": errors.counted(len(files), "file") if files else "",
            "game": game,
            "functions": ", ".join(functions),
        }
        if not any(subjects.values()):
            return []
        replies = await self._ask_nodes(nodes, "look", question)
        return [
            _combine(name, subject, nodes, replies) for name, subject in subjects.items() if subject
        ]

    async def nodes_with_model(self, record: JobRecord, config: JobConfig) -> list[str]:
        """Return the nodes that have the model of a job, if its owner may know of it."""
        reader = self.reader(record)
        if not await self._may_know_all([*model_paths(config).values(), *config.sft.data], reader):
            return []
        question = ModelQuestion(model=config.model.path, user=record.user)
        replies = await self._ask_nodes(self._reconciler.nodes(), "model", question)
        return [node for node, results in replies if results and results[0].ok]

    async def _ask_nodes(
        self, nodes: Sequence[NodeStatus], verb: str, question: Message
    ) -> list[tuple[str, list[CheckResult]]]:
        """Return the results of the nodes that answered in time, by node."""
        names = [node.node for node in nodes[:MAX_ASKED]]
        asking = (self.ask_node(name, verb, question, timeout_s=ANSWER_S) for name in names)
        replies = await asyncio.gather(*asking)
        return [
            (name, reply.results) for name, reply in zip(names, replies, strict=True) if reply.done
        ]

    async def ask_node(
        self, name: str, verb: str, question: Message, *, timeout_s: float
    ) -> CheckReply:
        """Return a node's reply; not done if it is leaving, or does not support the question."""
        try:
            return await call(
                self._broker,
                node_subject(name, verb),
                question,
                CheckReply,
                timeout_s=timeout_s,
                waiting_for=f"node {name}",
                idempotent=True,
            )
        except errors.TinkermqError:
            return CheckReply(done=False)

    def reader(self, record: JobRecord) -> Reader:
        """Return a job's owner as reader, with the writable folders of the owner's jobs."""
        roots = record.output_roots if self._view.has_users else []
        return Reader(record.user, own_folders(record), [Path(root) for root in roots])

    async def _may_know_all(self, models: Iterable[str], reader: Reader) -> bool:
        """Return whether the reader may know about all of these paths."""
        return all((await self._known_models(models, reader)).values())

    async def _known_models(self, models: Iterable[str], reader: Reader) -> dict[str, bool]:
        """Return for each model whether the reader may know about it. Raises StorageError."""
        return {
            model: await self._files.read(reader.user, reader.may_know, model) for model in models
        }


def models_of(config: JobConfig) -> Iterable[str]:
    """Return the models from which a job starts, except those in a store or of other runs."""
    paths = model_paths(config)
    paths.pop("model.tokenizer", None)  # it needs no weights
    return dict.fromkeys(
        path for path in paths.values() if not (is_url(path) or is_checkpoint(path))
    )


def _functions_of_learner(config: JobConfig) -> list[str]:
    """Return the user's functions, by module, that a learner imports."""
    keys = ("own_advantage", "own_loss", "own_correction", "own_mask", "own_filter")
    named = (*(getattr(config.algorithm, key) for key in keys), config.training.own_curriculum)
    return [name for name in named if name and ":" in name]


def _functions_of_hosts(env: EnvConfig) -> list[str]:
    """Return the user's functions and classes that environment hosts import beside the game."""
    own = env.reward.function
    return [*([own] if own and ":" in own else []), *named_objects(str(env.game), env.kwargs)]


def _combine(
    name: str,
    subject: str,
    nodes: Sequence[NodeStatus],
    replies: Sequence[tuple[str, list[CheckResult]]],
) -> CheckResult:
    """Return one result for all nodes: passed if it passed on one, failed if it failed on all."""
    results = [
        result.model_copy(update={"by": node})
        for node, results in replies
        for result in results
        if result.name == name
    ]
    passed = [result for result in results if result.ok]
    failed_on_all = bool(results) and len(results) == len(nodes)
    if same := passed or (results if failed_on_all else []):
        names = ", ".join(result.by for result in same)
        return same[0].model_copy(update={"by": f"node {names}"})
    unknown = "no node could say in time" if nodes else "no node is there to ask"
    return _passed(name, f"{subject}: {unknown}")


def _passed(name: str, detail: str) -> CheckResult:
    return CheckResult(name=name, outcome="ok", detail=detail, by=_SCHEDULER)
