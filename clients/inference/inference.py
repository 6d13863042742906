"""Play a game with a model that is served: `run_inference`, many episodes at once.

The game is the class that training uses, hosted in this process or by the pool; the servers play
with the generator's own code, token ids in and out, so prompts and turns are those of training.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...broker.client.connection import ConnectionLost
from ...broker.client.parts import ask_parts, last_part
from ...broker.disk.room import with_room
from ...envs.evaluation import is_success, kind_of, summarize
from ...envs.serving.remote import Environments
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
from ..hosting.host import hosted
from ..pool import Pool
from ..scheduler_client import failure
from ..sync.loop_thread import shared_loop
from ..sync.single_error import single_errors
from .inference_tasks import Tasks, chosen_tasks, hosted_env
from .results import EpisodeResult, Key, ResultFile
from .served_job import open_served

if TYPE_CHECKING:
    from ...envs import AbstractGame

_LOST = (ConnectionLost, DeadlineError, NotFoundError, BrokerError)
_MAX_LOST = 6
_BUSY_S = 0.5


@dataclass(frozen=True)
class InferenceSampling:
    """How episodes are played; None means as the job is configured (`rollout`)."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    max_turns: int | None = None
    """Answers of the policy per episode."""
    max_tokens_per_turn: int | None = None
    """Tokens that the policy may generate in one turn."""
    max_tokens: int | None = None
    """Tokens after the first prompt, observations included."""


@dataclass
class InferenceReport:
    """What an inference came to."""

    results: list[EpisodeResult] = field(default_factory=list[EpisodeResult])
    """The episodes, by task and sample; also those of an earlier start."""
    failed: list[EpisodeResult] = field(default_factory=list[EpisodeResult])
    """Episodes that could not be played; `error` says why."""
    samples: int = 1

    @property
    def summary(self) -> dict[str, Any]:
        """Mean reward and accuracy with 95 % intervals, pass@k, the same by type."""
        scores = summarize((result.scored for result in self.results), self.samples)
        return {**scores, "failed_episodes": len(self.failed)}


async def run_inference_async(
    vllm_server_url: str | None = None,
    data_path: str | Path | Sequence[str | Path] | None = None,
    game_class: "type[AbstractGame] | None" = None,
    job_id: str | None = None,
    output_path: str | Path | None = None,
    *,
    model_path: str | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_turns: int | None = None,
    max_tokens: int | None = None,
    max_tokens_per_turn: int | None = None,
    max_samples: int | None = None,
    samples_per_task: int = 1,
    tasks: Sequence[int] | None = None,
    seed: int = 0,
    success_reward: float = 0.5,
    max_concurrent: int = 256,
    token_ids: bool = False,
    game_kwargs: Mapping[str, Any] | None = None,
    scheduler_url: str | None = None,
    api_key: str | None = None,
    on_result: Callable[[EpisodeResult], None] | None = None,
    on_job: Callable[[JobRecord], None] | None = None,
    on_start: Callable[[int, int], None] | None = None,
) -> InferenceReport:
    """Play episodes; see `run_inference`."""
    if samples_per_task < 1 or max_concurrent < 1:
        raise ConfigError(
            f"samples_per_task={samples_per_task} and max_concurrent={max_concurrent} must be at "
            "least 1"
        )
    if samples_per_task > 1 and temperature == 0:
        raise ConfigError(
            f"samples_per_task={samples_per_task} with temperature=0 plays the same episode again",
            hint="set a temperature, or samples_per_task=1",
        )
    sampling = InferenceSampling(
        temperature, top_p, top_k, max_turns, max_tokens_per_turn, max_tokens
    )
    env = hosted_env(game_class, data_path, game_kwargs)
    opened = open_served(
        vllm_server_url, job_id, model_path=model_path, url=scheduler_url, api_key=api_key
    )
    with single_errors():
        async with opened as (pool, record):
            if on_job is not None:
                on_job(record)
            inference = _Inference(pool, record, sampling, success_reward, token_ids)
            async with inference.hosting(env, game_class, seed) as host:
                chosen = await inference.choose(host, tasks, max_samples, seed)
                wanted = [
                    (task, sample) for task in chosen.tasks for sample in range(samples_per_task)
                ]
                with ResultFile(output_path, inference.settings(env, seed)) as file:
                    if on_start is not None:
                        on_start(len(wanted), sum(key in file.done for key in wanted))
                    failed = await inference.play(
                        chosen, wanted, host.session, file, max_concurrent, on_result
                    )
    results = [file.done[key] for key in wanted if key in file.done]
    return InferenceReport(results, failed, samples_per_task)


def run_inference(
    vllm_server_url: str | None = None,
    data_path: str | Path | Sequence[str | Path] | None = None,
    game_class: "type[AbstractGame] | None" = None,
    job_id: str | None = None,
    output_path: str | Path | None = None,
    **options: Any,
) -> InferenceReport:
    """Play a game with a served model, many episodes at once; return results and summary.

    `vllm_server_url` is what `submit_inference_job` returned, or a job's id or name; with
    `job_id` the gateway's URL is enough. `model_path` instead serves a model folder, a run or
    `RUN@STEP` for as long as the episodes take. `game_class` is the class that was trained on,
    hosted here with `data_path` (parquet or JSONL) or on seeds; without it the job's own game is
    played by the pool on its validation set.

    Results go to `output_path`, one JSON object a line, as they come; started again with the same
    settings it goes on where it ended.

    Options: `temperature` (0, greedy), `top_p`, `top_k`; `max_turns`, `max_tokens`,
    `max_tokens_per_turn` (as in training unless told); `max_samples` tasks, or `tasks`, a fixed
    list of rows or seeds; `samples_per_task`, over 1 for pass@k; `seed`; `success_reward` (0.5),
    above which an episode counts as solved unless the game says so in `info["success"]`;
    `max_concurrent` (256); `token_ids=True` to keep them; `game_kwargs`; `scheduler_url`,
    `api_key`; `on_job(record)`, `on_start(episodes, already_there)` and `on_result(result)` are
    called as it goes on.

    Raises NotFoundError for a job that is not there or is another user's, ConfigError, for an
    unknown option too, GameError, JobFailedError.
    """
    refuse_unknown_options(run_inference_async, options)
    return shared_loop().run(
        run_inference_async(vllm_server_url, data_path, game_class, job_id, output_path, **options)
    )


class _Hosting(NamedTuple):
    """How the game is hosted: in a session of this process, or, without one, by the pool."""

    session: str = ""
    num_rows: int | None = None


class _Inference:
    """One inference against one job."""

    def __init__(
        self,
        pool: Pool,
        record: JobRecord,
        sampling: InferenceSampling,
        success_reward: float,
        token_ids: bool,
    ) -> None:
        self._pool = pool
        self._record = record
        self._sampling = sampling
        self._success_reward = success_reward
        self._token_ids = token_ids
        self._scope = record.scope

    def settings(self, env: EnvConfig | None, seed: int) -> dict[str, Any]:
        """Return what makes two inferences comparable."""
        record = self._record
        model = record.serves or str(record.config.get("model", {}).get("path"))
        return {
            "model": model,
            "env": env.model_dump() if env else dict(record.config.get("env", {})),
            "sampling": vars(self._sampling),
            "seed": seed,
        }

    @contextlib.asynccontextmanager
    async def hosting(
        self, env: EnvConfig | None, game_class: "type[AbstractGame] | None", seed: int
    ) -> AsyncIterator[_Hosting]:
        """Host the game here for as long as the block runs; without one the pool does."""
        if env is None or game_class is None:
            yield _Hosting()
            return
        from ...envs.serving.host import EnvironmentHost

        session = uuid.uuid4().hex[:12]
        scope = self._scope.of_session(session)
        host = EnvironmentHost(
            self._pool.broker, scope, env, seed=seed, game_class=game_class, drain_s=0
        )
        async with hosted(host):
            yield _Hosting(session, host.num_train)

    async def choose(
        self,
        hosting: _Hosting,
        tasks: Sequence[int] | None,
        max_samples: int | None,
        seed: int,
    ) -> Tasks:
        """Return which tasks are played."""
        if hosting.session:
            rows = hosting.num_rows is not None
            chosen = chosen_tasks(tasks, hosting.num_rows, max_samples)
            return Tasks("train", chosen, rows, seed)
        record = self._record
        config = EnvConfig.model_validate(record.config["env"])
        if not (config.game and config.hosts):
            raise ConfigError(
                f"job {record.name} has no game that the pool could host",
                hint="give game_class, or on the command line --game",
            )
        hosts = Environments(self._pool.broker, self._scope, config, _unnamed)
        num_val = (await hosts.describe()).num_val
        chosen = chosen_tasks(tasks, num_val, max_samples)
        return Tasks("val", chosen, bool(config.val_data), int(record.config.get("seed", 0)), True)

    async def play(
        self,
        chosen: Tasks,
        wanted: Sequence[Key],
        session: str,
        file: ResultFile,
        max_concurrent: int,
        on_result: Callable[[EpisodeResult], None] | None,
    ) -> list[EpisodeResult]:
        """Play what is wanted and not there yet; return what failed."""
        left = iter([key for key in wanted if key not in file.done])
        failed: list[EpisodeResult] = []

        async def work() -> None:
            for task, sample in left:
                result = await self._episode(chosen, task, sample, session)
                await _kept(file, result)
                if result.error is not None:
                    failed.append(result)
                if on_result is not None:
                    on_result(result)

        async with asyncio.TaskGroup() as group:
            for number in range(min(max_concurrent, len(wanted))):
                group.create_task(work(), name=f"player {number}")
        return failed

    async def _episode(self, chosen: Tasks, task: int, sample: int, session: str) -> EpisodeResult:
        """Play one episode, again when its server is busy or has died."""
        lost = 0
        while True:
            sampling = self._sampling
            request = PlayRequest(
                request=uuid.uuid4().hex,
                session=session,
                **chosen.start(task),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_turns=sampling.max_turns,
                max_turn_tokens=sampling.max_tokens_per_turn,
                max_response_tokens=sampling.max_tokens,
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
            success=is_success(episode.reward, episode.info, self._success_reward),
            rewards=[float(reward) for reward in episode.rewards],
            type=kind_of(episode.info, episode.data_source),
            finish=episode.ended_by,
            num_turns=len(episode.turn_ends),
            num_tokens=episode.num_generated,
            messages=episode.messages,
            info=episode.info,
            model=part.model,
            token_ids=episode.token_ids.tolist() if self._token_ids else None,
            mask=episode.mask.tolist() if self._token_ids else None,
        )


def _unnamed(_: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


async def _kept(file: ResultFile, result: EpisodeResult) -> None:
    """Write a result as soon as there is room for it."""

    async def add() -> None:
        file.add(result)

    await with_room(add, f"the result of task {result.task}", lambda _: contextlib.nullcontext())
