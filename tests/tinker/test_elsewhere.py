"""A checkpoint of a program written for Tinker is a model for serving, evaluation and training."""

import asyncio
import json
import subprocess
import warnings
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import pytest_asyncio
import torch
from peft import PeftModel
from tinkermq.actors.storage.tinker_checkpoints import TINKER_FOLDER, CheckpointFolders
from tinkermq.schemas.tinker.names import CheckpointName
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.clients.command import Outcome, command
from tests.support.configs import small_job
from tests.tinker.sdks import BASE, PROGRAMS, SdkProgram, lacking
from tests.tinker.service import TinkerService, tinker_service

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(lacking("newest")), reason=lacking("newest")),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TinkerService]:
    async with tinker_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(service: TinkerService) -> str:
    """The path of an adapter of five steps."""
    words = (str(PROGRAMS / "sixty_steps.py"), BASE, "5", "0")
    told = await SdkProgram.start("newest", service.gateway.url, service.folder, *words).done()
    return told.split("path ")[1].split()[0]


async def run(service: TinkerService, *words: str) -> Outcome:
    """Run one command, as a user does beside the pool."""
    full = command([*words, "--nats-url", service.stack.server.url])
    done = await asyncio.to_thread(
        subprocess.run, full, capture_output=True, check=False, timeout=300
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


def greedy(service: TinkerService, path: str, prompt: str) -> str:
    """Return what PEFT continues a prompt with."""
    folders = CheckpointFolders(service.job.run_dir / TINKER_FOLDER)
    folder = folders.find("local", CheckpointName.parse(path)).folder
    base = service.folder / BASE
    model = cast("Any", AutoModelForCausalLM).from_pretrained(base)
    with warnings.catch_warnings(action="ignore"):  # of a tied output layer, which is not merged
        adapted = PeftModel.from_pretrained(model, str(folder))
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(base)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        made = adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


async def test_it_is_served_as_peft_computes_it(service: TinkerService, path: str) -> None:
    told = await run(service, "serve", path, "--json", f"output_dir={service.folder}/served")
    assert told.code == 0, told.err
    served = json.loads(told.out)
    assert served["model"] == path
    answer = await service.gateway.post(
        "/v1/completions",
        {"model": path, "prompt": "hello wor", "max_tokens": 8, "temperature": 0},
        authorization="Bearer x",
    )
    assert answer.status == 200, answer.text
    assert answer.json["choices"][0]["text"] == greedy(service, path, "hello wor")
    await run(service, "stop", served["name"], "--now")


async def test_a_run_begins_with_it_and_it_is_evaluated_on_the_game_of_that_run(
    service: TinkerService, path: str
) -> None:
    config = small_job(service.folder / BASE, training={"num_steps": 2})
    config |= {"output_dir": str(service.folder / "runs"), "name": "on"}
    file = service.folder / "job.yaml"
    file.write_text(json.dumps(config))
    begun = await run(service, "train", str(file), "--from", path, "--json")
    assert begun.code == 0, begun.out + begun.err
    told = await run(service, "eval", path, "--like", "on", "--json")
    assert told.code == 0, told.out + told.err


async def test_what_is_not_there_is_said(service: TinkerService, path: str) -> None:
    missing = path.replace("/end", "/other")
    for words in (
        ("serve", missing),
        ("train", str(service.folder / "job.yaml"), "--from", missing),
    ):
        told = await run(service, *words)
        assert told.code != 0
        assert f"there is no checkpoint {missing}" in told.err
