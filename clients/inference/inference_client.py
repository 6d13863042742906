"""Serve a model: `InferenceSchedulerClient`, and its async twin."""

import asyncio
from collections.abc import Sequence
from typing import Any

from ...broker.presence import presences
from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.wire.errors import ConfigError, DeadlineError
from ..compat.arguments import as_tree
from ..compat.opentinker_keys import tell_needless, translate
from ..home import find_openai
from ..pool import Pool, new_request_id
from ..scheduler_client import AsyncSchedulerClient, failure
from ..sync.sync_twin import SyncTwin
from ..validation.names import checkpoint_named
from .serving import find_source, with_options

START_S = 600.0
"""Longest wait for a model to be loaded."""
_POLL_S = 0.2


class AsyncInferenceSchedulerClient(AsyncSchedulerClient):
    """Serves models on a pool, for async code; see `InferenceSchedulerClient`."""

    def __init__(
        self,
        scheduler_url: str = "",
        api_key: str | None = None,
        timeout: float = 600.0,
        poll_interval: float = 2.0,
        gateway_url: str | None = None,
        *,
        url: str = "",
    ) -> None:
        """Name the pool's broker and, if it is not found by itself, the gateway's `http://…`."""
        super().__init__(scheduler_url, api_key, timeout, poll_interval, url=url)
        self._gateway = gateway_url

    async def submit_inference_job(
        self,
        model_path: str,
        tokenizer_path: str | None = None,
        tensor_parallel_size: int = 1,
        num_gpus: int | None = None,
        gpu_memory_utilization: float | None = None,
        max_model_len: int | None = None,
        trust_remote_code: bool = False,
        *,
        adapters: Sequence[str] = (),
        config: Any = None,
        wait: bool = True,
    ) -> dict[str, Any]:
        """Serve a model; see `InferenceSchedulerClient.submit_inference_job`."""
        _refuse_ineffective(tensor_parallel_size, gpu_memory_utilization)
        pool = await self._connected()
        record = await submit_inference(
            pool,
            model_path,
            adapters,
            tokenizer_path=tokenizer_path,
            num_servers=num_gpus,
            max_model_len=max_model_len,
            trust_remote_code=trust_remote_code,
            overrides=translate(as_tree(config)) if config is not None else None,
        )
        self._submitted = record
        if wait:
            record = await until_served(pool, record, self.timeout)
        return self.described(record)

    async def get_job_status(self, job_id: str) -> dict[str, Any]:
        """Return state, reason, times and URLs of a job, by id or run name."""
        pool = await self._connected()
        return self.described(await pool.find(job_id))

    def described(self, record: JobRecord) -> dict[str, Any]:
        """Return a job as `submit_inference_job` does."""
        summary = self._summary(record)
        url = find_openai(self._gateway) or summary["server_url"]
        return {**summary, "vllm_server_url": url, "model": record.serves or record.name}


class InferenceSchedulerClient(SyncTwin[AsyncInferenceSchedulerClient]):
    """Serves models on a pool. Works inside a running event loop, too."""

    def __init__(
        self,
        scheduler_url: str = "",
        api_key: str | None = None,
        timeout: float = 600.0,
        poll_interval: float = 2.0,
        gateway_url: str | None = None,
        *,
        url: str = "",
    ) -> None:
        """Name the pool; `timeout` bounds the wait for a model to be served, in seconds."""
        super().__init__(
            AsyncInferenceSchedulerClient(
                scheduler_url, api_key, timeout, poll_interval, gateway_url, url=url
            )
        )

    def submit_inference_job(
        self,
        model_path: str,
        tokenizer_path: str | None = None,
        tensor_parallel_size: int = 1,
        num_gpus: int | None = None,
        gpu_memory_utilization: float | None = None,
        max_model_len: int | None = None,
        trust_remote_code: bool = False,
        *,
        adapters: Sequence[str] = (),
        config: Any = None,
        wait: bool = True,
    ) -> dict[str, Any]:
        """Serve a model; return a dict with `job_id`, `name`, `status` and `vllm_server_url`.

        `model_path` is a Hugging Face folder, a model of the hub, `RUN@STEP` (a checkpoint), or a
        run: a live one is followed, its newest version answers; of one that has ended the last
        checkpoint is served. `vllm_server_url` is the OpenAI-compatible base URL of the pool's
        gateway, or the job's `nats://` URL where no gateway is known; `run_inference` takes both.
        `num_gpus` servers share the requests. `max_model_len` bounds prompt and answer together.
        `adapters` are checkpoints of LoRA runs (`RUN@STEP`) that are served beside it on one base,
        each under that name. `config` holds further keys of the job (`generator.max_episodes` …).

        Raises NotFoundError or ModelError for a model that is not there, PlacementError,
        JobFailedError with the server's reason, DeadlineError after `timeout`.
        """
        return self._run(
            self.aio.submit_inference_job(
                model_path,
                tokenizer_path,
                tensor_parallel_size,
                num_gpus,
                gpu_memory_utilization,
                max_model_len,
                trust_remote_code,
                adapters=adapters,
                config=config,
                wait=wait,
            ),
            self.aio.goes_on,
        )

    def get_job_status(self, job_id: str) -> dict[str, Any]:
        """Return state, reason, times and URLs of a job, by id or run name."""
        return self._run(self.aio.get_job_status(job_id))

    def cancel_job(self, job_id: str) -> dict[str, Any]:
        """Stop serving at once; harmless when the job has ended."""
        return self._run(self.aio.cancel_job(job_id))

    def complete_job(self, job_id: str) -> dict[str, Any]:
        """Stop serving after the answers that are being generated."""
        return self._run(self.aio.complete_job(job_id))


async def submit_inference(
    pool: Pool,
    model: str,
    adapters: Sequence[str] = (),
    *,
    tokenizer_path: str | None = None,
    num_servers: int | None = None,
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    overrides: dict[str, Any] | None = None,
) -> JobRecord:
    """Submit a job that serves `model` and further adapters on its base.

    `num_servers` share the requests; `max_model_len` bounds prompt and answer together;
    `tokenizer_path` is another than the model's own; `overrides` are further keys of the job.
    """
    source = await find_source(pool, model)
    config = with_options(
        source,
        tokenizer_path=tokenizer_path,
        num_servers=num_servers,
        max_model_len=max_model_len,
        trust_remote_code=trust_remote_code,
        overrides=overrides,
        broker_url=pool.broker.url,
        has_users=pool.has_users,
    )
    return await pool.submit(
        config,
        kind="infer",
        fork_of=source.fork_of,
        follow=source.follow,
        adapters=[checkpoint_named(adapter) for adapter in adapters],
        request_id=new_request_id(),
    )


async def until_served(pool: Pool, record: JobRecord, timeout_s: float) -> JobRecord:
    """Wait until a server of the job answers.

    Raises JobFailedError, or DeadlineError that says what it waits for.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    actors = presences(pool.broker)
    while True:
        record = await pool.find(record.job)
        if record.state in FINAL_STATES:
            raise failure(record)
        server = await actors.find(f"{record.scope.key}.server-0")
        if record.state == "RUNNING" and server and server.value.state == "working":
            return record
        if asyncio.get_running_loop().time() > deadline:
            why = server.value.waits_for or server.value.state if server else record.reason
            raise DeadlineError(
                f"job {record.name} is {record.state} and does not serve after {timeout_s:g} s: "
                f"{why}",
                hint=f"it goes on; see `tinkermq logs {record.name}`, or stop it: "
                f"`tinkermq stop {record.name}`",
            )
        await asyncio.sleep(_POLL_S)


def _refuse_ineffective(tensor_parallel_size: int, gpu_memory_utilization: float | None) -> None:
    if tensor_parallel_size != 1:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} has no effect here",
            hint="num_gpus starts so many servers, which share the requests; in vLLM one model "
            "spans several GPUs with generator.slots and generator.tensor_parallel in config",
        )
    if gpu_memory_utilization is not None:
        tell_needless({"gpu_memory_utilization": "the engine takes what it needs"})
