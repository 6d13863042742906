"""Can the pool run this job: questions to its nodes, and to the files that the scheduler sees."""

import asyncio
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from ....broker.client.connection import Broker
from ....broker.client.rpc import call
from ....schemas.config import sections
from ....schemas.config.algorithm import is_checkpoint
from ....schemas.config.job import JobConfig
from ....schemas.job import ActorPlacement, JobRecord
from ....schemas.node import ModelAnswer, ModelQuestion, NodeStatus
from ....schemas.plan.plan import Plan, plan_for_pool
from ....schemas.plan.settings import refuse_long_contexts
from ....schemas.wire.errors import ModelError, TinkermqError
from ....schemas.wire.message import Message
from ....schemas.wire.subjects import node
from ...storage.access import shown_from, without_tilde
from ..jobs.view import JobsView
from ..reconciler import Reconciler
from .access import FileReads

R = TypeVar("R", bound=Message)

ANSWER_S = 12.0
MOST_ASKED = 8
"""Nodes that are asked; of a larger pool the others count for ones that can."""


class ModelReport(NamedTuple):
    """What one node says of one model."""

    node: str
    answer: ModelAnswer


class Reader(NamedTuple):
    """Who may know which files the pool's machines have."""

    user: str
    roots: Sequence[Path]
    """Folders below which the user's jobs may write; none: the user may read all."""

    def may_know(self, model: str) -> bool:
        """Whether the answer may say what is at a path."""
        try:
            place = Path(os.path.realpath(without_tilde(model)))
        except ValueError:  # no path: it holds a null byte
            return True
        return not self.roots or shown_from(place, self.user, self.roots) is not None


class PoolCheck:
    """Says whether the pool can run a job."""

    def __init__(
        self, broker: Broker, view: JobsView, reconciler: Reconciler, files: FileReads
    ) -> None:
        """Ask the nodes of `reconciler`, and `files`; quotas are those of `view`."""
        self._broker = broker
        self._view = view
        self._reconciler = reconciler
        self._files = files

    async def refuse_unfit(self, record: JobRecord, config: JobConfig) -> None:
        """Raise an error for a job that the pool cannot run; the record names its actors.

        A job that starts from a checkpoint needs no other model. Raises PlacementError, QuotaError,
        ModelError or StorageError.
        """
        reader = self.reader(record)
        self.refuse_placing(reader.user, record.actors)
        plan = await self.plan_on_gpus(record.kind, config, reader)
        if plan is not None and plan.refusal is not None:
            raise plan.refusal
        await self.refuse_long_contexts(config, reader)
        if not record.fork_dir:
            await self._refuse_missing_models(config, reader)

    def reader(self, record: JobRecord) -> Reader:
        """Return the owner of a job, with the folders below which the owner's jobs may write."""
        roots = record.output_roots if self._view.has_users else []
        return Reader(record.user, [Path(root) for root in roots])

    async def _refuse_missing_models(self, config: JobConfig, reader: Reader) -> None:
        """Raise ModelError for a model that no node can have, in the words of the first one.

        Nodes that do not know count for ones that can: the job finds out. So does a pool without
        nodes, or with more than are asked.
        """
        nodes = self._reconciler.nodes()
        for model, may_know in (await self.known_models(models_of(config), reader)).items():
            reply = await ask_for_model(self._broker, nodes, model, may_know=may_know)
            if reply and len(reply) == len(nodes) and all(item.answer.missing for item in reply):
                first = reply[0]
                raise ModelError(
                    f"node {first.node}: {first.answer.missing}", hint=first.answer.hint
                )

    def refuse_placing(self, user: str, actors: Sequence[ActorPlacement]) -> None:
        """Raise PlacementError or QuotaError for actors that have no place here."""
        self._reconciler.refuse_impossible(actors)
        self._view.check_alone(user, actors)

    async def plan_on_gpus(self, kind: str, config: JobConfig, reader: Reader) -> Plan | None:
        """Return what a training job takes on the pool's GPUs.

        None where it may run on a CPU or on machines that are still to come, and for models that
        the scheduler does not know, or the reader may not.
        """
        nodes = self._reconciler.nodes()
        trains = kind in ("train", "sft")
        if not trains or self._reconciler.may_grow or any(not node.gpus for node in nodes):
            return None
        if not await self.may_know_all(models_of(config), reader):
            return None
        gpus = [(gpu.model, gpu.memory_bytes) for node in nodes for gpu in node.gpus]
        return await self._files.read(reader.user, plan_for_pool, config, gpus)

    async def refuse_long_contexts(self, config: JobConfig, reader: Reader) -> None:
        """Raise ModelError for sequences longer than a model of the job has positions for.

        Models that the scheduler does not know, or the reader may not, are left to the generators.
        """
        if await self.may_know_all(models_of(config), reader):
            await self._files.read(reader.user, refuse_long_contexts, config)

    async def known_models(self, models: Iterable[str], reader: Reader) -> dict[str, bool]:
        """Return of each model whether the reader may know what is there. Raises StorageError."""
        return {
            model: await self._files.read(reader.user, reader.may_know, model) for model in models
        }

    async def may_know_all(self, models: Iterable[str], reader: Reader) -> bool:
        """Whether the reader may know what is at all of these paths. Raises StorageError."""
        return all((await self.known_models(models, reader)).values())


async def ask_for_model(
    broker: Broker, nodes: Sequence[NodeStatus], model: str, *, may_know: bool
) -> list[ModelReport]:
    """Return what the nodes say of a model, those that were asked.

    Of a path that the user may not know they say the same whatever is there, unless a model.
    """
    names = [item.node for item in nodes[:MOST_ASKED]]
    question, unknown = ModelQuestion(model=model, alike=not may_know), ModelAnswer(known=False)
    asking = (
        ask_node(broker, name, "model", question, unknown, timeout_s=ANSWER_S) for name in names
    )
    answers = await asyncio.gather(*asking)
    return [ModelReport(name, answer) for name, answer in zip(names, answers, strict=True)]


def models_of(config: JobConfig) -> Iterable[str]:
    """Return the models that a job starts from, but those of a store and of other runs."""
    named = sections.model_paths(config)
    named.pop("model.tokenizer", None)  # it needs no weights
    return dict.fromkeys(
        item for item in named.values() if not (sections.is_url(item) or is_checkpoint(item))
    )


async def ask_node(
    broker: Broker, name: str, verb: str, question: Message, unknown: R, *, timeout_s: float
) -> R:
    """Return what a node answers, or `unknown` where it is leaving, or older than the question."""
    try:
        return await call(
            broker,
            node(name, verb),
            question,
            type(unknown),
            timeout_s=timeout_s,
            waiting_for=f"node {name}",
            idempotent=True,
        )
    except TinkermqError:
        return unknown
