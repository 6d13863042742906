"""A learner over several machines: network namespaces, each with a disk of its own."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.training.policies import Policies, load_models
from tinkermq.actors.training.ranks import Ranks
from tinkermq.envs.games.geo3k import make_data
from tinkermq.schemas.config.load_config import parse_config

from tests.support.configs import small_job
from tests.support.images import make_vision_model
from tests.support.jobs import Job
from tests.support.models import make_tiny_model
from tests.support.namespaces import Network
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = [
    pytest.mark.faults,
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="machines apart need root, iproute2"
    ),
]

SLOW = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.2}, "num_val": 0}
APART = {"slots": 4, "ranks": 4, "machines": 2, "lr": 0.01, "eps": 1.0}
TOLERANCE = 1e-5


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


KINDS: dict[str, dict[str, Any]] = {
    "copies on each machine": {"learner": {**APART, "replicas": 2}},
    "divided over all": {"learner": APART},
    "sequences divided": {"learner": {**APART, "context_parallel": 2}},
    "adapter": {"learner": {**APART, "replicas": 2}, "lora": {"rank": 4}},
    "images": {
        "learner": {**APART, "replicas": 2},
        "env": {"game": "geo3k", "num_val": 0},
    },
    "critic": {
        "learner": APART,
        "algorithm": {"advantage": "gae"},
        "critic": {"lr": 0.01},
    },
}


@pytest.mark.parametrize("kind", KINDS)
async def test_two_machines_that_share_nothing_train_what_one_process_does(
    tmp_path: Path, model: Path, network: Network, kind: str
) -> None:
    stack = Stack(tmp_path, slots=3, apart=tmp_path / "machine", network=network)
    (tmp_path / "machine").mkdir()
    async with stack:
        stack.start("node", "other")
        await stack.until_nodes(2)
        config = small_job(model, env=SLOW, training={"num_steps": 6, "save_freq": 2})
        if kind == "images":
            train, _ = make_data(tmp_path, 24, 8)
            seeing = make_vision_model(tmp_path / "seeing", "qwen2_5_vl")
            config |= {"model": {"path": str(seeing)}, "env": {"train_data": [str(train)]}}
            config["rollout"] |= {"max_prompt_tokens": 48, "max_turn_tokens": 6}
        for name, section in KINDS[kind].items():
            config[name] = {**config.get(name, {}), **section}
        job = await stack.submit({**config, "output_dir": str(tmp_path / "machine")})
        await job.until_event("checkpoint_saved")
        await job.kill("rank-3")  # those of the other machine get the checkpoint from the learner
        assert int((await job.until_event("training_recovered")).data["step"]) >= 2
        await job.until("COMPLETED")
        assert {one.node for one in job.record.actors if one.role in ("learner", "rank")} == {
            "node",
            "other",
        }
        found = tmp_path / f"disk-{learners_node(job)}"
        folder = found / job.run_dir.relative_to(tmp_path / "machine") / "checkpoints/step_000006"
        shutil.copytree(found, tmp_path / "machine", dirs_exist_ok=True)
        await assert_every_task_once(job)
        await assert_replay_is_identical(job)
        await assert_one_process_trains_the_same(job, folder)


def learners_node(job: Job) -> str:
    [node] = [actor.node for actor in job.record.actors if actor.name == "learner"]
    assert node is not None
    return node


async def assert_one_process_trains_the_same(job: Job, folder: Path) -> None:
    """Train the recorded batches by one process; weights and gradient norms are those."""
    tree = {**job.record.config}
    one = dict.fromkeys(("ranks", "slots", "machines", "replicas", "context_parallel"), 1)
    tree["learner"] = {**tree["learner"], **one}
    config = parse_config(tree)
    steps = await job.batches()
    policies = Policies.open(
        config, load_models(config, None), Ranks(config), total_steps=len(steps), folder=None
    )
    groups = {entry.seq: entry.group for entry in await job.entries()}
    metrics = {metric.step: metric.values for metric in await job.metrics()}
    for batch in steps:
        trained = [group for seq in batch.seqs if (group := groups[seq]) is not None]
        report = policies.step(trained, batch.step, batch.oldest)
        norm = metrics[batch.step]["actor/grad_norm"]
        assert report.numbers["actor/grad_norm"] == pytest.approx(norm, abs=TOLERANCE)
    [weights] = policies.gather().values()
    saved = policy_tensors(load_models(config, folder)[MAIN])
    for name, tensor in weights.items():  # tied tensors once; a critic's are beside them
        if not name.startswith("critic."):
            assert torch.allclose(tensor.float(), saved[name].float(), atol=TOLERANCE), name


async def test_a_machine_that_dies_and_a_link_that_is_cut_cost_a_checkpoints_way(
    tmp_path: Path, model: Path, network: Network
) -> None:
    async with Stack(tmp_path, slots=3, network=network) as stack:
        stack.start("node", "second")
        stack.start("node", "third")
        await stack.until_nodes(3)
        learner = {**APART, "replicas": 2}
        job = await stack.submit(
            small_job(model, env=SLOW, learner=learner, training={"num_steps": 30})
        )
        await job.until_step(4)
        away = await node_of_a_rank(job)
        stack.kill(away)
        await job.until_event("training_started", count=2)
        assert (await job.read()).losses == 1
        assert away not in {actor.node for actor in job.record.actors}
        await job.until_step(job_step(await job.read()) + 3)
        cut = await node_of_a_rank(job)
        network.cut(cut)
        stack.start("node", away)
        await job.until_event("training_started", count=3)
        network.mend(cut)
        await job.until("COMPLETED")
        await assert_every_task_once(job)
        await assert_replay_is_identical(job)
        fewer = {**job.record.config, "learner": {**learner, "ranks": 2, "slots": 2, "replicas": 1}}
        fewer["training"] = {**fewer["training"], "num_steps": 33}
        del fewer["name"]
        forked = await stack.submit(fewer, fork_of=f"{job.record.name}@30")
        await forked.until("COMPLETED")


async def test_a_machine_that_may_not_reach_the_learner_is_named_with_what_to_do(
    tmp_path: Path, model: Path, network: Network
) -> None:
    async with Stack(tmp_path, slots=3, network=network) as stack:
        stack.start("node", "other")
        await stack.until_nodes(2)
        for one, other in (("node", "other"), ("other", "node")):
            network.forbid(one, other)
        limits = {"max_restarts": 0}
        job = await stack.submit(small_job(model, learner=APART, limits=limits))
        ended = await job.until("FAILED")
        assert "which cannot be reached from here" in ended.reason
        assert "let machines of the pool connect to each other on any port" in ended.reason


async def test_a_machine_that_drains_takes_its_learner_along_with_a_checkpoint(
    tmp_path: Path, model: Path, network: Network
) -> None:
    async with Stack(tmp_path, slots=3, network=network) as stack:
        stack.start("node", "second")
        stack.start("node", "third")
        await stack.until_nodes(3)
        training = {"num_steps": 24, "save_freq": 100}
        job = await stack.submit(small_job(model, env=SLOW, learner=APART, training=training))
        await job.until_step(4)
        leaving = await node_of_a_rank(job)
        stack.terminate(leaving)
        saved = await job.until_event("checkpoint_saved")
        assert int(saved.data["step"]) >= 4
        again = await job.until_event("training_started", count=2)
        assert int(again.data["step"]) >= int(saved.data["step"])
        await job.until("COMPLETED")
        assert (await job.read()).losses == 0
        await assert_every_task_once(job)


async def node_of_a_rank(job: Job) -> str:
    """Return a node of the job that has a rank and not the learner."""
    await job.read()
    nodes = (actor.node for actor in job.record.actors if actor.role == "rank")
    return next(node for node in nodes if node and node != learners_node(job))


def job_step(record: Any) -> int:
    return int(record.version)
