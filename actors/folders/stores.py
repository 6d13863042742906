"""Which places in stores a user's job may name, in a pool with users.

Machines of the pool reach stores with keys of their own, so the URL alone says whose files are
read and written.
"""

import os
from collections.abc import Sequence

from ...schemas.config.job import JobConfig
from ...schemas.config.storage import BROKER, is_url, model_paths
from ...schemas.wire.errors import ConfigError

STORES_VARIABLE = "TINKERMQ_STORES"
"""Of the scheduler's environment: URLs, joined by commas."""
_ODD = ("..", "%", "?", "#", "//", "\\")


def operator_stores() -> list[str]:
    """Return the stores that the operator has opened to users."""
    named = os.environ.get(STORES_VARIABLE, "")
    return [one.strip().rstrip("/") for one in named.split(",") if one.strip()]


def refuse_other_stores(config: JobConfig, user: str, stores: Sequence[str]) -> None:
    """Raise ConfigError for a URL outside of what a user may reach.

    Checkpoints go below a store itself; models are read from its `models/`, and from what runs of
    the user have written.
    """
    url = config.storage.url
    if url not in (None, BROKER) and url.rstrip("/") not in stores:
        raise _refused("storage.url", url, stores)
    for key, path in model_paths(config).items():
        if is_url(path) and not _is_readable(path, user, stores):
            raise _refused(key, path, [f"{one}/models/…" for one in stores])


def _is_readable(url: str, user: str, stores: Sequence[str]) -> bool:
    below = [f"{one}/{part}/" for one in stores for part in ("models", f"runs/{user}")]
    below.append(f"{BROKER}runs/{user}/")
    rest = next((url.removeprefix(one) for one in below if url.startswith(one)), "")
    return bool(rest) and not any(odd in rest for odd in _ODD)


def _refused(key: str, url: str, allowed: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{key}={url!r} is outside of the stores that users of this pool reach: "
        f"{', '.join(allowed) or 'there are none'}",
        hint=f"the operator names them in ${STORES_VARIABLE} of the scheduler",
    )
