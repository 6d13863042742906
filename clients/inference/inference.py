"""Play a game with a model that is served: `run_inference`, many episodes at once.

The game is the class that training uses, hosted in this process or by the pool; the servers play
with the generator's own code, token ids in and out, so prompts and turns are those of training.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...broker.client.faults import ConnectionLost
from ...broker.client.parts import ask_parts, last_part
from ...envs.evaluation import is_success, kind_of
from ...envs.host_client import Environments
from ...schemas.config.job import EnvConfig
from ...schemas.infer import CancelInference, PlayPart, PlayRequest
from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.wire.errors import (
    BrokerError,
    BusyError,
    ConfigError,
    DeadlineError,
    NotFoundError,
)
from ...schemas.wire.subjects import JobScope
from ..compat.arguments import refuse_unknown_options
from ..compat.inference_arguments import translate_inference
from ..hosting.host import hosted
from ..pool import Pool
from ..scheduler_client import failure
from ..sync.loop_thread import shared_loop
from ..sync.single_error import single_errors
from .inference_tasks import Tasks, chosen_tasks, hosted_env
from .play import InferenceReport, PlayOptions, play_all
from .results import EpisodeResult
from .served_job import open_served

if TYPE_CHECKING:
    from ...envs import AbstractGame

_LOST = (ConnectionLost, DeadlineError, NotFoundError, BrokerError)
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
    """Play episodes; see `run_inference`."""
    ours = {"max_turns": max_turns, "game_kwargs": game_kwargs}
    told = translate_inference({**ours, **others}, game_class, ours)
    max_turns, game_kwargs = told.pop("max_turns"), told.pop("game_kwargs")
    refuse_unknown_options(run_inference_async, told)
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
    """Play episodes with a job that `open_served` yields; `on_job` is told which."""
    env = hosted_env(options.game_class, options.data_path, options.game_kwargs)
    with single_errors():
        async with served as (pool, record):
            if on_job is not None:
                on_job(record)
            inference = _Inference(pool, record, options)
            async with inference.hosting(env) as host:
                return await inference.play(env, host)


def run_inference(
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
    """Play a game with a served model, many episodes at once; return results and summary.

    `vllm_server_url` is what `submit_inference_job` returned, or a job's id or name; with
    `job_id` the gateway's URL is enough. `model_path` instead serves a model folder, a run or
    `RUN@STEP` for as long as the episodes take. `game_class` is the class that was trained on,
    hosted here with `data_path` (parquet or JSONL) or on seeds; without it the job's own game is
    played by the pool on its validation set.

    Results go to `output_path`, one JSON object a line, as they come; started again with the same
    settings it goes on where it ended.

    `game_kwargs` are arguments of the game's constructor. Played are at most `max_samples` tasks,
    or `tasks`, a fixed list of rows or seeds; each `samples_per_task` times, over 1 for pass@k;
    `max_concurrent` episodes at the same time. `seed` is that from which those of the rows follow.
    `temperature` 0 is greedy. `max_turns`, `max_tokens` (after the first prompt) and
    `max_tokens_per_turn` are as in training unless told. An episode counts as solved above
    `success_reward`, unless the game says so in `info["success"]`. `token_ids` keeps them in the
    results. `scheduler_url` and `api_key` name pool and user. `on_job(record)`,
    `on_start(episodes, already_there)` and `on_result(result)` are called as it goes on.

    `others` are the game's, if its constructor names them, or OpenTinker's: `max_user_turns` and
    `max_assistant_turns` are `max_turns`, and what needs no saying here (`env_endpoint`,
    `tokenizer_path` …) is left out with a warning. The report is iterated as the list of its
    results.

    Raises NotFoundError for a job that is not there or is another user's, ConfigError, for an
    unknown option too, GameError, JobFailedError.
    """
    return shared_loop().run(
        run_inference_async(
            vllm_server_url,
            data_path,
            game_class,
            job_id,
            output_path,
            model_path=model_path,
            scheduler_url=scheduler_url,
            api_key=api_key,
            game_kwargs=game_kwargs,
            tasks=tasks,
            max_samples=max_samples,
            samples_per_task=samples_per_task,
            seed=seed,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_turns=max_turns,
            max_tokens_per_turn=max_tokens_per_turn,
            max_tokens=max_tokens,
            success_reward=success_reward,
            max_concurrent=max_concurrent,
            token_ids=token_ids,
            on_job=on_job,
            on_start=on_start,
            on_result=on_result,
            **others,
        )
    )


class _Hosting(NamedTuple):
    """How the game is hosted: in a session of this process, or, without one, by the pool."""

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
        """Host the game here for as long as the block runs; without one the pool does."""
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
        async with hosted(host):
            yield _Hosting(session, host.num_train)

    async def play(self, env: EnvConfig | None, host: _Hosting) -> InferenceReport:
        """Play what was asked for and is not there yet."""
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
        """Return which tasks are played."""
        tasks, most = self._options.tasks, self._options.max_samples
        if host.session:
            chosen = chosen_tasks(tasks, host.num_rows, most)
            return Tasks("train", chosen, host.num_rows is not None, self._options.seed)
        record = self._record
        config = EnvConfig.model_validate(record.config["env"])
        if not (config.game and config.hosts):
            raise ConfigError(
                f"job {record.name} has no game that the pool could host",
                hint="give game_class, or on the command line --game",
            )
        hosts = Environments(self._pool.broker, self._scope, config, _unnamed)
        num_val = (await hosts.describe()).num_val
        chosen = chosen_tasks(tasks, num_val, most)
        return Tasks("val", chosen, bool(config.val_data), int(record.config.get("seed", 0)), True)

    async def _episode(self, chosen: Tasks, task: int, sample: int, session: str) -> EpisodeResult:
        """Play one episode, again when its server is busy or has died."""
        lost = 0
        while True:
            options = self._options
            request = PlayRequest(
                request=uuid.uuid4().hex,
                session=session,
                **chosen.start(task),
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                max_turns=options.max_turns,
                max_turn_tokens=options.max_tokens_per_turn,
                max_response_tokens=options.max_tokens,
            )
            try:
                return self._result(task, sample, await self._ask(request))
            except BusyError:
                await asyncio.sleep(_BUSY_S)
            except _LOST:
                lost += 1
                record = await self._pool.find(self._record.job)
                if record.state in FINAL_STATES:
                    raise failure(record) from None
                if lost >= _MAX_LOST:
                    raise
                await asyncio.sleep(min(2.0**lost, 10.0))

    async def _ask(self, request: PlayRequest) -> PlayPart:
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


def _unnamed(_: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
