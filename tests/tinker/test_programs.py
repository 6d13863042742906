"""Programs written with Tinker's SDK, as published: every call, recipes, and kills in a run.

`make test-tinker` installs the SDK and runs these.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, InternalServerError
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.tinker import TIED
from tests.support.waiting import PATIENCE_S, eventually, until
from tests.tinker.sdks import BASE, PROGRAMS, SdkProgram, lacking
from tests.tinker.service import TinkerService, adapter_digest, tinker_service

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.asyncio(loop_scope="module"),
]
newest = pytest.mark.skipif(bool(lacking("newest")), reason=lacking("newest"))
SIXTY = str(PROGRAMS / "sixty_steps.py")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TinkerService]:
    async with tinker_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def start(service: TinkerService, *words: str, sdk: str = "newest") -> SdkProgram:
    return SdkProgram.start(sdk, service.gateway.url, service.folder, *words)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("sdk", ["newest", "oldest"])
@pytest.mark.parametrize("program", ["every_call.py", "kept.py"])
async def test_every_call_that_the_page_names_works(
    service: TinkerService, sdk: str, program: str
) -> None:
    if why := lacking(sdk):
        pytest.skip(why)
    assert "all well" in await start(service, str(PROGRAMS / program), BASE, sdk=sdk).done()


@pytest.mark.parametrize("sdk", ["newest", "oldest"])
async def test_four_hundred_samples_at_once_leave_room_for_pages(
    service: TinkerService, sdk: str
) -> None:
    if why := lacking(sdk):
        pytest.skip(why)
    words = (str(PROGRAMS / "many_samples.py"), BASE, service.gateway.url)
    assert "all well" in await start(service, *words, sdk=sdk).done()
    assert "connections_refused" not in service.gateway.log.read_text()


@newest
async def test_samples_are_what_transformers_computes_and_move_on(service: TinkerService) -> None:
    assert "all well" in await start(service, str(PROGRAMS / "sampling.py"), BASE).done()


@newest
async def test_a_path_is_a_model_for_openais_client(service: TinkerService) -> None:
    program = str(PROGRAMS / "saved_for_chat.py")
    told = json.loads((await start(service, program, BASE).done()).splitlines()[-1])
    url, key = f"{service.gateway.url}/v1", "any"
    async with AsyncOpenAI(base_url=url, api_key=key, timeout=PATIENCE_S) as client:
        asked: Any = {"model": told["path"], "max_tokens": 12, "temperature": 0}
        asked["messages"] = [{"role": "user", "content": "hi"}]
        chat = await client.chat.completions.create(**asked)
        assert (chat.model, chat.choices[0].message.content) == (told["path"], told["said"])
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == told["prompt_tokens"]
        stream = await client.chat.completions.create(**asked, stream=True)
        said = [one.choices[0].delta.content or "" async for one in stream if one.choices]
        assert "".join(said) == told["said"]
        await service.job.kill("sampler-0")  # it starts again: the client tries once more
        assert await eventually(lambda: same_again(client, asked, told["said"]), "an answer")


async def same_again(client: AsyncOpenAI, asked: Any, said: str) -> bool:
    try:
        chat = await client.chat.completions.create(**asked)
    except InternalServerError:
        return False
    return chat.choices[0].message.content == said


@newest
@pytest.mark.filterwarnings(TIED)
async def test_the_cookbook_downloads_what_peft_opens(service: TinkerService) -> None:
    told = await start(service, str(PROGRAMS / "download.py"), BASE).done()
    assert "all well" in told
    model = AutoModelForCausalLM.from_pretrained(service.folder / BASE)
    for folder in ("downloaded-0", "downloaded-1"):
        opened = PeftModel.from_pretrained(model, service.folder / folder)
        assert opened.peft_config["default"].to_dict()["r"] == 4
        model = opened.unload()


@newest
async def test_killing_the_trainer_in_a_run_changes_no_bit_of_its_adapter(
    service: TinkerService,
) -> None:
    undisturbed = await start(service, SIXTY, BASE, "60", "0").done()
    program = start(service, SIXTY, BASE, "60", "0.05")
    for step in (5, 25, 45):
        await until(
            lambda step=step: (
                f"step {step}\n" in program.told or program.process.poll() is not None
            ),
            f"step {step}",
        )
        await service.job.kill("trainer")
    told = await program.done()
    assert "Traceback" not in told
    assert adapter_digest(service, told) == adapter_digest(service, undisturbed)
    assert await service.job.events("replay_differs") == []


@newest
async def test_the_recipe_of_arithmetic_runs_as_it_is(service: TinkerService) -> None:
    log = service.folder / "arithmetic"
    words = (
        "-m tinker_cookbook.recipes.math_rl.train env=arithmetic renderer_name=role_colon "
        "loss_fn=importance_sampling group_size=4 groups_per_batch=4 max_steps=3 max_tokens=8 "
        "lora_rank=4 learning_rate=1e-3 eval_every=0 save_every=2"
    )
    await start(service, *words.split(), f"model_name={BASE}", f"log_path={log}").done()
    assert [one["step"] for one in metrics(log) if "env/all/reward/total" in one] == [0, 1, 2]


@newest
async def test_the_recipe_of_chats_learns_local_conversations(service: TinkerService) -> None:
    log, chats = service.folder / "chats", service.folder / "chats.jsonl"
    chat = [{"role": "user", "content": "hey"}, {"role": "assistant", "content": "a" * 20}]
    chats.write_text((json.dumps({"messages": chat}) + "\n") * 64)
    words = (
        "-m tinker_cookbook.recipes.chat_sl.train renderer_name=role_colon batch_size=4 "
        "max_length=128 max_steps=12 learning_rate=1e-2 lora_rank=4"
    )
    await start(
        service, *words.split(), f"model_name={BASE}", f"dataset={chats}", f"log_path={log}"
    ).done()
    losses = [one["train_mean_nll"] for one in metrics(log) if "train_mean_nll" in one]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 2, losses


@newest
@pytest.mark.parametrize(
    "recipe",
    [
        "multiplayer_rl.guess_number.train group_size=4 batch_size=2 max_tokens=8 eval_every=0",
        "multiplayer_rl.text_arena.train batch_size=4 num_train_datapoints=8 num_test_datapoints=4 "
        "max_tokens=16 eval_every=1",
        "preference.shorter.train group_size=4 batch_size=2 max_tokens=8 eval_every=0",
        "preference.dpo.train dataset=hhh batch_size=4 max_length=128",
    ],
    ids=lambda recipe: recipe.split(".train")[0],
)
async def test_further_recipes_run_as_they_are(service: TinkerService, recipe: str) -> None:
    data = service.folder / "Anthropic" / "hh-rlhf"  # where the hub's name leads without the hub
    data.mkdir(parents=True, exist_ok=True)
    pairs = [{one: f"\n\nHuman: hey\n\nAssistant: {one}" for one in ("chosen", "rejected")}] * 16
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(pairs), data / f"{split}-00000-of-00001.parquet")
    log = service.folder / recipe.split(".train")[0]
    words = f"-m tinker_cookbook.recipes.{recipe} renderer_name=role_colon max_steps=2"
    await start(service, *words.split(), f"model_name={BASE}", f"log_path={log}").done()
    assert {one["step"] for one in metrics(log) if "step" in one} >= {0, 1}
