"""Asking the nodes whether a job's models can be had, before it is queued."""

import asyncio
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from ....broker.client.connection import Broker
from ....broker.client.rpc import call
from ....schemas.config.algorithm import is_checkpoint
from ....schemas.config.job import JobConfig
from ....schemas.config.sections import is_url, model_paths
from ....schemas.node import ModelAnswer, ModelQuestion, NodeStatus
from ....schemas.wire.errors import ModelError, TinkermqError
from ....schemas.wire.message import Message
from ....schemas.wire.subjects import node
from ...storage.access import shown_from, without_tilde

R = TypeVar("R", bound=Message)

ANSWER_S = 12.0
MOST_ASKED = 8
"""Nodes that are asked; of a larger pool the others count for ones that can."""


class Told(NamedTuple):
    """What one node says of one model."""

    node: str
    answer: ModelAnswer


class Reader(NamedTuple):
    """Who may know which files the pool's machines have."""

    user: str
    roots: Sequence[Path]
    """Folders below which his jobs may write; none: he may know of all."""

    def may_know(self, model: str) -> bool:
        """Whether to be told what is at a path."""
        try:
            place = Path(os.path.realpath(without_tilde(model)))
        except ValueError:  # no path: it holds a null byte
            return True
        return not self.roots or shown_from(place, self.user, self.roots) is not None


async def refuse_missing_models(
    broker: Broker, nodes: Sequence[NodeStatus], config: JobConfig, reader: Reader
) -> None:
    """Raise ModelError for a model that no node can have, in the words of the first one asked.

    Nodes that do not know count for ones that can: the job finds out. So does a pool without nodes,
    or with more than are asked.
    """
    for model in models_of(config):
        told = await ask_for_model(broker, nodes, model, reader)
        if told and len(told) == len(nodes) and all(one.answer.missing for one in told):
            first = told[0]
            raise ModelError(f"node {first.node}: {first.answer.missing}", hint=first.answer.hint)


async def ask_for_model(
    broker: Broker, nodes: Sequence[NodeStatus], model: str, reader: Reader
) -> list[Told]:
    """Return what the nodes say of a model, those that were asked.

    Of a path that the reader may not read they say the same whatever is there, unless a model.
    """
    names = [one.node for one in nodes[:MOST_ASKED]]
    alike = not await asyncio.to_thread(reader.may_know, model)
    question, unknown = ModelQuestion(model=model, alike=alike), ModelAnswer(known=False)
    asking = (
        ask_node(broker, name, "model", question, unknown, timeout_s=ANSWER_S) for name in names
    )
    answers = await asyncio.gather(*asking)
    return [Told(name, answer) for name, answer in zip(names, answers, strict=True)]


def models_of(config: JobConfig) -> Iterable[str]:
    """Return the models that a job starts from, but those of a store and of other runs."""
    named = model_paths(config)
    named.pop("model.tokenizer", None)  # it needs no weights
    return dict.fromkeys(one for one in named.values() if not (is_url(one) or is_checkpoint(one)))


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
