"""What Tinker services tell of their users' tokens, as it is kept in the service's record. Pure."""

from ....schemas.job import JobRecord
from ....schemas.tinker.usage import SamplerTokens, TrainerUsage


def with_usage(record: JobRecord, told: TrainerUsage) -> JobRecord:
    """Return a record with what is new in what was told; the same one if nothing is."""
    return _with_sampled(record, told) if told.sampler else _with_trained(record, told)


def _with_trained(record: JobRecord, told: TrainerUsage) -> JobRecord:
    """Take the larger sums; a trainer that starts again may know less."""
    known = record.tinker_tokens
    newer = {user: used for user, used in told.tokens.items() if used > known.get(user, 0)}
    return record.model_copy(update={"tinker_tokens": {**known, **newer}}) if newer else record


def _with_sampled(record: JobRecord, told: TrainerUsage) -> JobRecord:
    """Add what a sampler has computed since it last told; one that starts again begins at 0."""
    last = record.tinker_samplers.get(told.sampler)
    if last is not None and last.since > told.since:  # a later one has its name
        return record
    counted = last.tokens if last is not None and last.since == told.since else {}
    newer = {user: used for user, used in told.tokens.items() if used > counted.get(user, 0)}
    if not newer:
        return record
    known = record.tinker_sampled
    sums = {user: known.get(user, 0) + n - counted.get(user, 0) for user, n in newer.items()}
    now = SamplerTokens(since=told.since, tokens={**counted, **newer})
    return record.model_copy(
        update={
            "tinker_sampled": {**known, **sums},
            "tinker_samplers": {**record.tinker_samplers, told.sampler: now},
        }
    )
