"""Play a game with a served model: `run_inference`.

The game is the class used in training, hosted in this process or by the pool. The servers use the
generator's code with token ids in and out, so prompts and turns are the same as in training.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from ...broker.client.faults import ConnectionLost
from ...broker.client.parts import ask_parts, last_part
from ...envs.evaluation import is_success, kind_of
from ...envs.host_client import Environments
from ...schemas.config.job import EnvConfig
from ...schemas.infer import CancelInference, PlayPart, PlayRequest
from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.wire import errors
from ...schemas.wire.subjects import JobScope
from ..base import make_blocking, open_broker, parse_server_url, unwrap_error_groups
from ..home import find_url
from ..hosting.environments import run_environment_host
from ..opentinker import refuse_unknown_options, translate_inference
from ..pool import Pool
from ..scheduler_client import job_failure
from .inference_client import START_S, submit_inference, wait_until_served
from .play import (
    EpisodeResult,
    InferenceReport,
    PlayOptions,
    Tasks,
    chosen_tasks,
    hosted_env,
    play_all,
)

if TYPE_CHECKING:
    from ...envs import AbstractGame


# The inference job of a call: named by URL or name, or started for the call.

_HTTP = {"http", "https"}


@contextlib.asynccontextmanager
async def open_served(
    server: str | None,
    job: str | None,
    *,
    model_path: str | None = None,
    url: str | None = None,
    api_key: str | None = None,
    on_queued: Callable[[JobRecord], None] = lambda _: None,
) -> AsyncIterator[tuple[Pool, JobRecord]]:
    """Yield the pool and a serving job; a job started here for `model_path` ends with the block.

    Raises NotFoundError for an unknown job or another user's, ConfigError, JobFailedError.
    """
    if (model_path is None) == (server is None and job is None):
        raise errors.ConfigError(
            "the model must be given by exactly one of vllm_server_url, job_id and model_path",
            hint="give vllm_server_url (or job_id), or model_path",
        )
    broker_url, user, name = _address(server, job, url)
    async with await open_broker(broker_url, api_key, user) as broker:
        pool = Pool(broker)
        if model_path is None:
            yield pool, await _serving(pool, name)
            return
        record = await submit_inference(pool, model_path)
        try:
            yield pool, await wait_until_served(pool, record, START_S, on_queued)
        finally:
            await pool.stop(record.job, complete=True)


async def _serving(pool: Pool, name: str) -> JobRecord:
    record = await pool.find(name)
    if record.kind != "infer":
        raise errors.ConfigError(
            f"{record.name} is a job of kind {record.kind}, which serves no model",
            hint=f"serve it: model_path={record.name!r}, or `tinkermq serve {record.name}`",
        )
    return await wait_until_served(pool, record, START_S)


def _address(server: str | None, job: str | None, url: str | None) -> tuple[str, str | None, str]:
    """Return the broker's URL, the job's owner if the URL names one, and the job's name."""
    if server is None or "//" not in server:
        return find_url(url), None, job or server or ""
    if urlsplit(server).scheme in _HTTP:
        if job is None:
            raise errors.ConfigError(
                f"{server} does not name a job",
                hint="give job_id as well; submit_inference_job returned it",
            )
        return find_url(url), None, job
    address = parse_server_url(server)
    if job not in (None, address.scope.job):
        raise errors.ConfigError(
            f"vllm_server_url names job {address.scope.job}, job_id is {job!r}",
            hint="give one of them",
        )
    return address.broker_url, address.scope.user, address.scope.job


_LOST = (ConnectionLost, errors.DeadlineError, errors.NotFoundError, errors.BrokerError)
_MAX_LOST = 6
_BUSY_S = 0.5


async def run_inference_async(
    vllm_server_url: str | None = None,
    data_path: str | Path | Sequence[str | Path] | None = None,
    game_class: "type[AbstractGame] | None" = None,
    job_id: str | None = None,
    output_path: str | Path | None = None,
    *,
    model_path: str | None = None,
    scheduler_url: str | None = None,
    api_key: str | None = None,
    game_kwargs: Mapping[str, Any] | None = None,
    tasks: Sequence[int] | None = None,
    max_samples: int | None = None,
    samples_per_task: int = 1,
    seed: int = 0,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_turns: int | None = None,
    max_tokens_per_turn: int | None = None,
    max_tokens: int | None = None,
    success_reward: float = 0.5,
    max_concurrent: int = 256,
    token_ids: bool = False,
    on_job: Callable[[JobRecord], None] | None = None,
    on_start: Callable[[int, int], None] | None = None,
    on_result: Callable[[EpisodeResult], None] | None = None,
    **others: Any,
) -> InferenceReport:
    """Play a game with a served model; return results and summary.

    `vllm_server_url` is the URL from `submit_inference_job`, or a job's id or name; with
    `job_id` the gateway's URL is enough. `model_path` instead serves a model folder, a run or
    `RUN@STEP` for the duration of the call. `game_class` is the class used in training, hosted here
    with `data_path` (parquet or JSONL) or on seeds; without it, the pool plays the job's own game
    on its validation set.

    Results are appended to `output_path`, one JSON object per line; a repeated call with the same
    settings continues where it ended.

    `game_kwargs` are arguments of the game's constructor. At most `max_samples` tasks are played,
    or `tasks`, a fixed list of rows or seeds; each `samples_per_task` times (2 or more for
    pass@k), with `max_concurrent` concurrent episodes. `seed` determines the seeds of the rows.
    `temperature` 0 is greedy. `max_turns`, `max_tokens` (after the first prompt) and
    `max_tokens_per_turn` default to those of training. An episode counts as solved above
    `success_reward`, unless the game sets `info["success"]`. `token_ids` adds token ids to the
    results. `scheduler_url` and `api_key` name pool and user. `on_job(record)`,
    `on_start(episodes, already_there)` and `on_result(result)` are called during the run.

    `others` are arguments of the game's constructor, or OpenTinker's: `max_user_turns` and
    `max_assistant_turns` mean `max_turns`, and unneeded ones (`env_endpoint`, `tokenizer_path` …)
    are ignored with a warning. Iterating over the report yields its results.

    Raises NotFoundError for an unknown job or another user's, ConfigError (also for an unknown
    option), GameError, JobFailedError.
    """
    ours = {"max_turns": max_turns, "game_kwargs": game_kwargs}
    translated = translate_inference({**ours, **others}, game_class, ours)
    max_turns, game_kwargs = translated.pop("max_turns"), translated.pop("game_kwargs")
    refuse_unknown_options(run_inference_async, translated)
    played = PlayOptions(
        game_class=game_class,
        game_kwargs=game_kwargs,
        data_path=data_path,
        output_path=output_path,
        max_turns=max_turns,
        tasks=tasks,
        max_samples=max_samples,
        samples_per_task=samples_per_task,
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens_per_turn=max_tokens_per_turn,
        max_tokens=max_tokens,
        success_reward=success_reward,
        max_concurrent=max_concurrent,
        token_ids=token_ids,
        on_start=on_start,
        on_result=on_result,
    )
    served = open_served(
        vllm_server_url, job_id, model_path=model_path, url=scheduler_url, api_key=api_key
    )
    return await play_served(served, played, on_job)


async def play_served(
    served: contextlib.AbstractAsyncContextManager[tuple[Pool, JobRecord]],
    options: PlayOptions,
    on_job: Callable[[JobRecord], None] | None = None,
) -> InferenceReport:
    """Play episodes with a job that `open_served` yields; `on_job` is called with it."""
    env = hosted_env(options.game_class, options.data_path, options.game_kwargs)
    with unwrap_error_groups():
        async with served as (pool, record):
            if on_job is not None:
                on_job(record)
            inference = _Inference(pool, record, options)
            async with inference.hosting(env) as host:
                return await inference.play(env, host)


run_inference = make_blocking(run_inference_async)


class _Hosting(NamedTuple):
    """The host of the game: a session of this process, or else the pool."""

    session: str = ""
    num_rows: int | None = None


class _Inference:
    """One inference against one job."""

    def __init__(self, pool: Pool, record: JobRecord, options: PlayOptions) -> None:
        self._pool = pool
        self._record = record
        self._options = options
        self._scope = record.scope

    @contextlib.asynccontextmanager
    async def hosting(self, env: EnvConfig | None) -> AsyncIterator[_Hosting]:
        """Host the game in this process during the block; without `env` the pool hosts it."""
        if env is None:
            yield _Hosting()
            return
        from ...envs.host import EnvironmentHost

        session = uuid.uuid4().hex[:12]
        scope = self._scope.of_session(session)
        host = EnvironmentHost(
            self._pool.broker,
            scope,
            env,
            seed=self._options.seed,
            game_class=self._options.game_class,
            drain_s=0,
        )
        async with run_environment_host(host):
            yield _Hosting(session, host.num_train)

    async def play(self, env: EnvConfig | None, host: _Hosting) -> InferenceReport:
        """Play the episodes without a result."""
        record, options = self._record, self._options
        settings = {
            "model": record.serves or str(record.config.get("model", {}).get("path")),
            "env": env.model_dump() if env else dict(record.config.get("env", {})),
            "sampling": options.sampling,
            "seed": options.seed,
        }
        chosen = await self._choose(host)

        async def play(task: int, sample: int) -> EpisodeResult:
            return await self._episode(chosen, task, sample, host.session)

        return await play_all(chosen, options, settings, play)

    async def _choose(self, host: _Hosting) -> Tasks:
        """Return the tasks to play."""
        tasks, most = self._options.tasks, self._options.max_samples
        if host.session:
            chosen = chosen_tasks(tasks, host.num_rows, most)
            return Tasks("train", chosen, host.num_rows is not None, self._options.seed)
        record = self._record
        config = EnvConfig.model_validate(record.config["env"])
        if not (config.game and config.hosts):
            raise errors.ConfigError(
                f"run {record.name} has no game for the pool to host",
                hint="give game_class, or on the command line --game",
            )
        hosts = Environments(self._pool.broker, self._scope, config)
        num_val = (await hosts.describe()).num_val
        chosen = chosen_tasks(tasks, num_val, most)
        return Tasks("val", chosen, bool(config.val_data), int(record.config.get("seed", 0)), True)

    async def _episode(self, chosen: Tasks, task: int, sample: int, session: str) -> EpisodeResult:
        """Play one episode; retry if its server is busy or has died."""
        num_lost = 0
        while True:
            options = self._options
            request = PlayRequest(
                request=uuid.uuid4().hex,
                session=session,
                **chosen.start(task),
                **options.limits,
            )
            try:
                return self._result(task, sample, await self._play_on_server(request))
            except errors.BusyError:
                await asyncio.sleep(_BUSY_S)
            except _LOST:
                num_lost += 1
                record = await self._pool.find(self._record.job)
                if record.state in FINAL_STATES:
                    raise job_failure(record) from None
                if num_lost >= _MAX_LOST:
                    raise
                await asyncio.sleep(min(2.0**num_lost, 10.0))

    async def _play_on_server(self, request: PlayRequest) -> PlayPart:
        scope: JobScope = self._scope
        cancel = CancelInference(request=request.request)
        return await last_part(
            ask_parts(
                self._pool.broker,
                scope.infer("play"),
                request,
                PlayPart,
                waiting_for=f"a server of {self._record.name}",
                cancel=(scope.infer("cancel"), cancel),
            )
        )

    def _result(self, task: int, sample: int, part: PlayPart) -> EpisodeResult:
        episode = part.trajectory
        if episode is None:
            why = part.blame.message if part.blame else "the server gave no reason"
            return EpisodeResult(task, sample, 0.0, False, model=part.model, error=why)
        return EpisodeResult(
            task=task,
            sample=sample,
            reward=episode.reward,
            success=is_success(episode.reward, episode.info, self._options.success_reward),
            rewards=[float(reward) for reward in episode.rewards],
            type=kind_of(episode.info, episode.data_source),
            finish=episode.ended_by,
            num_turns=len(episode.turn_ends),
            num_tokens=episode.num_generated,
            messages=episode.messages,
            info=episode.info,
            model=part.model,
            token_ids=episode.token_ids.tolist() if self._options.token_ids else None,
            mask=episode.mask.tolist() if self._options.token_ids else None,
        )
