"""Inference jobs in the whole stack, and the command line's `serve`, `infer` and `eval`."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI, BadRequestError
from tinkermq.actors.policy.chat import ChatTokenizer, make_chat
from tinkermq.actors.policy.model_folder import load_causal_lm, load_tokenizer
from tinkermq.actors.policy.tiny_models import CHAT_TEMPLATE, save_tiny_model
from tinkermq.actors.rollout.agent_loop import AgentLoop, EpisodePlan, EpisodeSampling
from tinkermq.actors.rollout.players import start_engine
from tinkermq.broker.client.parts import ask_parts
from tinkermq.broker.jobs import JobStore
from tinkermq.clients import AsyncInferenceSchedulerClient, run_inference_async
from tinkermq.clients.base import parse_server_url
from tinkermq.clients.inference.play import EpisodeResult
from tinkermq.envs.games.bandit import BanditGame
from tinkermq.envs.games.calculator import CalculatorGame, make_data
from tinkermq.envs.games.guess import GuessGame
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.host_client import Environments, Start
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.generation import Decoding
from tinkermq.schemas.infer import ChatRequest, InferPart
from tinkermq.schemas.model_apis.canonical import ModelMessage
from tinkermq.schemas.wire.errors import (
    ConfigError,
    JobFailedError,
    ModelError,
    NotFoundError,
)
from tinkermq.schemas.wire.subjects import JobScope
from tokenizers import AddedToken
from transformers import AutoTokenizer

from tests.actors.gateway.http import openai_client
from tests.clients.command import Outcome, command, tinkermq_here
from tests.support.configs import UNHURRIED, small_job
from tests.support.games import RaisesInStep, SlowBandit
from tests.support.jobs import Job
from tests.support.models import FORGETS_REASONING, plain_logprobs
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


SHORT = {"max_turns": 3, "max_turn_tokens": 8, "max_response_tokens": 64}
"""Rollouts of a random model, which does not end its turns by itself."""

HELLO = [{"role": "user", "content": "hello"}]


async def ask(
    stack: Stack, scope: JobScope, name: str, *, num_words: int = 1, **fields: Any
) -> list[InferPart]:
    """Chat with a job; return all parts of the answer."""
    request = ChatRequest(
        request=name,
        messages=[ModelMessage(role="user", content=("hello" * num_words,))],
        **fields,
    )
    parts = ask_parts(
        stack.broker, scope.infer("chat"), request, InferPart, waiting_for="the server"
    )
    async with aclosing(parts):
        return [part async for part in parts]


async def test_a_model_folder_is_served_by_several_servers(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        job = await client.submit_inference_job(
            str(model), num_gpus=2, max_model_len=256, config={"output_dir": str(tmp_path)}
        )
        assert job["status"] == "RUNNING"
        scope = parse_server_url(job["vllm_server_url"]).scope
        decoding = Decoding(max_tokens=12, seed=5)
        (whole,) = await ask(stack, scope, "whole", decoding=decoding)
        assert whole.model == job["name"]
        streamed = await ask(stack, scope, "bits", decoding=decoding, stream=True)
        tokens = [one for part in streamed for delta in part.deltas for one in delta.token_ids]
        assert tokens == whole.deltas[0].token_ids
        text = "".join(delta.text for part in streamed for delta in part.deltas)
        assert text == whole.deltas[0].text
        head, *_ = await ask(stack, scope, "long", decoding=Decoding(max_tokens=400))
        assert head.bounded_tokens == 256 - whole.prompt_tokens
        with pytest.raises(ConfigError, match="context of this model holds 256"):
            await ask(stack, scope, "full", decoding=Decoding(max_tokens=1), num_words=300)
        ended = await client.complete_job(job["job_id"])
        assert ended["job_id"] == job["job_id"]


async def test_the_gateway_serves_a_real_model_to_the_official_client(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        job = await client.submit_inference_job(
            str(model), num_gpus=2, max_model_len=256, config={"output_dir": str(tmp_path)}
        )
        chat = ChatTokenizer(load_tokenizer(str(model)))
        async with openai_client(stack.broker) as openai:
            asked: Any = {"model": job["name"], "messages": HELLO, "max_tokens": 16, "seed": 1}
            whole = await openai.chat.completions.create(**asked, logprobs=True, n=2)
            assert whole.usage is not None
            assert whole.usage.prompt_tokens == len(chat.first_prompt(HELLO))
            first, second = whole.choices
            assert first.message.content != second.message.content
            logprobs = [one.logprob for one in first.logprobs.content or []]
            assert len(logprobs) <= 16
            assert all(logprob < 0 for logprob in logprobs)
            stream = await openai.chat.completions.create(**asked, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(pieces) == first.message.content
            assert len(pieces) > 3
            stop = (first.message.content or "")[3]
            cut = await openai.chat.completions.create(**asked, stop=stop)
            assert cut.choices[0].message.content == first.message.content.partition(stop)[0]
            assert cut.choices[0].finish_reason == "stop"
            text = await openai.completions.create(model=job["job_id"], prompt="2+2=", max_tokens=3)
            assert text.usage is not None
            assert text.usage.prompt_tokens == 4
            await _assert_prompts_are_scored(openai, job["name"], model, chat)


async def _assert_prompts_are_scored(
    openai: AsyncOpenAI, name: str, folder: Path, chat: ChatTokenizer
) -> None:
    """`prompt_logprobs` are told where vLLM tells them, those of a plain forward pass."""
    prompts = [chat.encode("what is 2+2?"), chat.encode("7")]
    more: Any = {"extra_body": {"prompt_logprobs": 3}}
    scored = await openai.completions.create(model=name, prompt=prompts, max_tokens=0, **more)
    assert [(one.text, one.finish_reason) for one in scored.choices] == [("", "length")] * 2
    plain = load_causal_lm(str(folder), dtype=torch.float32)
    for prompt, choice in zip(prompts, scored.choices, strict=True):
        first, *rows = choice.prompt_logprobs  # type: ignore[attr-defined]
        assert first is None
        own = [row[str(token)]["logprob"] for row, token in zip(rows, prompt[1:], strict=True)]
        wanted = plain_logprobs(plain, np.array(prompt[:1]), np.array(prompt[1:]))
        np.testing.assert_allclose(own, wanted, atol=1e-4)
        for row in rows:
            ranked = sorted((one for one in row.values() if one["rank"]), key=lambda o: o["rank"])
            assert [one["rank"] for one in ranked] == [1, 2, 3]
            assert ranked[0]["logprob"] >= ranked[1]["logprob"] >= ranked[2]["logprob"]
    drawn = await openai.completions.create(model=name, prompt="2+2=", max_tokens=3, **more)
    assert drawn.usage is not None
    assert 1 <= drawn.usage.completion_tokens <= 3  # it may draw the end
    refused: tuple[dict[str, Any], ...] = (
        {"max_tokens": 0},
        {"max_tokens": 1, "stream": True, **more},
    )
    for wrong in refused:
        with pytest.raises(BadRequestError):
            await openai.completions.create(model=name, prompt="2+2=", **wrong)


async def test_episodes_have_the_tokens_of_training_and_files_go_on_where_they_ended(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    _, val = make_data(tmp_path / "data", num_train=8, num_val=12)
    config = small_job(
        model,
        env={"game": "calculator", "train_data": [str(val)], "val_data": [str(val)], "num_val": 0},
        rollout={"max_turns": 2, "temperature": 1.0},
        training={"num_steps": 3},
    )
    trained = await stack.submit(config)
    await trained.until("COMPLETED")
    groups = [entry.group for entry in await trained.entries() if entry.group is not None]
    prompts = {
        group.task.sample: one.token_ids[: int(np.flatnonzero(one.mask)[0])].tolist()
        for group in groups
        for one in group.trajectories
    }
    output = tmp_path / "results.jsonl"
    settings: dict[str, Any] = {
        "model_path": f"{trained.record.name}@3",
        "data_path": val,
        "game_class": CalculatorGame,
        "output_path": output,
        "temperature": 1.0,
        "samples_per_task": 4,
        "token_ids": True,
        "scheduler_url": stack.server.url,
    }
    report = await run_inference_async(**settings, max_samples=6)
    assert len(report.results) == 24
    assert {result.model for result in report.results} == {f"{trained.record.name}@3"}
    compared = 0
    for result in report.results:
        assert result.token_ids is not None
        assert result.mask is not None
        if result.task in prompts:
            assert result.token_ids[: result.mask.index(1)] == prompts[result.task]
            compared += 1
    assert compared
    assert {"mean_reward", "accuracy", "pass@1", "pass@4"} <= report.summary.keys()

    lines = output.read_text().splitlines()
    output.write_text("\n".join(lines[:10]) + "\n" + lines[10][:40])
    again: list[EpisodeResult] = []
    report = await run_inference_async(**settings, max_samples=6, on_result=again.append)
    assert len(again) == 14
    assert [json.loads(line) for line in output.read_text().splitlines()[:10]] == [
        json.loads(line) for line in lines[:10]
    ]
    assert len(report.results) == 24
    with pytest.raises(ConfigError, match="other settings"):
        await run_inference_async(**{**settings, "temperature": 0.5})


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, FORGETS_REASONING], ids=["appends", "forgets"])
async def test_served_episodes_are_those_of_the_generators_own_loop(
    stack: Stack, tmp_path: Path, template: str
) -> None:
    model = save_tiny_model(tmp_path / "model", template=template)
    settings: dict[str, Any] = {"rollout": SHORT}
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        job = await client.submit_inference_job(
            str(model), config={"output_dir": str(tmp_path), **settings}
        )
        seeds = [3, 1, 4]
        report = await run_inference_async(
            job["vllm_server_url"], game_class=GuessGame, tasks=seeds, token_ids=True
        )
        ended = await client.cancel_job(job["job_id"])
        assert ended["status"] == "CANCELLED"
    served = {one.task: (one.token_ids, one.mask, one.messages) for one in report.results}
    config = parse_config(small_job(model, env={"game": "guess"}, **settings))
    engine = await start_engine(config)
    scope = JobScope("local", "beside")
    stopping = asyncio.Event()
    host = EnvironmentHost(stack.broker, scope, config.env)
    hosting = asyncio.create_task(host.run(stopping))
    await host.ready.wait()
    hosts = Environments(stack.broker, scope, config.env, lambda _: nullcontext())
    loop = AgentLoop(engine, make_chat(config), hosts, config.rollout, EpisodeSampling(0.0))
    for seed in seeds:
        plan = EpisodePlan(f"e{seed}", Start("train", None, seed), greedy=True)
        own = await loop.run(plan)
        assert served[seed] == (own.token_ids.tolist(), own.mask.tolist(), own.messages)
        assert len(own.turn_ends) > 1
        shown = make_chat(config).decode_all(own.token_ids)
        num_opened = len(own.turn_ends) if template == FORGETS_REASONING else 0
        assert shown.count("<|assistant|><think>") == num_opened
    stopping.set()
    await hosting
    await engine.close()


async def test_a_server_that_is_killed_costs_no_episode(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    config = {"output_dir": str(tmp_path), "generator": {"max_episodes": 6}, "rollout": SHORT}
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        described = await client.submit_inference_job(str(model), num_gpus=2, config=config)
        job = Job(stack, await JobStore(stack.broker).get("local", described["job_id"]))
        pid = await job.pid("server-1")
        num_played = 0

        def kill_at_the_fifth(_: EpisodeResult) -> None:
            nonlocal num_played
            num_played += 1
            if num_played == 5:
                os.kill(pid, signal.SIGKILL)

        report = await run_inference_async(
            described["vllm_server_url"],
            game_class=SlowBandit,
            game_kwargs={"delay_s": 0.3},
            max_samples=40,
            max_concurrent=24,
            on_result=kill_at_the_fifth,
        )
        assert [result.task for result in report.results] == list(range(40))
        assert not report.failed
        assert (await job.read()).state == "RUNNING"
        await client.cancel_job(described["job_id"])


async def test_a_game_that_fails_is_recorded_and_played_again_next_time(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "results.jsonl"
    config = {"output_dir": str(tmp_path), "rollout": SHORT}
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        job = await client.submit_inference_job(str(model), config=config)
        for tries in (1, 2):
            report = await run_inference_async(
                job["vllm_server_url"],
                game_class=RaisesInStep,
                output_path=output,
                max_samples=2,
            )
            assert "ValueError: no rule for" in (report.failed[0].error or "")
            assert report.summary["failed_episodes"] == 2
            assert len(output.read_text().splitlines()) == 2 * tries
        await client.cancel_job(job["job_id"])


# -- The command line's `serve`, `infer` and `eval`, live runs, and what goes wrong with them ------


async def run(stack: Stack, *words: str, without: Path | None = None) -> Outcome:
    """Run one command against the stack, maybe as on a machine without one of its folders."""
    words = (*words, "--nats-url", stack.server.url)
    if without is None:
        return await asyncio.to_thread(tinkermq_here, *words)
    empty = 'mount -t tmpfs none "$0" && exec "$@"'
    full = ["unshare", "--map-root-user", "--mount", "sh", "-c", empty, str(without)]
    full += command(words)
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
    with pytest.raises(ConfigError, match="of kind train, which serves no model"):
        await run_inference_async(
            job_id=trained.record.name, game_class=BanditGame, scheduler_url=stack.server.url
        )
