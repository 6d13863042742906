"""The policies of a job: the model of its configuration, and those of roles with one of their own.

The first is called by the empty name, the others by their roles. The weights of all travel as one
version: a tensor of a role's policy is named `role/tensor`.
"""

from pathlib import Path

from ...schemas.config.job import JobConfig

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
    """Return what precedes the names of a policy's tensors."""
    return f"{policy}/" if policy else ""


def policy_folder(checkpoint: Path, policy: str) -> Path:
    """Return the folder of a policy in a checkpoint: the main one's is the checkpoint itself."""
    return checkpoint / "policies" / policy if policy else checkpoint
