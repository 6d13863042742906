"""Serve a model: `InferenceSchedulerClient`, and `AsyncInferenceSchedulerClient`."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...broker.calls import new_request_id
from ...broker.presence import list_presences
from ...schemas.config.sections import ADAPTER_CONFIG, RolloutConfig
from ...schemas.job import FINAL_STATES, LAST_STEP, JobRecord
from ...schemas.model_catalogue import CATALOGUE, find_model
from ...schemas.tinker.names import is_path
from ...schemas.wire.codec import merged
from ...schemas.wire.errors import (
    ConfigError,
    DeadlineError,
    ModelError,
    NotFoundError,
    did_you_mean,
)
from .. import validation
from ..base import SyncTwin, make_sync
from ..home import find_openai
from ..opentinker import as_tree, translate, warn_needless
from ..pool import Pool, is_token
from ..scheduler_client import AsyncSchedulerClient, job_failure

# The model to serve: a model folder, a model of the hub, a run, or `run@step`.

DEFAULT_CONTEXT = 4096


class ModelSource(NamedTuple):
    """The fields of a submission of kind `infer`."""

    config: dict[str, Any]
    fork_of: str | None = None
    follow: str | None = None


async def find_source(pool: Pool, name: str) -> ModelSource:
    """Return the submission that serves `name`.

    A live run is followed; of an ended run the last checkpoint is served. A run takes
    precedence over a folder of that name; write `./name` for the folder. Raises NotFoundError or
    ModelError with suggestions.
    """
    if is_path(name):
        contexts = [offer.max_context for offer in await pool.trainers() if offer.max_context]
        longest = min([DEFAULT_CONTEXT, *contexts])
        return ModelSource(model_config(name, None, longest), fork_of=name)
    folder, run = _folder(name), name.partition("@")[0]
    if name in CATALOGUE and folder is None and not await pool.has_run(run):
        folder = _folder(find_model(name)) if validation.is_local_pool(pool.broker.url) else None
        return ModelSource(model_config(name, folder))
    if is_token(run) and (folder is None or await pool.has_run(run)):
        return await _run_source(pool, name)
    if folder is not None:
        return ModelSource(model_config(name, folder))
    is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not is_hub_name and validation.is_local_pool(pool.broker.url):
        raise ModelError(
            f"there is no model folder {name!r}",
            hint="give a Hugging Face folder, a model of the hub (owner/name), a run, or RUN@STEP",
        )
    return ModelSource(model_config(name, None))  # a folder in the pool, or a model of the hub


def _folder(name: str) -> Path | None:
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else None


async def _run_source(pool: Pool, name: str) -> ModelSource:
    run, step = validation.split_checkpoint_name(name)
    try:
        record = await pool.find(run)
    except NotFoundError as error:
        runs = [record.name for record in await pool.list_jobs(all=True)]
        raise NotFoundError(
            f"there is no model folder and no run {run!r}",
            hint=did_you_mean(run, runs, otherwise="list runs with `tinkermq ps --all`"),
        ) from error
    if not record.configured:
        raise ConfigError(
            f"{record.name} waits for its configuration: it has no model yet",
            hint="its client gives it with `set_config` and `fit`",
        )
    if record.kind == "infer":
        raise ConfigError(
            f"{record.name} is a run of kind {record.kind}, which trains no model",
            hint="give a training run, or the model folder",
        )
    config = record.settings
    if config.get("generator", {}).get("count") == 0:  # its rollouts were made by external agents
        config = merged(config, {"generator": {"count": 1}})
    if step is None and record.state not in FINAL_STATES:
        return ModelSource(config, follow=record.job)
    return ModelSource(config, fork_of=f"{record.job}@{step or LAST_STEP}")


def model_config(
    name: str, folder: Path | None, longest: int | None = DEFAULT_CONTEXT
) -> dict[str, Any]:
    """Return the configuration of a plain model, without a game.

    Its context is the model's, up to `longest`; None: no limit.
    """
    positions = _positions(folder)
    context = positions if longest is None else min(longest, positions)
    return {
        "model": {"path": str(folder.resolve()) if folder else name},
        "env": {"game": "", "hosts": 0, "num_val": 0},
        **_lengths(context),
    }


def _lengths(context: int) -> dict[str, Any]:
    """Divide a context between prompt and response, with the default lengths if they fit."""
    default = RolloutConfig()
    response = min(default.max_response_tokens, max(1, context // 2))
    return {
        "rollout": {
            "max_prompt_tokens": min(default.max_prompt_tokens, context - response),
            "max_response_tokens": response,
            "max_turn_tokens": min(default.max_turn_tokens, response),
        },
        "generator": {"max_context": context},
    }


def _positions(folder: Path | None) -> int:
    """Return the number of positions of a model, or of an adapter's base."""
    try:
        if folder is not None and (folder / ADAPTER_CONFIG).is_file():
            adapter = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            return _positions(_folder(str(adapter["base_model_name_or_path"])))
        text = (folder / "config.json").read_text(encoding="utf-8") if folder else "{}"
        return int(json.loads(text).get("max_position_embeddings", DEFAULT_CONTEXT))
    except (OSError, ValueError, TypeError, KeyError):
        return DEFAULT_CONTEXT  # the server reports the error in the folder


def with_options(
    source: ModelSource,
    *,
    tokenizer_path: str | None = None,
    num_servers: int | None = None,
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    overrides: dict[str, Any] | None = None,
    broker_url: str = "",
    has_users: bool = False,
) -> dict[str, Any]:
    """Return the configuration of a source with a user's options merged in."""
    config = source.config
    model: dict[str, Any] = {}
    if tokenizer_path is not None and tokenizer_path != config.get("model", {}).get("path"):
        model["tokenizer"] = tokenizer_path
    if trust_remote_code:
        model["trust_remote_code"] = True
    if model:
        config = merged(config, {"model": model})
    if num_servers is not None:
        config = merged(config, {"generator": {"count": num_servers}})
    if max_model_len is not None:
        plain = not config.get("env", {}).get("game")
        lengths = _lengths(max_model_len) if plain else {}
        config = merged(config, merged(lengths, {"generator": {"max_context": max_model_len}}))
    if overrides:
        config = merged(config, overrides)
    return validation.resolve_paths(config, broker_url, has_users=has_users)


START_S = 600.0
"""Maximum wait until a model is loaded."""
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
        """Connect to the pool's broker; `gateway_url` is its gateway, if it cannot be found."""
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
        """Serve a model; return a dict with `job_id`, `name`, `status` and `vllm_server_url`.

        `model_path` is a Hugging Face folder, a model of the hub, `RUN@STEP` (a checkpoint), or a
        run. A live run is followed and its newest version answers; of an ended run the last
        checkpoint is served. `vllm_server_url` is the OpenAI-compatible base URL of the pool's
        gateway, or the job's `nats://` URL where no gateway is known; `run_inference` takes both.
        `num_gpus` servers share the requests. `max_model_len` bounds prompt and answer together.
        `adapters` are checkpoints of LoRA runs (`RUN@STEP`), served on the same base, each under
        its name. `config` holds further keys of the job (`generator.max_episodes` …).

        Raises NotFoundError or ModelError for an unknown model, PlacementError,
        JobFailedError with the server's reason, DeadlineError after `timeout`.
        """
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
        if wait:
            record = await wait_until_served(pool, record, self.timeout)
        return self.describe_job(record)

    async def get_job_status(self, job_id: str) -> dict[str, Any]:
        """Return state, reason, times and URLs of a job, by id or run name."""
        return self.describe_job((await self._found(job_id))[1])

    def describe_job(self, record: JobRecord) -> dict[str, Any]:
        """Return a job's dict, as `submit_inference_job` does."""
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
        """Connect to a pool; `timeout` bounds the wait for a served model, in seconds."""
        super().__init__(
            AsyncInferenceSchedulerClient(
                scheduler_url, api_key, timeout, poll_interval, gateway_url, url=url
            )
        )

    submit_inference_job = make_sync(
        AsyncInferenceSchedulerClient.submit_inference_job,
        AsyncInferenceSchedulerClient.describe_detached,
    )
    get_job_status = make_sync(AsyncInferenceSchedulerClient.get_job_status)
    cancel_job = make_sync(AsyncInferenceSchedulerClient.cancel_job)
    complete_job = make_sync(AsyncInferenceSchedulerClient.complete_job)


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
    `tokenizer_path` replaces the model's own; `overrides` are further keys of the job.
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
        adapters=[validation.full_checkpoint_name(adapter) for adapter in adapters],
        request_id=new_request_id(),
    )


async def wait_until_served(
    pool: Pool,
    record: JobRecord,
    timeout_s: float,
    on_queued: Callable[[JobRecord], None] = lambda _: None,
) -> JobRecord:
    """Wait until a server of the job answers; `on_queued` gets it with each reason of a wait.

    Raises JobFailedError, or DeadlineError with the reason.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    why = ""
    while True:
        record = await pool.find(record.job)
        if record.state == "QUEUED" and record.reason != why:
            why = record.reason
            on_queued(record)
        if record.state in FINAL_STATES:
            raise job_failure(record)
        actors = [entry.value for entry in await list_presences(pool.broker, record.scope.key)]
        servers = [actor for actor in actors if actor.role == "server"]
        if record.state == "RUNNING" and any(server.state == "working" for server in servers):
            return record
        if asyncio.get_running_loop().time() > deadline:
            why = servers[0].waits_for or servers[0].state if servers else record.reason
            raise DeadlineError(
                f"run {record.name} is {record.state} and does not serve after {timeout_s:g} s: "
                f"{why}",
                hint=f"the run continues; see `tinkermq logs {record.name}`, or stop it: "
                f"`tinkermq stop {record.name}`",
            )
        await asyncio.sleep(_POLL_S)


def _refuse_ineffective(tensor_parallel_size: int, gpu_memory_utilization: float | None) -> None:
    if tensor_parallel_size != 1:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} has no effect",
            hint="num_gpus servers share the requests; for a model on several GPUs in vLLM, set "
            "generator.slots and generator.tensor_parallel in config",
        )
    if gpu_memory_utilization is not None:
        warn_needless({"gpu_memory_utilization": "the engine chooses its share of memory"})
