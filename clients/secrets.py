"""What a client hands over with a job: taken from the own environment, sealed before it travels."""

import os
from collections.abc import Mapping
from typing import Any

from ..schemas.secret import NOTIFY_URL, WANDB_KEY, JobSecrets, SecretName


def secrets_for(config: Mapping[str, Any]) -> dict[SecretName, str]:
    """Return the secrets in the environment that a job of this configuration uses."""
    wanted: list[SecretName] = [NOTIFY_URL]
    if "wandb" in (config.get("logger_backends") or ()):
        wanted.append(WANDB_KEY)
    return {name: value for name in wanted if (value := os.environ.get(name))}


def sealed(public: bytes, user: str, values: Mapping[SecretName, str]) -> bytes:
    """Return secrets that only the scheduler can open."""
    from ..broker.sealing import close_seal  # only who has a secret loads the cryptography

    return close_seal(public, JobSecrets(user=user, values=dict(values)))
