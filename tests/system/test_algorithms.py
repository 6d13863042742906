"""Runs with functions of one's own, components, teachers elsewhere, and actions that hang."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from tinkermq.broker.jobs import JobStore
from tinkermq.clients import AsyncInferenceSchedulerClient
from tinkermq.schemas.wire.errors import NotFoundError

from tests.support.configs import small_job
from tests.support.gateway import run_gateway
from tests.support.jobs import Job
from tests.support.models import make_tiny_model, plain_logprobs
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


OWN = {
    "own_advantage": "examples.own_algorithms:best_of_group",
    "own_loss": "examples.own_algorithms:clipped",
    "own_correction": "examples.own_algorithms:square_root",
    "own_mask": "examples.own_algorithms:certain",
    "own_filter": "tests.support.games:odd_lengths",
}
CHOSEN = {
    "curriculum": "success_rate",
    "curriculum_tasks": 16,
    "own_curriculum": "examples.own_algorithms:hardest",
}


async def test_a_run_with_functions_of_ones_own_and_a_teacher_is_replayed_to_the_bit(
    stack: Stack, model: Path
) -> None:
    algorithm = OWN | {"teacher": str(model), "teacher_coef": 0.5}
    job = await stack.submit(small_job(model, algorithm=algorithm, training=CHOSEN))
    wrong = {"own_loss": "examples.own_algorithms:best_of_group"}
    broken = await stack.submit(small_job(model, algorithm=wrong))
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    dropped = [item.reason for record in await job.batches() for item in record.dropped]
    assert "filtered" in dropped
    failed = await broken.until("FAILED")
    assert "algorithm.own_loss=examples.own_algorithms:best_of_group" in failed.reason
    assert failed.actors[0].restarts == 0


# -- A reward of several components, batches gone through twice, the most uncertain tokens alone ---


async def test_a_component_that_the_game_does_not_tell_is_named(stack: Stack, model: Path) -> None:
    algorithm = {"advantage": "gdpo", "reward_components": {"format": 1.0}}
    env = {"game": "tests.support.games:ScoredBandit", "num_val": 0}
    job = await stack.submit(small_job(model, env=env, algorithm=algorithm))
    failed = await job.until("FAILED")
    assert "algorithm.reward_components.format: the game's `info` has None" in failed.reason


# -- Runs whose teacher is elsewhere: a job that serves, and an API that is away for a while -------

ALONE = {"group_size": 1}


class Road:
    """A TCP proxy to an API, which can be closed: then nobody answers at its address."""

    def __init__(self, url: str) -> None:
        """Lead to the host and port of a URL."""
        parts = urlsplit(url)
        self._to = parts.hostname, parts.port
        self.is_open = True
        self.num_calls = 0
        self._carrying = set[asyncio.Task[None]]()

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        """Carry connections; yields the URL of this end."""
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_calls += 1
        if not self.is_open:
            writer.transport.abort()
            return
        onward, back = await asyncio.open_connection(*self._to)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(self._pipe(reader, back), self._pipe(onward, writer))

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self.is_open:
                writer.transport.abort()
                return
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def served(stack: Stack, folder: Path, tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    """Serve a model while the block lasts."""
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        config = {"output_dir": str(tmp_path)}
        job = await client.submit_inference_job(str(folder), max_model_len=96, config=config)
        yield job
        await client.complete_job(job["job_id"])


async def told_of_teacher(job: Job, teacher: Path) -> None:
    """Assert that the log holds what the teacher says, of each token of each episode."""
    import torch
    from tinkermq.actors.policy.model_folder import load_causal_lm

    model = load_causal_lm(str(teacher), dtype=torch.float32)
    groups = [entry.group for entry in await job.entries() if entry.group is not None]
    assert groups
    for item in (one for group in groups for one in group.sampled):
        assert item.teaching is not None
        assert item.teaching.logprobs is not None
        first = int(item.mask.argmax())
        prompt = item.token_ids[:first] if item.teaching.prompt is None else item.teaching.prompt
        wanted = plain_logprobs(model, prompt, item.token_ids[first:])
        np.testing.assert_allclose(item.teaching.logprobs, wanted, atol=2e-4)


async def test_an_api_that_is_away_is_waited_for_and_the_run_is_replayed_to_the_bit(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    teacher = make_tiny_model(tmp_path / "teacher", heads=2)
    async with (
        served(stack, teacher, tmp_path) as serving,
        run_gateway(stack.server.url, tmp_path) as gateway,
    ):
        road = Road(gateway.url)
        async with road.listen() as url:
            algorithm = {"teacher": f"{url}/v1?model={serving['name']}", "reward_coef": 0.0}
            job = await stack.submit(
                small_job(
                    model,
                    algorithm=algorithm,
                    rollout=ALONE,
                    env={"game": "tests.support.games:SlowBandit"},
                )
            )
            await job.eventually(lambda: _has_steps(job, 2), "two steps")
            road.is_open = False
            waits = await job.eventually(lambda: _missing(job), "a generator that waits")
            assert f"the teacher {algorithm['teacher']}" in waits
            road.is_open = True
            await job.until("COMPLETED")
    kinds = [event.kind for event in await job.events()]
    assert kinds.count("teacher_away") == kinds.count("teacher_back") == 1
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    await told_of_teacher(job, teacher)
    last = (await job.metrics())[-1].values
    assert last["distillation/taught_share"] == 1.0


async def _has_steps(job: Job, num: int) -> bool:
    return len(await job.batches()) >= num


async def _missing(job: Job) -> str | None:
    beats = (await job.actors()).values()
    return next((beat.waits_for for beat in beats if "the teacher" in beat.waits_for), None)


async def test_a_served_job_teaches_by_its_likeliest_tokens_what_the_policy_does_not_read(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    teacher = make_tiny_model(tmp_path / "teacher", heads=2)
    async with served(stack, teacher, tmp_path) as serving:
        algorithm = {
            "teacher": f"job:{serving['name']}",
            "teacher_loss": "forward_kl",
            "teacher_top_k": 8,
            "teacher_context": "solution",
            "teacher_context_tokens": 40,
        }
        game = {"game": "tests.support.games:ToldBandit"}
        job = await stack.submit(small_job(model, algorithm=algorithm, rollout=ALONE, env=game))
        await job.eventually(lambda: _has_steps(job, 2), "two steps")
        record = await JobStore(stack.broker).get(job.record.user, serving["job_id"])
        os.kill(await Job(stack, record).pid("server-0"), signal.SIGKILL)
        await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    await told_of_teacher(job, teacher)
    losses = [one.values["actor/teacher_loss"] for one in await job.metrics()]
    assert losses[-1] < losses[0]


async def test_checkpoints_of_runs_teach_and_are_referred_to_when_their_run_has_gone(
    stack: Stack, model: Path
) -> None:
    before = await stack.submit(small_job(model, training={"num_steps": 3}))
    await before.until("COMPLETED")
    name = before.record.name
    algorithm = {
        "teacher": {"bandit": f"{name}@3", "": "self"},
        "teacher_context": "solution",
        "teacher_context_tokens": 40,
        "kl_coef": 0.1,
        "reference": {"path": f"{name}@last", "ema": 0.9},
    }
    game = {"game": "tests.support.games:ToldBandit"}
    job = await stack.submit(
        small_job(model, algorithm=algorithm, env=game, training={"num_steps": 4})
    )
    before.run_dir.rename(before.run_dir.with_name("elsewhere"))
    await job.until("COMPLETED")
    config = job.record.config["algorithm"]
    kept = [config["teacher"]["bandit"], config["reference"]["path"]]
    assert all(Path(one).is_relative_to(job.run_dir / "models") for one in kept)
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    last = (await job.metrics())[-1].values
    assert last["distillation/taught_share"] == 1.0
    assert last["actor/reference_kl"] > 0
    with pytest.raises(NotFoundError, match="has no checkpoint of step 7"):
        await stack.submit(small_job(model, algorithm={"teacher": f"{job.record.name}@7"}))


async def test_a_teacher_with_other_tokens_ends_the_run_with_its_name(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    teacher = make_tiny_model(tmp_path / "teacher")
    file = teacher / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))
    async with (
        served(stack, teacher, tmp_path) as serving,
        run_gateway(stack.server.url, tmp_path) as gateway,
    ):
        names = (f"job:{serving['name']}", f"{gateway.url}/v1?model={serving['name']}")
        for name in names:
            job = await stack.submit(
                small_job(model, algorithm={"teacher": name, "reward_coef": 0.0}, rollout=ALONE)
            )
            failed = await job.until("FAILED")
            assert "has another tokenizer than the policy" in failed.reason
        nobody = await stack.submit(
            small_job(model, algorithm={"teacher": f"{gateway.url}/v1?model=nobody"}, rollout=ALONE)
        )
        assert "nobody" in (await nobody.eventually(lambda: _missing(nobody), "a wait"))


# -- An action that hangs its game is trained with a reward, or masked, as the user says -----------


HUNG = "rollout/finish_timeout"


def _job(model: Path, steps: int, **env: Any) -> dict[str, Any]:
    fragile = {"game": "tests.support.games:FragileBandit", "step_timeout_s": 0.2, "num_val": 0}
    learner = {"lr": 1e-2}
    training = {"num_steps": steps, "max_staleness": 0, "batch_size": 8}
    return small_job(model, env=fragile | env, learner=learner, training=training)


@pytest.mark.long
async def test_a_policy_learns_not_to_hang_its_game_where_that_is_a_penalty(
    stack: Stack, model: Path
) -> None:
    penalty = await stack.submit(_job(model, 24, on_step_timeout="penalty"))
    mask = await stack.submit(_job(model, 3, on_step_timeout="mask"))
    for job in (penalty, mask):
        await job.until("COMPLETED")
        await assert_every_task_once(job)
        await assert_replay_is_identical(job)
        assert not await job.dead()
    shares = [metric.values[HUNG] for metric in await penalty.metrics()]
    assert sum(shares[-6:]) < sum(shares[:6]) / 2
