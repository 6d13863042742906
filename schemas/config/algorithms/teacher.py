"""What a teacher of on-policy distillation is called, and which kind of teacher that is."""

import re
from urllib.parse import parse_qs, urlsplit, urlunsplit

SELF = "self"
"""The policy itself, as it is before each step, with what only a teacher may read."""
_JOB = "job:"
_CHECKPOINT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}@(?:\d{1,9}|last|best)")


def is_checkpoint(name: str) -> bool:
    """Whether a name is that of a run's checkpoint, `RUN@STEP`, and not of a folder or a model."""
    return _CHECKPOINT.fullmatch(name) is not None


def served_job(name: str) -> str | None:
    """Return the inference job that a teacher is, by its name or id; None for another kind."""
    return name.removeprefix(_JOB) if name.startswith(_JOB) else None


def is_endpoint(name: str) -> bool:
    """Whether a teacher is a model behind an OpenAI-compatible API."""
    return name.startswith(("http://", "https://"))


def is_asked(name: str) -> bool:
    """Whether generators ask a teacher as episodes end, in place of learners that load it."""
    return is_endpoint(name) or served_job(name) is not None


def endpoint(name: str) -> tuple[str, str]:
    """Return the base URL of an endpoint, up to `/v1`, and the model that is asked there."""
    parts = urlsplit(name)
    model = parse_qs(parts.query).get("model", [""])[0]
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", "")), model


def why_no_teacher(name: str) -> str:
    """Say what is wrong with the name of a teacher; empty: nothing is."""
    if served_job(name) == "":
        return "job: names no job: write job:NAME, of one that `tinkermq serve` has started"
    if not is_endpoint(name):
        return ""
    base, model = endpoint(name)
    parts = urlsplit(base)
    if not parts.hostname or parts.username or parts.password:
        return f"{base} is no URL of an API: write https://HOST/v1?model=NAME, without a password"
    if not model or not re.fullmatch(r"[\w./:@+-]{1,200}", model):
        return f"{name[:200]} names no model: write https://HOST/v1?model=NAME"
    return ""
