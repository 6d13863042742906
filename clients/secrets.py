"""What a client hands over with a job: taken from the own environment; it travels sealed."""

import os
from collections.abc import Mapping
from typing import Any

from ..schemas.secret import NOTIFY_URL, WANDB_KEY, SecretName


def secrets_for(config: Mapping[str, Any]) -> dict[SecretName, str]:
    """Return the secrets in the environment that a job of this configuration uses."""
    wanted: list[SecretName] = [NOTIFY_URL]
    if "wandb" in (config.get("logger_backends") or ()):
        wanted.append(WANDB_KEY)
    return {name: value for name in wanted if (value := os.environ.get(name))}
