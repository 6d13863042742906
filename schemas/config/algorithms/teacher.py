"""Names and kinds of teachers for on-policy distillation."""

import re
from urllib.parse import parse_qs, urlsplit, urlunsplit

SELF = "self"
"""The policy before each step, with a text that only a teacher reads."""
_JOB = "job:"
_CHECKPOINT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}@(?:\d{1,9}|last|best)")


def is_checkpoint(name: str) -> bool:
    """Whether a name is a run's checkpoint, `RUN@STEP`, not a folder or model."""
    return _CHECKPOINT.fullmatch(name) is not None


def served_job(name: str) -> str | None:
    """Return the inference job that a teacher names; None for another kind."""
    return name.removeprefix(_JOB) if name.startswith(_JOB) else None


def is_endpoint(name: str) -> bool:
    """Whether a teacher is a model behind an OpenAI-compatible API."""
    return name.startswith(("http://", "https://"))


def is_asked(name: str) -> bool:
    """Whether generators ask the teacher as episodes end; otherwise learners load it."""
    return is_endpoint(name) or served_job(name) is not None


def endpoint(name: str) -> tuple[str, str]:
    """Return an endpoint's base URL, up to `/v1`, and its model."""
    parts = urlsplit(name)
    model = parse_qs(parts.query).get("model", [""])[0]
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", "")), model


def why_no_teacher(name: str) -> str:
    """Return what is wrong with a teacher's name; empty: nothing."""
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
