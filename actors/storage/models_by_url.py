"""Models that a job names by URL, fetched into the cache of this machine.

What actors load is a folder: the configuration that they go by names the one in the cache.
"""

import asyncio
import hashlib
from typing import Any

from ...broker.client.connection import Broker
from ...schemas.config.algorithms.algorithm import AlgorithmConfig
from ...schemas.config.job import JobConfig
from ...schemas.config.storage import is_url
from ...schemas.job import JobRecord
from ...schemas.wire.errors import ModelError
from ..models.digests import is_state
from .cache import FolderCache
from .opening import Stores
from .url_store import StoredObject, UrlStore

_caches: list[FolderCache] = []
"""What this process holds stays in use as long as it lives."""
_fetched: dict[str, str] = {}
"""Folders of the cache that this process holds, each with its URL."""


async def bring_here(
    broker: Broker, config: JobConfig, record: JobRecord, role: str
) -> tuple[JobConfig, JobRecord]:
    """Return both with what they name in stores on this machine; only learners need their state.

    Raises StorageError, ModelError.
    """
    stores = Stores(broker, record.scope)

    def bring() -> tuple[JobConfig, JobRecord]:
        here = with_checkpoints_here(record, stores, weights_only=role not in ("learner", "rank"))
        return with_models_here(config, stores), here

    return await asyncio.to_thread(bring)


def with_models_here(config: JobConfig, stores: Stores) -> JobConfig:
    """Return a configuration whose models are folders of this machine where they were URLs.

    Raises StorageError, ModelError for a URL below which there is nothing.
    """
    changes: dict[str, Any] = {
        "model": _with_local(stores, config.model, "path", "tokenizer"),
        "critic": _with_local(stores, config.critic, "path"),
        "algorithm": _with_teachers(config.algorithm, stores),
        "policies": {role: _local(path, stores) for role, path in config.policies.items()},
    }
    return config.model_copy(update=changes)


def with_checkpoints_here(
    record: JobRecord, stores: Stores, *, weights_only: bool = False
) -> JobRecord:
    """Return a record whose checkpoints of other runs are folders of this machine, too.

    With `weights_only` the state of their learner is not fetched. Raises StorageError,
    ModelError for one that is gone.
    """
    changes: dict[str, Any] = {
        "fork_dir": _local(record.fork_dir, stores, weights_only),
        "adapters": {name: _local(path, stores, True) for name, path in record.adapters.items()},
    }
    return record.model_copy(update=changes)


def _with_teachers(algorithm: AlgorithmConfig, stores: Stores) -> AlgorithmConfig:
    named = {*algorithm.loaded_teachers.values(), algorithm.reference.path or ""}
    return algorithm.renamed({path: _local(path, stores, True) for path in named if is_url(path)})


def _with_local(stores: Stores, section: Any, *keys: str) -> Any:
    named = {key: value for key in keys if (value := getattr(section, key)) and is_url(value)}
    if not named:
        return section
    return section.model_copy(update={key: _local(value, stores) for key, value in named.items()})


def _local(path: str, stores: Stores, weights_only: bool = False) -> str:
    return fetch_model(path, stores, weights_only=weights_only) if is_url(path) else path


def fetch_model(url: str, stores: Stores | None = None, *, weights_only: bool = False) -> str:
    """Return the folder in this machine's cache with what lies below a URL; it stays while we live.

    It is named by the digest of what the store's listing says: names, sizes and tags. Raises
    StorageError, ModelError.
    """
    from .trees import fetch_tree  # needs safetensors, which not all who run actors have

    store = stores.open(url) if stores else UrlStore(url)
    files = [one for one in store.objects() if not (weights_only and is_state(one.name))]
    if not files:
        raise ModelError(
            f"there is no model at {url}: nothing lies below it",
            hint="see its spelling, and which bucket the pool's machines reach",
        )
    content = _key(store.url, files)
    if not _caches:
        _caches.append(FolderCache.of_machine())
    num_bytes = sum(one.num_bytes for one in files)
    place = _caches[0].hold(content, num_bytes, lambda target: fetch_tree(store, "", files, target))
    _fetched[str(place)] = url
    return str(place)


def _key(url: str, files: list[StoredObject]) -> str:
    return hashlib.sha256(repr([url, *(one[:3] for one in files)]).encode()).hexdigest()


def url_of(folder: str) -> str | None:
    """Return the URL that a folder of the cache was fetched from by this process, if it was."""
    return _fetched.get(folder)


def base_here(adapter: str, base: str) -> str:
    """Return the base of an adapter, as a folder where it is a URL and the adapter came by one.

    What lies elsewhere names no store: users may write it, and this machine has keys of its own.
    Raises StorageError, ModelError.
    """
    if not is_url(base) or adapter not in _fetched:
        return base
    return next((here for here, url in _fetched.items() if url == base), None) or fetch_model(base)
