"""Evaluators and loops of others against served models, with their own default settings.

The model, its server and the gateway are those of a pool; the evaluators are the published ones.
"""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.clients import AsyncInferenceSchedulerClient

from tests.agents.published import AGENTS, PROGRAMS
from tests.support.gateway import Gateway, run_gateway
from tests.support.models import HERMES
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.agents, pytest.mark.asyncio(loop_scope="session")]
PROMPTFOO, MESSAGES = "promptfoo", "anthropic:messages"
EVALS = Path(__file__).parent / "evals"
RUN_S = 300.0
"""They import large frameworks, from a cold disk at first."""
SHOWN_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
KEYS = {"OPENAI_API_KEY": "none", "LOCAL_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}


@pytest_asyncio.fixture(loop_scope="session")
async def served(stack: Stack, model: Path, tmp_path: Path) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway, and the name of a model that it serves, whose template shows tools."""
    folder = shutil.copytree(model, tmp_path / "served")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = SHOWN_TOOLS + HERMES
    tokenizer.save_pretrained(folder)
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        job = await client.submit_inference_job(
            str(folder), max_model_len=1024, config={"output_dir": str(tmp_path)}
        )
        async with run_gateway(stack.server.url, tmp_path) as gateway:
            yield gateway, job["name"]
        await client.complete_job(job["job_id"])


async def run(name: str, *words: str, folder: Path, **variables: str) -> str:
    """Run a program of an evaluator's environment in a folder; return what it printed."""
    if not (AGENTS / f"{name}.stamp").exists():
        pytest.skip(f"{name} is not installed: make agents AGENTS={name}")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "HOME": str(folder)}
    programs = AGENTS / name / ("node_modules/.bin" if name == PROMPTFOO else "bin")
    process = await asyncio.create_subprocess_exec(
        str(programs / words[0]),
        *words[1:],
        cwd=folder,
        env={**os.environ, **offline, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(RUN_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def lm_eval(kind: str, tasks: str, folder: Path, **arguments: Any) -> Mapping[str, Any]:
    """Run lm-eval; return the samples of each task."""
    for file in EVALS.iterdir():
        text = file.read_text().replace("rows.jsonl", str(EVALS / "rows.jsonl"))
        (folder / file.name).write_text(text)
    out = folder / kind
    words = ["--tasks", tasks, "--include_path", str(folder), "--log_samples"]
    words += ["--output_path", str(out), "--model", kind, "--model_args"]
    words.append(",".join(f"{name}={value}" for name, value in arguments.items()))
    await run("lm-eval", "lm_eval", *words, folder=folder, **KEYS)
    return {
        path.name.split("_")[1]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in out.rglob("samples_*.jsonl")
    }


async def test_lm_eval_gets_the_log_likelihoods_that_it_computes_itself(
    served: tuple[Gateway, str], model: Path, tmp_path: Path
) -> None:
    gateway, name = served
    url, tokens = f"{gateway.url}/v1/completions", {"tokenizer": str(model), "max_length": 512}
    through = await lm_eval(
        "local-completions", "choice,written", tmp_path, model=name, base_url=url, **tokens
    )
    own = await lm_eval("hf", "choice,written", tmp_path, pretrained=str(model), dtype="float32")
    assert len(through["choice"]) == len(own["choice"]) == 3
    for ours, its in zip(through["choice"], own["choice"], strict=True):
        for got, expected in zip(ours["filtered_resps"], its["filtered_resps"], strict=True):
            assert float(got[0]) == pytest.approx(float(expected[0]), abs=1e-3)
            assert got[1] == expected[1]
    written = [[row["filtered_resps"] for row in rows["written"]] for rows in (through, own)]
    assert written[0] == written[1]


@pytest.mark.parametrize("options", [(), ('["seed", 3]', '["logit_bias", {"65": 1}]')])
async def test_inspect_runs_over_chat_completions(
    served: tuple[Gateway, str], tmp_path: Path, options: tuple[str, ...]
) -> None:
    gateway, name = served
    told = await inspect(f"openai-api/local/{name}", f"{gateway.url}/v1", tmp_path, *options)
    assert told == {"plain": "success", "tools": "success", "chosen": "success"}


async def test_inspect_runs_over_responses(served: tuple[Gateway, str], tmp_path: Path) -> None:
    gateway, name = served
    told = await inspect(f"openai/{name}", f"{gateway.url}/v1", tmp_path)
    assert set(told.values()) == {"success"}


async def test_inspect_runs_over_messages(served: tuple[Gateway, str], tmp_path: Path) -> None:
    """Its default `max_tokens` is larger than the model's context."""
    gateway, name = served
    told = await inspect(f"anthropic/{name}", gateway.url, tmp_path)
    assert set(told.values()) == {"success"}


async def inspect(model: str, url: str, folder: Path, *options: str) -> Mapping[str, str]:
    """Run inspect-ai; return the state of each task."""
    words = (str(PROGRAMS / "with_inspect.py"), model, url, *options)
    output = await run("inspect-ai", "python", *words, folder=folder, **KEYS)
    logs = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {log["task"]: log["status"] for log in logs}


async def test_simple_loops_run(served: tuple[Gateway, str], tmp_path: Path) -> None:
    gateway, name = served
    program = str(PROGRAMS / "with_loops.py")
    await run("inspect-ai", "python", program, name, gateway.url, folder=tmp_path, **KEYS)


@pytest.mark.parametrize("api", ["openai:chat", "openai:completion", "openai:responses", MESSAGES])
async def test_promptfoo_runs(served: tuple[Gateway, str], tmp_path: Path, api: str) -> None:
    """It sends its own defaults: max_tokens, temperature, top_p and penalties, or none."""
    gateway, name = served
    url = gateway.url if api == MESSAGES else f"{gateway.url}/v1"
    config = {
        "prompts": ["Say {{word}}.", "Repeat: {{word}}"],
        "providers": [{"id": f"{api}:{name}", "config": {"apiBaseUrl": url}}],
        "tests": [
            {"vars": {"word": word}, "assert": [{"type": "latency", "threshold": 60_000}]}
            for word in ("yes", "no")
        ],
    }
    (tmp_path / "promptfooconfig.json").write_text(json.dumps(config))
    alone = {"PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1"}
    words = ("eval", "--config", "promptfooconfig.json", "--output", "told.json", "--no-cache")
    await run(PROMPTFOO, PROMPTFOO, *words, folder=tmp_path, **KEYS, **alone)
    told = json.loads((tmp_path / "told.json").read_text())["results"]
    assert told["stats"]["successes"] == 4, told["results"]
