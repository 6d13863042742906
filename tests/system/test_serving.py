"""The command line's `serve`, `infer` and `eval`, live runs, and what goes wrong with them."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tinkermq.actors.policy.tiny_models import save_tiny_model
from tinkermq.clients import AsyncInferenceSchedulerClient, run_inference_async
from tinkermq.envs.games.bandit import BanditGame
from tinkermq.schemas.wire.errors import (
    ConfigError,
    JobFailedError,
    ModelError,
    NotFoundError,
)
from tokenizers import AddedToken
from transformers import AutoTokenizer

from tests.clients.command import Outcome, command
from tests.support.configs import UNHURRIED, small_job
from tests.support.jobs import Job
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def run(stack: Stack, *words: str, without: Path | None = None) -> Outcome:
    """Run one command against the stack, maybe as on a machine without one of its folders."""
    full = command([*words, "--nats-url", stack.server.url])
    if without is not None:
        empty = 'mount -t tmpfs none "$0" && exec "$@"'
        full = ["unshare", "--map-root-user", "--mount", "sh", "-c", empty, str(without), *full]
    done = await asyncio.to_thread(
        subprocess.run, full, capture_output=True, check=False, timeout=PATIENCE_S
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def trained(shared_stack: Stack, model: Path) -> Job:
    """A run with checkpoints of steps 2 and 4, whose game the pool hosts."""
    config = small_job(
        model,
        env={"game": "guess", "num_val": 16},
        rollout={"max_turns": 3, "max_response_tokens": 64},
        training={"num_steps": 4, "save_freq": 2, "keep_last": 3},
    )
    job = await shared_stack.submit(config)
    await job.until("COMPLETED")
    shared_stack.jobs.remove(job)
    return job


async def test_serve_in_one_line_and_infer_against_it(
    stack: Stack, trained: Job, tmp_path: Path
) -> None:
    target = f"{trained.record.name}@4"
    told = await run(stack, "serve", target, "--json", f"output_dir={tmp_path}")
    assert told.code == 0, told.err
    served = json.loads(told.out)
    assert (served["model"], served["state"]) == (target, "RUNNING")

    output = tmp_path / "results.jsonl"
    words = ["infer", served["name"], "-o", str(output), "--max-samples", "8"]
    words += ["--samples", "2", "--temperature", "1"]
    played = await run(stack, *words)
    assert played.code == 0, played.err
    assert served["job"] in played.out
    assert "mean_reward" in played.out
    assert "pass@2" in played.out
    assert len(output.read_text().splitlines()) == 16
    again = await run(stack, *words, "--json")
    assert again.code == 0, again.err
    summary = json.loads(again.out.splitlines()[-1])["summary"]
    assert (summary["tasks"], summary["episodes"], summary["failed_episodes"]) == (8, 16, 0)
    assert "result" not in again.out  # nothing was played again

    shown = await run(stack, "serve", target, "-d", f"output_dir={tmp_path / 'other'}")
    assert "submitted" in shown.out
    assert "tinkermq stop" in shown.out
    assert "tinkermq infer" in shown.out
    for row in json.loads((await run(stack, "ps", "--json")).out):
        assert (await run(stack, "stop", row["run"])).code == 0


@pytest.mark.long
async def test_a_live_run_is_followed_to_its_newest_version(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    live = await stack.submit(small_job(model, env=UNHURRIED, training={"num_steps": 500}))
    await live.until_step(1)
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        job = await client.submit_inference_job(
            live.record.name, config={"output_dir": str(tmp_path)}
        )
        assert job["model"] == live.record.name

        async def newest(least: int) -> int | None:
            report = await run_inference_async(
                job["vllm_server_url"], game_class=BanditGame, max_samples=4
            )
            models = {result.model for result in report.results}
            assert all(model.startswith(f"{live.record.name}@") for model in models)
            version = max(int(model.rpartition("@")[2]) for model in models)
            return version if version >= least else None

        first = await eventually(lambda: newest(1), "a version")
        assert await eventually(lambda: newest(first + 1), "a newer version") > first
        await client.cancel_job(job["job_id"])


@pytest.mark.long
async def test_two_versions_are_compared_from_a_machine_without_the_checkpoints(
    stack: Stack, trained: Job
) -> None:
    name, folder = trained.record.name, Path(trained.record.run_dir)
    words = ["eval", "--compare", f"{name}@2", f"{name}@4", "--tasks", "3,1,4,15,92"]
    told = await run(stack, *words, "--json", without=folder)
    assert told.code == 0, told.err
    result = json.loads(told.out)
    assert result["difference"]["num_tasks"] == 5
    assert result["a"]["summary"]["episodes"] == 5
    other = await run(stack, "eval", f"{name}@3", without=folder)
    assert (other.code, "has no checkpoint of step 3" in other.err) == (2, True)
    shown = await run(stack, "eval", name, "--tasks", "3,1", without=folder)
    assert shown.code == 0, shown.err
    assert f"evaluated {name}@4" in shown.err
    assert re.search(r"submitted \S+ +\(job \w{26}\)", shown.out)
    assert "tinkermq logs" in shown.out
    assert "95 % interval" in shown.out
    assert "--compare" in shown.out


@pytest.mark.parametrize(
    ("target", "error", "said"),
    [
        ("/no/such/model", ModelError, "there is no model folder '/no/such/model'"),
        ("no-such-run", NotFoundError, "no model folder and no run 'no-such-run'"),
        ("no-such-run@4", NotFoundError, "no model folder and no run 'no-such-run'"),
    ],
)
async def test_a_model_that_is_not_there_is_refused_at_once(
    stack: Stack, target: str, error: type[Exception], said: str
) -> None:
    async with AsyncInferenceSchedulerClient(stack.server.url) as client:
        with pytest.raises(error, match=said):
            await client.submit_inference_job(target)


async def test_a_checkpoint_that_is_not_there_is_refused_at_once(
    stack: Stack, trained: Job
) -> None:
    async with AsyncInferenceSchedulerClient(stack.server.url) as client:
        with pytest.raises(NotFoundError, match="has no checkpoint of step 3"):
            await client.submit_inference_job(f"{trained.record.name}@3")


@pytest.mark.long
async def test_a_tokenizer_of_another_model_fails_the_job_with_both_sizes(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(save_tiny_model(tmp_path / "tiny", width=64, layers=1), other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens([AddedToken("<extra>")])
    tokenizer.save_pretrained(other)
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        with pytest.raises(JobFailedError, match=r"does not match model .* 265 tokens.* knows 264"):
            await client.submit_inference_job(
                str(model), tokenizer_path=str(other), config={"output_dir": str(tmp_path)}
            )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 has no effect"),
        ({"num_gpus": 0}, "without a server"),
        ({"config": {"generator": {"max_contxt": 1}}}, "max_contxt"),
    ],
)
async def test_options_without_effect_are_refused(
    stack: Stack, model: Path, options: Mapping[str, Any], said: str
) -> None:
    async with AsyncInferenceSchedulerClient(stack.server.url) as client:
        with pytest.raises(ConfigError, match=said):
            await client.submit_inference_job(str(model), **options)


async def test_a_job_of_somebody_else_cannot_be_attached_to(stack: Stack) -> None:
    url = f"{stack.server.url}/bob/01hzy3"
    with pytest.raises(NotFoundError, match="belongs to user 'bob', and you are 'local'"):
        await run_inference_async(url, game_class=BanditGame, max_samples=1)


async def test_a_training_job_is_no_server(stack: Stack, trained: Job) -> None:
    with pytest.raises(ConfigError, match="of kind train: it serves no model"):
        await run_inference_async(
            job_id=trained.record.name, game_class=BanditGame, scheduler_url=stack.server.url
        )
