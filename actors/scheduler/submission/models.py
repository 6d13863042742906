"""Asking the nodes whether a job's models can be had, before it is queued."""

import asyncio
from collections.abc import Iterable, Sequence

from ....broker.client.connection import Broker
from ....broker.client.rpc import call
from ....schemas.config.algorithms.teacher import is_checkpoint
from ....schemas.config.job import JobConfig
from ....schemas.config.storage import is_url, model_paths
from ....schemas.node import ModelAnswer, ModelQuestion, NodeStatus
from ....schemas.wire.errors import ModelError, TinkermqError
from ....schemas.wire.subjects import node

_ANSWER_S = 12.0
_MOST_ASKED = 8


async def refuse_missing_models(
    broker: Broker, nodes: Sequence[NodeStatus], config: JobConfig
) -> None:
    """Raise ModelError for a model that no node can have, in the words of the first one asked.

    Nodes that do not know count for ones that can: the job finds out. So does a pool without nodes,
    or with more than are asked.
    """
    asked = nodes[:_MOST_ASKED]
    for model in _models(config):
        answers = await asyncio.gather(*(_ask(broker, one.node, model) for one in asked))
        if answers and len(asked) == len(nodes) and all(one.missing for one in answers):
            told = answers[0]
            raise ModelError(f"node {asked[0].node}: {told.missing}", hint=told.hint)


def _models(config: JobConfig) -> Iterable[str]:
    """Return the models that a job starts from, but those of a store and of other runs."""
    named = model_paths(config)
    named.pop("model.tokenizer", None)  # it needs no weights
    return dict.fromkeys(one for one in named.values() if not (is_url(one) or is_checkpoint(one)))


async def _ask(broker: Broker, name: str, model: str) -> ModelAnswer:
    try:
        return await call(
            broker,
            node(name, "model"),
            ModelQuestion(model=model),
            ModelAnswer,
            timeout_s=_ANSWER_S,
            waiting_for=f"node {name}",
            idempotent=True,
        )
    except TinkermqError:  # it is leaving, or older than the question
        return ModelAnswer(known=False)
