"""A job whose actors run vLLM, through the whole stack; all of it in vLLM's environment."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_causal_lm, load_tokenizer
from tinkermq.actors.rollout.teachers import EndpointTeacher, TeacherAway
from tinkermq.clients import AsyncInferenceSchedulerClient, run_inference_async
from tinkermq.envs.games.guess import GuessGame
from tinkermq.schemas.local.process import die_with
from tinkermq.schemas.wire.errors import ConfigError

from tests.support.configs import example, small_job
from tests.support.gateway import free_port
from tests.support.jobs import Job
from tests.support.killed_generator import job_of_long_calls, open_streams_go_on
from tests.support.models import make_tiny_model, plain_logprobs
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack
from tests.support.stack_fixtures import warm_model
from tests.support.waiting import PATIENCE_S, eventually
from tests.system.test_resume import assert_repeats

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
]
STEPS = 60
RATIO = "staleness/abs_log_ratio/lag_0"


async def test_a_job_learns_from_what_vllm_generates_validates_and_is_served(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (
        f"model.path={warm_model('guess')}",
        "env={game: guess, num_val: 32}",
        "generator={engine: vllm, compile: false, kv_cache_mb: 64, kv_on_swap: recompute}",
        f"training.num_steps={STEPS}",
        f"training.test_freq={STEPS}",
    )
    job = await stack.submit(example("guess", *overrides))
    await job.until("COMPLETED", deadline_s=400)
    metrics = [metric.values for metric in await job.metrics()]
    rewards = [values["training_step_reward"] for values in metrics]
    assert len(rewards) == STEPS
    before, after = mean(rewards[:5]), mean(rewards[-5:])
    fresh = [values for values in metrics if "staleness/abs_log_ratio/lag_0" in values]
    assert fresh
    mismatch = max(values["staleness/abs_log_ratio/lag_0"] for values in fresh)
    with capsys.disabled():
        print(
            f"\nreward {before:.2f} to {after:.2f}; log-probs of engine and learner differ by "
            f"{mismatch:.1e} in the mean of a step at most"
        )
    assert mismatch < 1e-3
    assert after > before + 0.1
    await assert_every_task_once(job)
    assert STEPS in await job.validations()
    await _serve(stack, job)


async def test_the_weights_of_a_job_go_from_its_learner_into_vllms_workers_whoever_is_killed(
    stack: Stack,
) -> None:
    overrides = (
        f"model.path={warm_model('guess')}",
        "env={game: guess, num_val: 8}",
        # an answer that goes on over a swap would keep what older weights made of its beginning
        "generator={engine: vllm, compile: false, kv_cache_mb: 64, ack_wait_s: 3, "
        "kv_on_swap: recompute}",
        "weights={transport: nccl}",
        "training.num_steps=16",
        "training.save_freq=4",
    )
    job = await stack.submit(example("guess", *overrides))
    await job.until_step(4)
    await job.kill("generator-0")
    await job.until_step(9)
    await job.kill("learner")
    await job.until("COMPLETED", deadline_s=400)
    metrics = [metric.values for metric in await job.metrics()]
    mismatch = [values.get("staleness/abs_log_ratio/lag_0", 0.0) for values in metrics]
    assert 0 < max(mismatch) < 1e-3
    await assert_every_task_once(job)


async def test_a_job_trains_with_the_experts_that_vllm_chose(stack: Stack, tmp_path: Path) -> None:
    """Each token tells its experts, and log-probs agree."""
    model = make_tiny_model(tmp_path, "qwen3_moe", heads=2)
    config = small_job(
        model,
        algorithm={"router_replay": True},
        generator={"engine": "vllm", "compile": False, "kv_cache_mb": 64},
        training={"num_steps": 4, "max_staleness": 1},
    )
    job = await stack.submit(config)
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    for entry in await job.entries():
        assert entry.group is not None
        for item in entry.group.sampled:
            assert item.experts is not None
            assert item.experts.shape == (len(item.token_ids) - 1, 2, 2)
            assert (np.diff(np.sort(item.experts)) > 0).all()
    ratios = [one.values[RATIO] for one in await job.metrics() if RATIO in one.values]
    assert ratios
    assert max(ratios) < 1e-3, ratios


async def test_the_rollouts_of_a_seed_repeat(stack: Stack, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", heads=2)
    generator = {"engine": "vllm", "compile": False, "kv_cache_mb": 64, "kv_on_swap": "recompute"}
    training = {"max_staleness": 0, "num_steps": 12}
    config = small_job(model, training=training, learner={"lr": 1e-2}, generator=generator)
    await assert_repeats(stack, config)


async def test_vllm_and_the_learner_take_turns_on_one_slot(stack: Stack, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", heads=2)
    generator = {"engine": "vllm", "compile": False, "kv_cache_mb": 64, "sleep": "always"}
    config = small_job(model, generator=generator, training={"num_steps": 8})
    job = await stack.submit({**config, "placement": "colocated"})
    await job.until("COMPLETED", deadline_s=300)
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    assert job.record.is_colocated
    for metric in await job.metrics():
        assert metric.values["staleness/lag_max"] <= 2


async def test_open_streams_of_programs_go_on_when_vllm_is_killed(
    stack: Stack, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", heads=2)
    generator = {"engine": "vllm", "compile": False, "kv_cache_mb": 64, "kv_on_swap": "recompute"}
    await open_streams_go_on(stack, job_of_long_calls(model, generator=generator), 240)


async def _serve(stack: Stack, job: Job) -> None:
    """Play games with what vLLM serves of a run."""
    checkpoint = f"{job.record.name}@{STEPS}"
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        served = await client.submit_inference_job(checkpoint)
        report = await run_inference_async(
            served["vllm_server_url"], game_class=GuessGame, max_samples=32, temperature=1.0
        )
        assert {result.model for result in report.results} == {checkpoint}
        assert report.summary["failed_episodes"] == 0
        assert report.summary["mean_reward"] > 0.5
        await client.cancel_job(served["job_id"])


async def test_vllms_own_server_teaches(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "teacher", heads=2)
    chat = ChatTokenizer(load_tokenizer(str(folder)))
    async with _api_server(folder, tmp_path / "server.log") as url:
        teacher = EndpointTeacher(f"{url}/v1", "teacher", chat)
        ids = np.array(chat.encode("what is 12*34? It is 408."), np.int32)
        told = await teacher.score(ids, 4)
        with pytest.raises(ConfigError, match=r"answered 400: .*maximum context length"):
            await teacher.score(np.full(300, 9, np.int32), 4)
        nobody = EndpointTeacher(f"{url}/v1", "nobody", chat)
        with pytest.raises(TeacherAway, match="answered 404"):
            await nobody.score(ids, 4)
        await teacher.close()
        await nobody.close()
    model = load_causal_lm(str(folder), dtype=torch.float32)
    np.testing.assert_allclose(
        told.logprobs[1:], plain_logprobs(model, ids[:1], ids[1:]), atol=1e-4
    )
    with torch.no_grad():
        whole = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
    np.testing.assert_allclose(told.top_logprobs[1:], whole.topk(4).values[:-1].numpy(), atol=1e-4)
    assert (told.top_ids[1:, 0] == whole.argmax(-1)[:-1].numpy()).all()


@contextlib.asynccontextmanager
async def _api_server(folder: Path, log: Path) -> AsyncIterator[str]:
    """Run vLLM's own OpenAI server for a model, named teacher, until the block ends."""
    process, port = _start_server(folder, log)
    try:
        await eventually(lambda: _answers(port, process), f"vLLM's server ({log})", 400)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, PATIENCE_S)


def _start_server(folder: Path, log: Path) -> tuple["subprocess.Popen[bytes]", int]:
    port = free_port()
    words = ("--served-model-name", "teacher", "--max-model-len", "128", "--max-logprobs", "32")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += [*words, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--dtype", "float32"],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=output,
            preexec_fn=die_with(os.getpid()),
        )
    return process, port


async def _answers(port: int, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "vLLM's server has ended"
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
