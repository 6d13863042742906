"""The models that a job starts from: its base, its policies, or a checkpoint with all of them."""

from pathlib import Path

from ...schemas.config.job import JobConfig
from ...schemas.config.lora import LoraConfig
from ...schemas.job import JobRecord
from .digests import check_digests
from .lora import config_of, is_adapter
from .policies import policy_folder


def check_weights(record: JobRecord, config: JobConfig) -> None:
    """Raise StorageError for a damaged checkpoint among what a job loads; reads all of it."""
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
    """Return the configuration with a folder as its model; an adapter is put beside its base."""
    lora = config_of(folder) if is_adapter(folder) else LoraConfig()
    return config.with_model(folder).model_copy(update={"lora": lora})
