"""The policies of a job: the model of its configuration, and models of some roles.

The first has the empty name, the others those of their roles. The weights of all are one version: a
tensor of a role's policy is named `role/tensor`. A job starts from the models of its configuration,
or from a checkpoint of all of them.
"""

import random
from collections.abc import Sequence
from pathlib import Path

from ...schemas.config.job import JobConfig
from ...schemas.config.sections import LoraConfig, SelfPlayConfig
from ...schemas.job import JobRecord
from ..storage.adapters import is_adapter
from ..storage.files import check_digests
from .lora import config_of

MAIN = ""


def policy_names(config: JobConfig) -> list[str]:
    """Return the names of the policies, the main one first."""
    return [MAIN, *config.policies]


def policy_config(config: JobConfig, policy: str) -> JobConfig:
    """Return the configuration with the model of a policy."""
    if policy == MAIN:
        return config
    model = config.model.model_copy(update={"path": config.policies[policy]})
    return config.model_copy(update={"model": model})


def prefix_of(policy: str) -> str:
    """Return the prefix of the names of a policy's tensors."""
    return f"{policy}/" if policy else ""


def policy_folder(checkpoint: Path, policy: str) -> Path:
    """Return the folder of a policy in a checkpoint: the main one's is the checkpoint itself."""
    return checkpoint / "policies" / policy if policy else checkpoint


def check_weights(record: JobRecord, config: JobConfig) -> None:
    """Raise StorageError for a damaged checkpoint that a job loads; reads all files."""
    models = [config.model.path, *config.policies.values()]
    for folder in (record.fork_dir, *record.adapters.values(), *models):
        if folder:
            check_digests(Path(folder))


def config_of_checkpoint(record: JobRecord, config: JobConfig) -> JobConfig:
    """Return the configuration with the checkpoint that a job starts from, if any, as its model."""
    if not record.fork_dir:
        return config
    own = {role: str(policy_folder(Path(record.fork_dir), role)) for role in config.policies}
    return config_of_folder(config, record.fork_dir).model_copy(update={"policies": own})


def config_of_folder(config: JobConfig, folder: str) -> JobConfig:
    """Return the configuration with a folder as its model; an adapter with its base."""
    lora = config_of(folder) if is_adapter(folder) else LoraConfig()
    return config.with_model(folder).model_copy(update={"lora": lora})


# -- opponents in self-play (pure) -----------------------------------------------------------------
# The learner keeps the versions of the pool published, and generators draw from them. Both compute
# the pool from the policy's version, without messages.


def opponent_versions(config: SelfPlayConfig, version: int) -> list[int]:
    """Return the earlier versions that are opponents at `version`, ascending; none without a share.

    Before the first step the initial version is its own opponent.
    """
    if config.past_share == 0:
        return []
    newest = max(version - 1, 0) // config.pool_every
    first = max(0, newest - config.pool_size + 1)
    return [number * config.pool_every for number in range(first, newest + 1)]


def learning_roles(config: SelfPlayConfig, roles: Sequence[str], seed: int) -> list[str]:
    """Return the roles that learn in a task: all, or one against an earlier version."""
    rng = random.Random(f"seats {seed}")  # noqa: S311 - who sits where, not a secret
    if rng.random() < config.past_share:
        return [rng.choice(roles)]
    return list(roles)
