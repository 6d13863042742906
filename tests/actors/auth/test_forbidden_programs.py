"""What a program may not do with the key of its episode, tried over NATS without any gateway.

Ada and Mallory are those of `conftest`.
"""

import pytest
from tinkermq.actors.auth.callout import PROGRAM_CONNECTIONS
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.keys import EpisodeIdentity, episode_key, episode_secret
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.envs.agents.proxy.proxy import EpisodeSigner
from tinkermq.schemas.wire.errors import (
    AuthError,
    BrokerError,
    LogInRefusedError,
    TinkermqError,
)
from tinkermq.schemas.wire.subjects import JobScope, rpc

from tests.support.secured import SecuredPool, refused_listen, refused_publish
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

EPISODE = "generator-0-1-3-0"


async def key_of(pool: SecuredPool, job: JobScope, episode: str = EPISODE) -> str:
    """The key of an episode, as the host in the pool makes it."""
    host = await pool.process(job, "environment-0")
    return (await EpisodeSigner.of_job(host, job)).key(episode)


async def test_both_kinds_of_hosts_sign_keys_that_the_broker_takes(
    pool: SecuredPool, job: JobScope
) -> None:
    ada = await pool.user("ada")
    assert (await EpisodeSigner.of_job(ada, job)).key(EPISODE) == await key_of(pool, job)
    program = await pool.connected(await key_of(pool, job))
    assert program.user == "ada"
    host = await pool.process(job, "environment-0")
    listening = await host.listen(job.episode(EPISODE, "post"), lambda _: None)
    await host.nc.flush()
    await program.publish(job.episode(EPISODE, "post"), b"x")
    await program.nc.flush()
    await listening.stop()


async def test_a_program_reaches_nothing_but_its_own_episode(
    pool: SecuredPool, job: JobScope
) -> None:
    program = await pool.connected(await key_of(pool, job))
    for subject in (
        job.episode("generator-0-1-3-1", "call"),
        job.episode(f"{EPISODE}-2", "post"),
        JobScope("mallory", "01mine").episode(EPISODE, "call"),
        JobScope("ada", "other").episode(EPISODE, "call"),
        job.episode_keys,
        job.env_reset,
        job.infer("chat"),
        job.control("learner"),
        job.rollout(9),
        job.event,
        job.store("environment") + ".get.KV_tmq-jobs",
        rpc("ada", "scheduler", "stop"),
        rpc("ada", "users", "me"),
        "_INBOX_ada.x",
        f"_INBOX_job.{job.key}.generator-0.x",
        "$SRV.PING",
    ):
        await refused_publish(program, subject)
    for subject in (
        job.episode(EPISODE, "call"),
        job.episode(EPISODE, "post"),
        f"_INBOX_job.{job.key}.>",
        job.episode_inbox("generator-0-1-3-1") + ".>",
        job.metric,
        job.log("*"),
        ">",
    ):
        await refused_listen(program, subject)


async def test_a_program_reads_nothing_that_is_stored(pool: SecuredPool, job: JobScope) -> None:
    program = await pool.connected(await key_of(pool, job))
    for subject in (
        "$JS.API.INFO",
        f"$JS.API.STREAM.INFO.{job.stream_rollout}",
        f"$JS.API.STREAM.MSG.GET.{job.stream_rollout}",
        f"$JS.API.DIRECT.GET.{job.stream_rollout}",
        f"$JS.API.CONSUMER.CREATE.{job.stream_rollout}",
        f"$KV.tmq-jobs.{job.key}",
    ):
        await refused_publish(program, subject, b"{}")
    with pytest.raises(TinkermqError):
        await RolloutLog(program, job).get(1)
    with pytest.raises(TinkermqError):
        await JobStore(program).find_by_id("ada", job.job)


async def test_forged_keys_are_refused(pool: SecuredPool, job: JobScope, mallory: Broker) -> None:
    key = await key_of(pool, job)
    signer = await EpisodeSigner.of_job(mallory, JobScope("mallory", "01mine"))
    signature = signer.key(EPISODE).rpartition(".")[2]
    own = episode_secret("mallory", "01mine", pool.secrets.job_secret())
    for forged in (
        key.replace(".generator-0-1-3-0.", ".generator-0-1-3-1."),
        key.replace("_ada.", "_mallory."),
        key.replace(f".{job.job}.", ".01mine."),
        key[:-1] + ("0" if key[-1] != "0" else "1"),
        f"{key.rpartition('.')[0]}.{signature}",
        episode_key(EpisodeIdentity("ada", job.job, EPISODE), own),
        episode_key(EpisodeIdentity("ada", job.job, EPISODE), None),
    ):
        with pytest.raises(LogInRefusedError):
            await pool.connected(forged)


async def test_nobody_signs_for_the_job_of_another(
    pool: SecuredPool, job: JobScope, mallory: Broker
) -> None:
    with pytest.raises(TinkermqError, match="may not"):
        await EpisodeSigner.of_job(mallory, job)
    program = await pool.connected(await key_of(pool, job))
    with pytest.raises(TinkermqError, match="may not"):
        await EpisodeSigner.of_job(program, job)
    with pytest.raises(AuthError, match="runs no job"):
        await EpisodeSigner.of_job(mallory, JobScope("mallory", "02none"))


async def test_connections_with_one_key_are_bounded(pool: SecuredPool, job: JobScope) -> None:
    key = await key_of(pool, job, "greedy-0")
    refused = 0
    for _ in range(3 * PROGRAM_CONNECTIONS):  # servers tell of new connections a moment later
        try:
            await pool.connected(key)
        except LogInRefusedError:
            refused += 1
    assert refused >= PROGRAM_CONNECTIONS
    assert await pool.connected(await key_of(pool, job, "greedy-1"))


async def test_the_end_of_its_job_ends_a_programs_connection(pool: SecuredPool) -> None:
    scope = await pool.job("ada", "01ends")
    key = await key_of(pool, scope)
    program = await pool.connected(key)
    errors: list[BrokerError] = []
    program.on_error(errors.append)
    jobs = JobStore(await pool.service("scheduler"))
    await jobs.transition(await jobs.get("ada", scope.job), "FAILED", "it ended", "test")
    await until(lambda: any(isinstance(one, LogInRefusedError) for one in errors), "the refusal")
    assert not program.is_connected
    with pytest.raises(LogInRefusedError):
        await pool.connected(key)
