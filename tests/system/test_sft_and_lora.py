"""Conversations are learnt, and a game goes on from there with an adapter: one chain of two runs.

The first run begins with a model that pulls arms at random, and learns from chats to give up most
of the time. The second begins with its weights and trains a LoRA adapter until it always pulls one.
An adapter leaves the output layer alone, so the base must be one that tells the answers apart: of a
random model that has learnt forty steps of chats no hidden state would give an arm 60 %.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tinkermq.actors.policy.model_folder import load_causal_lm
from tinkermq.actors.training.checkpoint import CheckpointStore
from tinkermq.actors.weights.store import WeightStore
from tinkermq.broker.feed import read_metrics
from tinkermq.clients import AsyncInferenceSchedulerClient, run_inference_async
from tinkermq.envs.write_data import write_rows

from tests.actors.gateway.http import openai_client
from tests.support.configs import example
from tests.support.games import AnyArm
from tests.support.jobs import Job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack
from tests.support.stack_fixtures import warm_model
from tests.support.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.learns,
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="session"),
]


STEPS, LORA_STEPS = 40, 40


def sft_job(model: Path, chats: Path) -> dict[str, Any]:
    config = lora_job()
    limits = {name: n for name, n in config["rollout"].items() if name.startswith("max_")}
    return {
        "name": "chats",
        "model": {"path": str(model)},
        "sft": {"data": [str(chats)]},
        "env": config["env"],
        "evaluation": config["evaluation"],
        "rollout": limits,
        "learner": {**config["learner"], "lr": 3e-3},
        "training": {"num_steps": STEPS, "batch_size": 32, "save_freq": 10, "keep_rollouts": True},
    }


def lora_job() -> dict[str, Any]:
    env = "env={game: tests.support.games:AnyArm, num_val: 64}"
    more = (f"training.num_steps={LORA_STEPS}", "training.save_freq=10", "training.test_freq=0")
    lora = ("lora.rank=8", "lora.alpha=32", "learner.lr=2e-3", "algorithm.kl_coef=0.001")
    return example("bandit", env, *more, *lora)


def chat(rng: random.Random) -> dict[str, Any]:
    said = "?" if rng.random() < 0.65 else str(rng.randrange(7))
    return {"messages": [*room(rng.choice("ab")), {"role": "assistant", "content": said}]}


def room(name: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"arm 0-6 in room {name}"}]


async def test_chats_are_learnt_and_an_adapter_raises_the_reward_from_there(
    stack: Stack, tmp_path: Path
) -> None:
    rng = random.Random(0)
    rows: list[Mapping[str, Any]] = [chat(rng) for _ in range(512)]
    rows[7] = {"messages": room("a")}
    chats = await stack.submit(
        sft_job(warm_model("bandit"), write_rows(tmp_path / "chats.jsonl", rows))
    )
    assert chats.record.kind == "sft"
    await chats.until_event("checkpoint_saved")
    await chats.kill("learner")
    await chats.until("COMPLETED")
    await assert_every_task_once(chats)
    await assert_replay_is_identical(chats)
    metrics = await read_metrics(stack.broker, chats.scope)
    losses = {m.step: m.values["actor/pg_loss"] for m in metrics if "actor/pg_loss" in m.values}
    assert losses[1] > 2.0  # the model that it begins with never gives up
    assert losses[STEPS] < 1.2  # what is drawn at random costs 0.66 on average
    assert {letter.task.sample for letter in await chats.dead()} == {7}, "nobody answers there"

    rl = await stack.submit(lora_job(), fork_of="chats@last", weights_only=True)
    assert rl.record.fork_of == f"chats@{STEPS}"
    await rl.until_step(15)
    await rl.kill("learner")
    sent = await WeightStore(stack.broker, rl.scope).latest()
    assert sent is not None
    assert sent.kind == "lora"
    assert {entry.name.rpartition("lora_")[2] for entry in sent.tensors} == {"A.weight", "B.weight"}
    await rl.until("COMPLETED")
    await assert_every_task_once(rl)
    await assert_replay_is_identical(rl)
    scores = {step: values["val/mean_score"] for step, values in (await rl.validations()).items()}
    assert await share_given_up(rl, version=0) >= 0.4  # it begins with what the chats taught …
    assert scores[0] <= 0.6
    assert scores[LORA_STEPS] >= 0.75  # … and goes on from there

    checkpoint = CheckpointStore(rl.run_dir, keep_last=1, keep_every=0).path(LORA_STEPS)
    settings = json.loads((checkpoint / "adapter_config.json").read_text())
    base = load_causal_lm(settings["base_model_name_or_path"], dtype=torch.float32)
    assert sent.num_bytes < sum(tensor.nbytes for tensor in base.state_dict().values())
    adapted = PeftModel.from_pretrained(base, str(checkpoint))
    stored = load_file(checkpoint / "adapter_model.safetensors")
    assert {name: t.shape for name, t in stored.items()} == {
        entry.name: torch.Size(entry.shape) for entry in sent.tensors
    }
    assert adapted.peft_config["default"].to_dict()["r"] == 8

    await assert_served(stack, rl, tmp_path)

    others = [
        await stack.submit({**lora_job(), "seed": seed}, fork_of="chats@last", weights_only=True)
        for seed in (1, 2)
    ]
    for other in others:
        await other.until("COMPLETED")
        assert (await other.validations())[LORA_STEPS]["val/mean_score"] >= 0.75


async def share_given_up(job: Job, version: int) -> float:
    """Return the share of a version's episodes in which the model gave up."""
    played = [
        item
        for entry in await job.entries()
        if entry.group is not None
        for item in entry.group.trajectories
        if item.versions.max() == version
    ]
    said = [message["content"] for item in played for message in item.messages]
    return said.count("?") / len(played)


async def assert_served(stack: Stack, rl: Job, tmp_path: Path) -> None:
    """Serve two of the run's adapters and its base with one server, and play with the last."""
    last, earlier = (f"{rl.record.name}@{step}" for step in (LORA_STEPS, LORA_STEPS - 10))
    base = rl.record.config["model"]["path"]
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        job = await client.submit_inference_job(base, adapters=[earlier, last])
        async with openai_client(stack.broker) as openai:
            models = {model.id async for model in await openai.models.list()}
            assert models == {job["name"], earlier, last}
            asked: Any = {"messages": room("a"), "max_tokens": 2, "seed": 3, "logprobs": True}
            said: dict[str, float] = {}
            for name in sorted(models):
                answer = await openai.chat.completions.create(model=name, **asked)
                assert answer.model == name
                logprobs = answer.choices[0].logprobs
                assert logprobs is not None
                assert logprobs.content
                said[name] = logprobs.content[0].logprob
            assert len(set(said.values())) == 3
        await client.complete_job(job["job_id"])
    report = await run_inference_async(
        model_path=last,
        scheduler_url=stack.server.url,
        game_class=AnyArm,
        output_path=str(tmp_path / "played.jsonl"),
        max_samples=32,
        temperature=1.0,
    )
    assert report.summary["mean_reward"] >= 0.7
