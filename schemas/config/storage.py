"""Configuration of the store for checkpoints and models."""

import re
from typing import TYPE_CHECKING

from pydantic import Field

from .section import Section

if TYPE_CHECKING:
    from .job import JobConfig

BROKER = "broker:"
"""Instead of a URL: the broker keeps the checkpoints."""
URL_PATTERN = r"^(broker:|(s3|gs|file)://[A-Za-z0-9._/=+@-]+)$"
_URL = re.compile(r"(s3|gs|file)://|broker:runs/")


def is_url(value: str) -> bool:
    """Whether a text is the URL of a store, not a folder or hub model."""
    return _URL.match(value) is not None


def model_paths(job: "JobConfig") -> dict[str, str]:
    """Return the models that a job names, by key."""
    named = {
        "model.path": job.model.path,
        "model.tokenizer": job.model.tokenizer,
        "critic.path": job.critic.path,
        **{f"policies.{role}": path for role, path in job.policies.items()},
        "algorithm.reference.path": job.algorithm.reference.path,
        **{f"algorithm.teacher.{one}": it for one, it in job.algorithm.loaded_teachers.items()},
    }
    return {key: path for key, path in named.items() if path is not None}


class StorageConfig(Section):
    """A store for pools whose machines share no disk."""

    url: str | None = Field(default=None, pattern=URL_PATTERN)
    """Keep checkpoints below this URL, too (`s3://bucket/prefix`, `gs://`, `file:///folder`), so
    that a learner on another machine can continue. Needs the extra `storage`, and credentials in
    the machines' environment. `broker:` needs neither: the broker keeps them, up to
    `limits.checkpoint_bytes`."""
