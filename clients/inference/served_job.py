"""The inference job that a caller means: by URL, by name, or one made for the occasion."""

import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from ...schemas.job import JobRecord
from ...schemas.wire.errors import ConfigError, NotFoundError
from ..address import parse_server_url
from ..home import find_url
from ..pool import Pool
from ..pool_client import open_broker
from .inference_client import START_S, submit_inference, until_served

_HTTP = {"http", "https"}


@contextlib.asynccontextmanager
async def open_served(
    server: str | None,
    job: str | None,
    *,
    model_path: str | None = None,
    url: str | None = None,
    api_key: str | None = None,
) -> AsyncIterator[tuple[Pool, JobRecord]]:
    """Yield the pool and a job that serves; one made here for `model_path` ends with the block.

    Raises NotFoundError for a job that is not there or is another user's, ConfigError,
    JobFailedError.
    """
    if (model_path is None) == (server is None and job is None):
        raise ConfigError(
            "it was not said which model plays",
            hint="give either vllm_server_url (or job_id), or model_path",
        )
    broker_url, user, name = _address(server, job, url)
    async with await open_broker(broker_url, api_key) as broker:
        pool = Pool(broker)
        if user not in (None, broker.user):
            raise NotFoundError(
                f"job {name!r} belongs to user {user!r}, and you are {broker.user!r}",
                hint="attach to a job of your own, or serve the model yourself",
            )
        if model_path is None:
            yield pool, await _serving(pool, name)
            return
        record = await submit_inference(pool, model_path)
        try:
            yield pool, await until_served(pool, record, START_S)
        finally:
            await pool.stop(record.job, complete=True)


async def _serving(pool: Pool, name: str) -> JobRecord:
    record = await pool.find(name)
    if record.kind != "infer":
        raise ConfigError(
            f"{record.name} is a job of kind {record.kind}: it serves no model",
            hint=f"serve it: model_path={record.name!r}, or `tinkermq serve {record.name}`",
        )
    return await until_served(pool, record, START_S)


def _address(server: str | None, job: str | None, url: str | None) -> tuple[str, str | None, str]:
    """Return the broker's URL, the job's owner if the URL names one, and the job's name."""
    if server is None or "//" not in server:
        return find_url(url), None, job or server or ""
    if urlsplit(server).scheme in _HTTP:
        if job is None:
            raise ConfigError(
                f"{server} does not say which job is meant",
                hint="give job_id as well; submit_inference_job returned it",
            )
        return find_url(url), None, job
    address = parse_server_url(server)
    if job not in (None, address.scope.job):
        raise ConfigError(
            f"vllm_server_url names job {address.scope.job}, job_id is {job!r}",
            hint="give one of them",
        )
    return address.broker_url, address.scope.user, address.scope.job
