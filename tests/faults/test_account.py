"""The account of a soak finds what is wrong: each kind of loss is made by hand, and named."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import numpy as np
import pytest
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.wire.codec import pack

from tests.faults.soak.account import Account, Run, account

BATCH = 2
STEPS = 3


@dataclass
class Made:
    """A run of three steps over six tasks, as its streams and files would hold it."""

    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By task number; the log holds them in this order."""
    records: list[dict[str, Any]] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    index_of_left: dict[int, int] = field(default_factory=dict)
    issued: set[int] = field(default_factory=lambda: set(range(BATCH * STEPS)))


def made() -> Made:
    """Return one in which nothing is wrong."""
    run = Made()
    for number in range(BATCH * STEPS):
        task = {"task": number, "index": number, "sample": None}
        versions = np.array([-1, number // BATCH], np.int32)
        episode = {"versions": versions, "mask": np.array([0, 1], np.uint8)}
        run.groups[number] = {"v": 1, "task": task, "trajectories": [episode]}
    for step in range(1, STEPS + 1):
        tasks = [BATCH * (step - 1) + at for at in range(BATCH)]
        seqs = [number + 1 for number in tasks]
        run.records.append({"step": step, "seqs": seqs, "tasks": tasks, "dropped": []})
        run.told.append({"step": step, "training_step_reward": 0.5})
    every = [[0, BATCH * STEPS]]
    run.state = {
        "step": STEPS,
        "batch_seq": STEPS,
        "trained": every,
        "dropped": [],
        "next_task": BATCH * STEPS,
    }
    return run


async def account_of(run: Made, url: str, folder: Path) -> Account:
    """Store it, and account for it."""
    job = folder.name.replace("_", "-").lower()
    log = [pack(group) for group in run.groups.values()]
    async with await nats.connect(url) as connection:
        stream = connection.jetstream()
        for kind in ("rollout", "batch", "dead", "feed", "task"):
            await stream.add_stream(name=f"tmq-u-{job}-{kind}", subjects=[f"{job}.{kind}.>"])
        for number, payload in zip(run.groups, log, strict=True):
            await stream.publish(f"{job}.rollout.{number}", payload)
        for record in run.records:
            known = [hashlib.sha256(log[s - 1]).digest() for s in record["seqs"] if s <= len(log)]
            digest = hashlib.sha256(b"".join(known)).hexdigest()
            await stream.publish(f"{job}.batch.b", pack({"digest": digest, **record}))
        for values in run.told:
            metric = {"step": values["step"], "values": values}
            await stream.publish(f"{job}.feed.metric", pack(metric))
        for number in run.left:
            task = {"task": number, "index": run.index_of_left.get(number, number)}
            await stream.publish(f"{job}.task.{number}", pack(task))
    checkpoint = folder / "checkpoints" / f"step_{STEPS:06d}" / "learner"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(run.state))
    lines = "".join(f"{json.dumps(values)}\n" for values in run.told)
    (folder / "metrics.jsonl").write_text(lines)
    training = {"num_steps": STEPS, "batch_size": BATCH, "max_staleness": 0}
    config = {"training": training, "env": {"num_val": 0}}
    return await account(url, Run(job, "u", folder, config, run.issued))


def train_twice(run: Made) -> None:
    run.records[2].update(seqs=[5, 1], tasks=[4, 0])


def lose_a_step(run: Made) -> None:
    del run.records[1]


def refuse(run: Made) -> None:
    run.groups[6] = {**run.groups[5], "task": {"task": 6, "index": 6, "sample": None}}
    run.records[2]["dropped"] = [{"seq": 7, "task": 6, "reason": "malformed"}]


def another_learners(run: Made, *, reissue_of: int | None = None) -> None:
    """Append a group of a position that was trained under another number."""
    task = {"task": 6, "index": 4, "sample": None, "reissue_of": None}
    run.groups[6] = {**run.groups[5], "task": task}
    run.groups[4]["task"]["reissue_of"] = reissue_of


def refuse_what_was_issued_again(run: Made) -> None:
    another_learners(run, reissue_of=6)
    run.records[2]["dropped"] = [{"seq": 7, "task": 6, "reason": "malformed"}]


def leave_what_is_not_trained_elsewhere(run: Made) -> None:
    run.left.append(6)
    run.index_of_left[6] = 6


def skip_a_number(run: Made) -> None:
    another_learners(run)
    run.groups[7] = run.groups.pop(6)
    run.groups[7]["task"]["task"] = 7
    run.records[2]["dropped"] = [{"seq": 7, "task": 7, "reason": "malformed"}]


def lose_a_task(run: Made) -> None:
    run.issued.add(6)


def forget_an_entry(run: Made) -> None:
    run.groups[6] = {**run.groups[5], "task": {"task": 6, "index": 6, "sample": None}}


def drop_without_again(run: Made) -> None:
    refuse(run)
    run.records[2]["dropped"][0]["reason"] = "stale"


def train_a_row_twice(run: Made) -> None:
    run.groups[3]["task"]["index"] = 2


def alter_a_group(run: Made) -> None:
    run.records[0]["digest"] = "0" * 64


def train_what_is_old(run: Made) -> None:
    run.groups[5]["trajectories"][0]["versions"] = np.array([-1, 1], np.int32)


def give_up_silently(run: Made) -> None:
    refuse(run)
    run.records[2]["dropped"][0]["reason"] = "failed"


def save_less(run: Made) -> None:
    run.state["trained"] = [[0, 5]]


def tell_another_story(run: Made) -> None:
    run.told.append({"step": 2, "training_step_reward": 0.75})


def tell_less(run: Made) -> None:
    del run.told[1]


def leave_a_task(run: Made) -> None:
    run.left.append(2)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (train_twice, "tasks ended twice: 0"),
        (lose_a_step, "the batch records are of steps [1, 3]"),
        (refuse, "groups were refused as malformed: 7"),
        (lose_a_task, "tasks that were issued and have no end: 6"),
        (forget_an_entry, "entries of the log that nobody decided on: 7"),
        (drop_without_again, "positions of the data order that were never trained: 6 (dropped as"),
        (train_a_row_twice, "positions trained twice: 2"),
        (alter_a_group, "the digest of step 1 is not that of its groups"),
        (train_what_is_old, "step 3 trained tokens of versions 1 to 1"),
        (give_up_silently, "tasks given up without a dead letter: 6"),
        (save_less, "tasks trained by records or checkpoint, not both: 5"),
        (tell_another_story, "metrics.jsonl tells two stories of 2"),
        (tell_less, "steps that the feed lacks or made up: 2"),
        (leave_a_task, "tasks are left in the queue"),
        (leave_what_is_not_trained_elsewhere, "tasks are left in the queue"),
        (refuse_what_was_issued_again, "groups were refused as malformed: 7"),
        (skip_a_number, "task numbers without an end: 6"),
    ],
)
async def test_what_is_wrong_with_a_run_is_named(
    nats_server: NatsServer, tmp_path: Path, spoil: Callable[[Made], None], said: str
) -> None:
    run = made()
    spoil(run)
    found = await account_of(run, nats_server.url, tmp_path)
    assert any(said in problem for problem in found.problems), found.problems


async def test_a_run_in_which_nothing_is_wrong_is_accounted_for(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    found = await account_of(made(), nats_server.url, tmp_path)
    assert found.problems == []
    assert (found.num_steps, found.num_trained) == (STEPS, BATCH * STEPS)


def refuse_another_learners(run: Made) -> None:
    another_learners(run)
    run.issued.add(6)
    run.records[2]["dropped"] = [{"seq": 7, "task": 6, "reason": "malformed"}]
    run.state.update(dropped=[[6, 7]], next_task=7)


def end_before_another_learners(run: Made) -> None:
    another_learners(run)
    run.issued.add(6)


def leave_another_learners(run: Made) -> None:
    run.issued.add(6)
    run.left.append(6)
    run.index_of_left[6] = 1


@pytest.mark.parametrize(
    "spoil", [refuse_another_learners, end_before_another_learners, leave_another_learners]
)
async def test_what_another_learner_had_issued_too_is_told_apart(
    nats_server: NatsServer, tmp_path: Path, spoil: Callable[[Made], None]
) -> None:
    run = made()
    spoil(run)
    found = await account_of(run, nats_server.url, tmp_path)
    assert found.problems == []
    assert found.num_foreign == 1
