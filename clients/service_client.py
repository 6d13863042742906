"""The training of one job: `ServiceClient`, and `AsyncServiceClient` for async code.

The training loop runs in the pool. `fit` completes the job's configuration, starts it, and follows
it to its end. If the client dies, the run continues, and calling `fit` again attaches to it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ..broker.client.faults import shown_url
from ..schemas.config.load_config import check_keys
from ..schemas.job import FINAL_STATES, JobRecord
from ..schemas.local.disk import in_thread, with_room
from ..schemas.local.tracking import ConsoleTracker, TrackedRun, Tracker, make_trackers
from ..schemas.metric import Metric
from ..schemas.wire.codec import merged
from ..schemas.wire.errors import ConfigError
from .base import PoolClient, SyncTwin, listed, make_future, make_sync, parse_server_url
from .follow import REWARD, follow_run
from .hosting.environments import HostedEnvironment
from .opentinker import as_tree, translate, warn_needless
from .pool import Pool
from .scheduler_client import job_failure
from .validation import check_files_exist, is_complete, resolve_paths

_FIT_DEFAULTS: dict[str, Any] = {
    "save_freq": 100,
    "test_freq": 50,
    "validate_before_training": True,
}


class AsyncServiceClient(PoolClient):
    """The training of one job, for async code; see `ServiceClient`."""

    def __init__(
        self,
        server_url: str,
        project_name: str | None = None,
        experiment_name: str | None = None,
        logger_backends: str | Sequence[str] | None = None,
        api_key: str | None = None,
        config: Any = None,
    ) -> None:
        """Name the job by the `server_url` that `submit_job` returned."""
        del config  # trackers get the job's own
        self._address = parse_server_url(server_url)
        super().__init__(self._address.broker_url, api_key, self._address.scope.user)
        self._project_name = project_name
        self._experiment_name = experiment_name
        self._logger_backends = listed(logger_backends or [])
        self._config: dict[str, Any] = {}
        self._attended: JobRecord | None = None
        self._hosts_game = False

    @property
    def server_url(self) -> str:
        """The job's URL."""
        return self._address.server_url

    async def set_config(self, args: Any, env: HostedEnvironment | None = None) -> None:
        """Complete the job's configuration and start hosting `env`.

        `args` is a dict, namespace or OmegaConf tree of our keys or OpenTinker's. A job that runs
        already keeps its configuration.
        """
        tree = translate(as_tree(args))
        if env is not None:
            tree = merged(tree, env.get_config())
        check_keys(tree)
        check_files_exist(tree, self._address.broker_url)
        pool = await self._connected()
        record = await pool.find(self._address.scope.job)
        if not record.configured:
            config = resolve_paths(tree, pool.broker.url, has_users=pool.has_users)
            if "output_dir" not in tree and "output_dir" in record.config:
                config.pop("output_dir", None)
            await pool.configure(record.job, config, start=False)
        self._config = merged(self._config, tree)
        if env is not None:
            await asyncio.to_thread(env.setup, self)

    async def fit(
        self,
        env: HostedEnvironment | None = None,
        num_epochs: int | None = None,
        num_steps: int | None = None,
        save_freq: int = 100,
        test_freq: int = 50,
        validate_before_training: bool = True,
        verbose: bool = True,
        game_stats_client: Any = None,
        game_stats_log_freq: int = 1,
    ) -> dict[str, float]:
        """Train to the end and return the last training metrics.

        The run validates at step 0 (unless disabled), every `test_freq` and after the last step,
        and writes a checkpoint every `save_freq` and after the last step. `num_steps` wins over
        `num_epochs`; without either it is one pass over the data. An argument overrides the
        configuration only if it differs from its default. A job that runs already is only followed.

        Ctrl-C ends the wait, not the run: Detached, a KeyboardInterrupt, says how to attach again.

        Raises JobFailedError with the pool's reason when the job fails or is stopped, and
        GameError when the game in this process fails.
        """
        del game_stats_log_freq  # the metrics of each step contain them
        if game_stats_client is not None:
            warn_needless({"game_stats_client": "numbers in the game's info are metrics game/*"})
        pool = await self._connected()
        if env is not None:
            await asyncio.to_thread(env.setup, self)
        record = await pool.find(self._address.scope.job)
        if not record.configured:
            training = {
                "num_epochs": None if num_steps is not None else num_epochs,
                "num_steps": num_steps,
                "save_freq": save_freq,
                "test_freq": test_freq,
                "validate_before_training": validate_before_training,
            }
            record = await self._start(pool, record, env, training)
        self._attended, self._hosts_game = record, env is not None
        trackers = self._trackers(record, verbose=verbose)
        return await self._attend(pool, record, env, trackers)

    def describe_detached(self) -> str:
        """Describe the run that an interrupted `fit` leaves running, or return ""."""
        record = self._attended
        if record is None:
            return ""
        text = (
            f"detached: run {record.name} continues in the pool\n"
            f"  attach again  call fit again on ServiceClient({shown_url(self.server_url)!r}), or "
            f"`tinkermq watch {record.name}`\n"
            f"  stop it       SchedulerClient(…).complete_job({record.job!r}), or "
            f"`tinkermq stop {record.name}`"
        )
        if self._hosts_game:
            text += "\n  its game was hosted here: the run waits until fit is called with it again"
        return text

    async def status(self) -> JobRecord:
        """Return the job's record."""
        return await (await self._connected()).find(self._address.scope.job)

    async def _start(
        self,
        pool: Pool,
        record: JobRecord,
        env: HostedEnvironment | None,
        wishes: Mapping[str, Any],
    ) -> JobRecord:
        """Complete the configuration with the arguments of `fit`, and start the job."""
        known: dict[str, Any] = record.config.get("training") or {}
        training: dict[str, Any] = {
            key: value
            for key, value in wishes.items()
            # A default of `fit` does not override a configured value.
            if value is not None and not (key in known and value == _FIT_DEFAULTS.get(key))
        }
        config: dict[str, Any] = {"training": training}
        if env is not None:
            config = merged(config, env.get_config())
        if not is_complete(merged(record.config, config)):
            raise ConfigError(
                f"run {record.name} has no model or no game yet",
                hint="call set_config(args, env) with tokenizer_path (model.path) and an "
                "environment, or name env.game",
            )
        return await pool.configure(record.job, config, start=True)

    def _trackers(self, record: JobRecord, *, verbose: bool) -> list[Tracker]:
        name = self._experiment_name or record.name
        trackers = make_trackers(
            self._logger_backends,
            TrackedRun(project=self._project_name or "tinkermq", name=name),
            folder=Path("outputs") / record.name / "client",
        )
        for tracker in trackers:
            tracker.log_config(record.config)
        if verbose and "console" not in self._logger_backends:
            trackers.append(ConsoleTracker())
        return trackers

    async def _attend(
        self,
        pool: Pool,
        record: JobRecord,
        env: HostedEnvironment | None,
        trackers: Sequence[Tracker],
    ) -> dict[str, float]:
        """Follow the run to its end, or until the game's host in this process fails."""
        following = asyncio.create_task(_log_run(pool, record, trackers), name="fit")
        waits: set[asyncio.Future[Any]] = {following}
        if env is not None and env.hosting is not None:
            waits.add(asyncio.wrap_future(env.hosting))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not following.done() and env is not None:
                env.check()
            return await following
        finally:
            following.cancel()
            for tracker in trackers:
                await asyncio.to_thread(tracker.finish)


class ServiceClient(SyncTwin[AsyncServiceClient]):
    """The training of one job.

    Works inside a running event loop (a notebook), too; async code takes `AsyncServiceClient`.
    """

    def __init__(
        self,
        server_url: str,
        project_name: str | None = None,
        experiment_name: str | None = None,
        logger_backends: str | Sequence[str] | None = None,
        api_key: str | None = None,
        config: Any = None,
    ) -> None:
        """Name the job by the `server_url` that `submit_job` returned.

        `logger_backends` (console, jsonl, tensorboard, wandb, trackio) run in this process, under
        `project_name` and `experiment_name`; the pool writes its own beside the run. `api_key`
        is that of the job's owner; default: $TINKERMQ_API_KEY. `config` is not used: the trackers
        get the job's own configuration.
        """
        super().__init__(
            AsyncServiceClient(
                server_url, project_name, experiment_name, logger_backends, api_key, config
            )
        )

    @property
    def server_url(self) -> str:
        """The job's URL."""
        return self.aio.server_url

    set_config = make_sync(AsyncServiceClient.set_config)
    fit = make_sync(AsyncServiceClient.fit, AsyncServiceClient.describe_detached)
    fit_future = make_future(AsyncServiceClient.fit)

    def upload_reward_function(self, function_name: str, source_code: str) -> None:
        """Raise ConfigError: the pool runs no code of clients."""
        del source_code
        raise ConfigError(
            f"reward function {function_name!r} cannot be uploaded: no code of clients runs in "
            "the pool",
            hint="pass it to the GameEnvironment as reward_function: it is called where the game "
            "is hosted",
        )


async def _log_run(pool: Pool, record: JobRecord, trackers: Sequence[Tracker]) -> dict[str, float]:
    """Log every metric until the run ends; return those of the last training step.

    Raises JobFailedError.
    """
    last: dict[str, float] = {}
    async with aclosing(follow_run(pool, record)) as updates:
        async for update in updates:
            if isinstance(update, Metric):
                for tracker in trackers:
                    log = in_thread(tracker.log, update.values, update.step)
                    await with_room(log, f"metrics of step {update.step}")
                last = dict(update.values) if REWARD in update.values or not last else last
            elif isinstance(update, JobRecord) and update.state in FINAL_STATES - {"COMPLETED"}:
                raise job_failure(update)
    return last
