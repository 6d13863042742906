"""What of its configuration a run may change when it goes on from its last checkpoint. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from ....schemas.config.job import JobConfig
from ....schemas.config.load_config import parse_config
from ....schemas.job import JobRecord
from ....schemas.wire.errors import ConfigError, StateError
from ....schemas.wire.maps import merged
from .rules import refuse_removed

_OPTIMIZER = "learner.optimizer"
_KEPT = (
    ("name", "a run keeps its name and its folder"),
    ("output_dir", "a run keeps its name and its folder"),
    ("storage.url", "its checkpoints lie there"),
    ("seed", "the order of its tasks hangs on it"),
    ("model", "the run goes on with the model of its checkpoint"),
    ("lora", "the run goes on with the model of its checkpoint"),
    (_OPTIMIZER, "the checkpoint holds the state of that one"),
    ("sft.data", "the order of its tasks hangs on it"),
    ("training.batch_size", "how many tasks may be issued is counted by it from the first step on"),
    ("training.curriculum", "the checkpoint remembers what it has chosen by it"),
)
"""What the checkpoint and the log of a run hang on, and why."""


def changed_config(record: JobRecord, changes: Mapping[str, Any]) -> JobConfig:
    """Return the configuration of a job that has ended, with keys laid over it.

    Raises StateError for a job that cannot go on, and ConfigError that names a key that is unknown,
    or that a run keeps.
    """
    refuse_removed(record)
    if not record.configured:
        raise StateError(f"job {record.name} was never configured", hint="submit a new job")
    before = parse_config({**record.config, "name": record.name})
    after = parse_config(merged(before.model_dump(mode="json", exclude_unset=True), changes))
    for key, why in _KEPT:
        if _value(before, key) != _value(after, key):
            raise ConfigError(
                f"{key} of run {record.name} cannot be changed when it is resumed: {why}",
                hint=f"start a new run from its checkpoint: `{_instead(record.name, key)}`",
            )
    return after


def _instead(name: str, key: str) -> str:
    """Return the command for what cannot be resumed; a fork takes the optimiser's state, too."""
    if key == _OPTIMIZER:
        return f"tinkermq train CONFIG --from {name}"
    return f"tinkermq fork {name}@last {key}=…"


def refuse_changes(record: JobRecord, changes: Mapping[str, Any]) -> None:
    """Raise StateError for a job that is to be changed while it lives."""
    if changes:
        raise StateError(
            f"run {record.name} is {record.state}: its configuration changes only when it is "
            "resumed after its end",
            hint=f"stop it first, with a checkpoint: `tinkermq stop {record.name}`",
        )


def told_changes(changes: Mapping[str, Any]) -> str:
    """Say which keys were changed, for the job's events."""
    return f"resumed with {', '.join(_leaves(changes))}" if changes else "resumed"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value}"


def _value(config: JobConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def already_configured(record: JobRecord, config: dict[str, Any]) -> JobRecord:
    """Answer a `configure` that was sent again after it had started the job."""
    same = {**config, "name": record.name} == {**record.config, "name": record.name}
    if not same:
        raise StateError(
            f"job {record.name} has its configuration already and is {record.state}",
            hint="submit a new job, or fork this one",
        )
    return record
