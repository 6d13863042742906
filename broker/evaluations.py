"""What the evaluations of a run came to, by version."""

from collections.abc import Iterable, Mapping

from ..schemas.metric import EvalRecord
from ..schemas.wire.subjects import BUCKET_EVALS, JobScope
from .client.connection import Broker
from .jetstream.kv import Bucket

SCORE = "val/mean_score"
"""What the best version has most of."""


async def read_scores(broker: Broker, scope: JobScope) -> dict[int, float]:
    """Return the mean validation score of each version of a run that was evaluated.

    Raises BrokerError, NotFoundError where there is no bucket of evaluations.
    """
    entries = await Bucket(broker, BUCKET_EVALS, EvalRecord).items(scope.key)
    told = [entry.value for entry in entries]
    return {one.version: one.values[SCORE] for one in told if SCORE in one.values}


def best_of(scores: Mapping[int, float], versions: Iterable[int]) -> int | None:
    """Return which of these versions has the highest score, the earliest of equals; None if none.

    A score that is not a number counts for nothing.
    """
    scored = [one for one in versions if one in scores and scores[one] == scores[one]]
    return max(scored, key=lambda version: (scores[version], -version), default=None)
