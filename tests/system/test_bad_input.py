"""What users get wrong ends their job alone; junk on its subjects ends none."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tinkermq.broker.client.rpc import call
from tinkermq.clients import AsyncTrajectoryPublisher
from tinkermq.clients.base import JobAddress
from tinkermq.schemas.control import ControlReply, ControlRequest
from tinkermq.schemas.wire.codec import pack
from tinkermq.schemas.wire.errors import DataError, GameError, MessageError, ModelError
from tinkermq.schemas.wire.subjects import JobScope

from tests.faults.injected import append_untrainable, episode
from tests.support.configs import small_job
from tests.support.gate import Gate
from tests.support.jobs import Job
from tests.support.proofs import assert_every_task_once
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


NO_SYSTEM = (
    "{%- for message in messages if message['role'] != 'system' -%}<|user|>{{ message['content'] }}"
    "<|end|>{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
FORGETS = "{%- for message in messages[-1:] -%}<|user|>{{ message['content'] }}{%- endfor -%}"

NO_REWARD = {"source": "function", "function": "tests.support.games:no_reward"}
SAME_REWARD = {"source": "function", "function": "tests.support.games:same_reward"}
HANGS = {
    "game": "tests.support.games:SlowBandit",
    "kwargs": {"delay_s": 600},
    "isolation": "process",
    "step_timeout_s": 0.5,
    "num_val": 0,
}


def with_template(model: Path, folder: Path, template: str) -> Path:
    """Copy a model and give it another chat template."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": template}))
    return folder


def with_settings(model: Path, folder: Path) -> Path:
    """Copy a model and give it generation settings that transformers reads and refuses to write."""
    shutil.copytree(model, folder)
    file = folder / "generation_config.json"
    settings = {**json.loads(file.read_text()), "temperature": 0.9, "top_p": 0.6}
    file.write_text(json.dumps(settings))
    return folder


class Mistakes:
    """A job for each mistake, and one without; each starts when a test first asks for it."""

    def __init__(self, stack: Stack, configs: dict[str, dict[str, Any]]) -> None:
        self._stack = stack
        self._configs = configs
        self._jobs: dict[str, Job] = {}

    async def job(self, name: str) -> Job:
        """Return the job, started now or before."""
        if name not in self._jobs:
            self._jobs[name] = await self._stack.submit(self._configs[name])
        return self._jobs[name]

    async def all_jobs(self) -> dict[str, Job]:
        """Return every job, side by side."""
        return {name: await self.job(name) for name in self._configs}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mistakes(
    shared_stack: Stack, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mistakes]:
    """Write the files and configurations of all jobs; at the end, end what still runs."""
    folder = tmp_path_factory.mktemp("mistakes")
    forgetful = with_template(model, folder / "forgetful", FORGETS)
    no_system = with_template(model, folder / "no_system", NO_SYSTEM)
    rows = [{"prompt": "3+4=", "answer": "7"}]
    (folder / "no_answer.jsonl").write_text(json.dumps({"prompt": rows[0]["prompt"]}) + "\n")
    (folder / "nothing.jsonl").write_text("")

    def data(name: str) -> dict[str, Any]:
        path = str(folder / name)
        return {"game": "addition", "train_data": [path], "val_data": [path], "num_val": 0}

    alone = {"count": 0}  # no generator is needed to find these
    configs = {
        "template": small_job(forgetful, rollout={"max_turns": 2}),
        "system": small_job(no_system, env={"game": "tests.support.games:EchoGame"}),
        "column": small_job(model, env=data("no_answer.jsonl"), generator=alone),
        "nothing": small_job(model, env=data("nothing.jsonl"), generator=alone),
        "import": small_job(model, env={"game": "tests.support.games:NoSuchGame"}, generator=alone),
        "raises": small_job(model, env={"game": "tests.support.games:RaisesInStep"}),
        "reward": small_job(model, env={"reward": NO_REWARD}, rollout={"max_tries": 1}),
        "equal": small_job(
            model,
            env={"reward": SAME_REWARD},
            algorithm={"filter_equal_rewards": True},
            limits={"untrainable_groups": 40},
        ),
        "hangs": small_job(model, env=HANGS, rollout={"max_tries": 1}),
        "prompt": small_job(model, rollout={"max_prompt_tokens": 5}),
        "deserted": small_job(
            model,
            env={
                "game": "tests.support.games:SlowBandit",
                "kwargs": {"delay_s": 0.2},
                "num_val": 0,
            },
            training={"num_steps": 10_000},
            limits={"idle_s": 20},
        ),
        "hostless": small_job(
            model, env={"game": "bandit", "hosts": 0}, generator=alone, limits={"idle_s": 1}
        ),
        "healthy": small_job(with_settings(model, folder / "sampled")),
    }
    yield Mistakes(shared_stack, configs)
    await shared_stack.stop_all()


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("template", ["chat template"]),
        ("system", ["no_system takes no system message", "the template leaves it out"]),
        ("column", ["no_answer.jsonl", "answer"]),
        ("nothing", ["nothing.jsonl"]),
        ("import", ["module tests.support.games has no game 'NoSuchGame'", "SlowBandit"]),
        ("raises", ["tasks in a row failed", "ValueError: no rule for", "letters"]),
        ("reward", ["tasks in a row failed", "no_reward raised LookupError: no rubric for this"]),
        ("equal", ["groups could not be trained", "equal_rewards", "rollout.temperature"]),
        ("hangs", ["tasks in a row failed", "SlowBandit hung in step for 0.5 s"]),
        ("prompt", ["tasks in a row failed", "rollout.max_prompt_tokens is 5"]),
        ("hostless", ["no task was finished for 1 s (limits.idle_s)", "start them again"]),
    ],
)
async def test_a_mistake_fails_the_job_with_its_reason(
    mistakes: Mistakes, mistake: str, told: list[str]
) -> None:
    job = await mistakes.job(mistake)
    record = await job.until("FAILED")
    for part in told:
        assert part in record.reason
    assert "Traceback" not in record.reason or mistake == "raises"


async def test_a_folder_without_a_model_is_refused_by_a_node_and_makes_no_job(
    shared_stack: Stack, tmp_path: Path
) -> None:
    told = "empty is not a model folder: config.json is missing"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=told) as refused:
        await shared_stack.submit(small_job(tmp_path / "empty"))
    assert "save_pretrained" in refused.value.hint


@pytest.mark.parametrize(
    ("error", "env", "told"),
    [
        (
            DataError,
            {"train_data": ["/no/rows.jsonl"]},
            "node node: there is no file /no/rows.jsonl",
        ),
        (GameError, {"game": "beside_the_yaml:Game"}, "there is no module 'beside_the_yaml'"),
        (
            GameError,
            {"game": "textarena", "kwargs": {"env_id": "Chess-v0", "opponent": "beside_it:f"}},
            "there is no module 'beside_it'",
        ),
    ],
)
async def test_what_no_node_has_is_refused_and_leaves_the_name_free(
    shared_stack: Stack, model: Path, error: type[Exception], env: dict[str, Any], told: str
) -> None:
    name = f"refused-{error.__name__.lower()}-{env.get('game', 'none').partition(':')[0]}"
    with pytest.raises(error, match=told):
        await shared_stack.submit({**small_job(model, env={"num_val": 0, **env}), "name": name})
    sound = small_job(model, env={"hosts": 0}, generator={"count": 0})
    job = await shared_stack.submit({**sound, "name": name})
    await job.stop(now=True)


async def test_a_model_whose_weights_are_cut_is_refused_by_a_node_and_makes_no_job(
    shared_stack: Stack, model: Path, tmp_path: Path
) -> None:
    weights = shutil.copytree(model, tmp_path / "cut") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ModelError, match=r"cut/model.safetensors is damaged or cut") as refused:
        await shared_stack.submit(small_job(tmp_path / "cut"))
    assert "copy or download the model's files again" in refused.value.hint


async def test_a_deserted_run_gives_its_slots_back_and_leaves_a_checkpoint(
    mistakes: Mistakes,
) -> None:
    job = await mistakes.job("deserted")
    await job.until_step(1)
    await job.scale("generator", 0)
    record = await job.until("FAILED")
    assert "no task was finished for 20 s (limits.idle_s)" in record.reason
    assert "resume the run" in record.reason
    assert (job.run_dir / "latest").exists()


async def test_groups_that_cannot_be_trained_are_told_and_leave_a_checkpoint(
    mistakes: Mistakes,
) -> None:
    job = await mistakes.job("equal")
    await job.until("FAILED")
    first = (await job.events("groups_untrainable"))[0]
    assert "groups could not be trained" in first.message
    assert "after 40 the run ends" in first.message
    assert (job.run_dir / "latest").exists()
    assert await job.batches() == []


async def test_failed_tasks_are_in_the_dead_letters_with_their_blame(mistakes: Mistakes) -> None:
    job = await mistakes.job("raises")
    await job.until("FAILED")
    letters = await job.dead()
    assert letters
    for letter in letters:
        assert letter.blame.boundary == "environment"
        assert "no rule for" in letter.blame.message
        assert letter.num_attempts >= 3


async def test_a_prompt_that_is_too_long_is_the_tasks_own_failure(mistakes: Mistakes) -> None:
    job = await mistakes.job("prompt")
    await job.until("FAILED")
    assert {letter.blame.boundary for letter in await job.dead()} == {"task"}


async def test_a_healthy_job_beside_all_mistakes_is_unharmed(mistakes: Mistakes) -> None:
    healthy = (await mistakes.all_jobs())["healthy"]
    await healthy.until("COMPLETED")
    await assert_every_task_once(healthy)
    saved = healthy.run_dir / "latest" / "generation_config.json"
    assert json.loads(saved.read_text())["top_p"] == 0.6


# Whatever is published on the subjects of a running job, the job goes on and says what it saw.


JUNK = [
    b"",
    b"\xff\xfe\x00",
    pack({"v": 99, "task": 1}),
    pack({"v": 1, "task": -1, "seed": "seven", "group_size": 0}),
    pack([[[[[[[[[[[[1]]]]]]]]]]]]),
    b"\xdd\xff\xff\xff\xff",
]
FAR = 1_000_000


async def test_junk_on_every_subject_of_a_running_job_harms_nothing(
    stack: Stack, model: Path, gate: Gate
) -> None:
    job = await stack.submit(small_job(model, env=gate.env(3), training={"num_steps": 20}))
    await job.until_step(3)
    before = {name: actor.pid for name, actor in (await job.actors()).items()}
    num_stored = await _throw(stack, job.scope)
    asked = job.scope.control_by("root", "learner")
    request = ControlRequest(verb="status")
    await call(stack.broker, asked, request, ControlReply, timeout_s=PATIENCE_S, waiting_for="it")
    gate.open()
    told = await job.until_event("control_by_admin")
    assert told.message == "status asked for by user root for local"
    await job.until("COMPLETED")
    entries = {entry.seq: entry for entry in await job.entries()}
    strange = {seq for seq, entry in entries.items() if entry.error is not None}
    assert len(strange) == num_stored
    records = await job.batches()
    dropped = {item.seq for record in records for item in record.dropped}
    assert strange <= dropped
    assert {item.reason for record in records for item in record.dropped} == {"malformed"}
    trained = [number for record in records for number in record.tasks]
    assert len(trained) == len(set(trained)) == 20 * 4
    assert [record.step for record in records] == list(range(1, 21))
    restarts = {actor.name: actor.restarts for actor in job.record.actors}
    assert set(restarts.values()) == {0}, f"an actor of {before} was started again"


async def _throw(stack: Stack, scope: JobScope) -> int:
    """Publish junk everywhere; return how much of it the rollout log holds."""
    hosts = [scope.env_reset, scope.env_describe, scope.env("nobody", "step")]
    plain = [scope.weights, scope.control("learner"), scope.control("generator-0"), *hosts]
    for subject in plain:
        for payload in JUNK:
            await stack.broker.send(subject, payload, reply="_INBOX.nobody")
    for number, payload in enumerate(JUNK):
        await stack.broker.publish(scope.task(FAR + number), payload)
        await stack.broker.publish(scope.rollout(FAR + number), payload)
    await stack.broker.publish(scope.rollout("seven"), JUNK[1])
    await stack.broker.publish(scope.task("seven"), JUNK[1])
    return len(JUNK) + 1


# -- An agent of the user's own puts trajectories and tasks into a job; both are trained -----------


async def test_trajectories_and_tasks_of_a_client_are_trained_and_malformed_ones_are_not(
    stack: Stack, model: Path
) -> None:
    training = {"tasks": "external", "num_steps": 3, "batch_size": 2}
    config = small_job(model, training=training, rollout={"group_size": 2})
    job = await stack.submit(config)
    await job.until_event("training_started")
    url = JobAddress(stack.server.url, job.scope).server_url
    async with AsyncTrajectoryPublisher(url, source="my-agent") as publisher:
        await publisher.publish_group([episode(0), episode(1)])
        with pytest.raises(MessageError, match="token_ids must be from 0 to 263"):
            await publisher.publish_group([episode(0), episode(1, last_token=264)])
        with pytest.raises(MessageError, match="has 2 trajectories, this has 1"):
            await publisher.publish_group([episode(0)])
        smuggled = await append_untrainable(stack, job)
        await publisher.publish_tasks([{"seed": 5}, {"seed": 6, "reset_kwargs": {"room": 1}}])
        for _ in range(3):
            await publisher.publish_group([episode(1), episode(0)])
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    records = await job.batches()
    dropped = [(item.task, item.reason) for record in records for item in record.dropped]
    assert dropped == [(smuggled, "malformed")]
    groups = {entry.number: entry.group for entry in await job.entries() if entry.group}
    trained = [groups[number] for record in records for number in record.tasks]
    sources = sorted(group.source for group in trained)
    assert sources == ["generator-0"] * 2 + ["my-agent"] * 4
    asked = [group.task for group in trained if group.source == "generator-0"]
    assert sorted(task.seed for task in asked) == [5, 6]
