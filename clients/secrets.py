"""What a client hands over with a job: taken from the own environment; it travels sealed."""

import os
from collections.abc import Mapping
from typing import Any

from ..schemas.secret import NOTIFY_URL, WANDB_KEY, SecretName


def secrets_for(config: Mapping[str, Any], wandb_key: str | None = None) -> dict[SecretName, str]:
    """Return the secrets that a job of this configuration uses, from the environment if need be."""
    found: dict[SecretName, str] = {}
    if url := os.environ.get(NOTIFY_URL):
        found[NOTIFY_URL] = url
    uses_wandb = "wandb" in (config.get("logger_backends") or ())
    if key := wandb_key or (os.environ.get(WANDB_KEY) if uses_wandb else None):
        found[WANDB_KEY] = key
    return found
