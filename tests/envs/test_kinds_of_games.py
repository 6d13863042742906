"""One example of each kind of environment: the checks, the dry run and a run say the same of it.

A sound example passes `env check` (or `agent check`) and `train --dry-run`, and trains. One with a
mistake fails both with the same check; submitted without them, it is refused or fails with that
check's error.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from tinkermq.actors import make_tiny
from tinkermq.actors.model_checks import model_checks
from tinkermq.actors.policy.chat import open_chat
from tinkermq.actors.policy.tiny_models import save_tiny_model, save_tiny_vision_model
from tinkermq.envs.check import check_game, conversations
from tinkermq.envs.data import HostData
from tinkermq.envs.games import geo3k
from tinkermq.envs.registry import load_game
from tinkermq.envs.running.local import LocalGame
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.checks import run_checks
from tinkermq.schemas.config.job import EnvConfig, JobConfig
from tinkermq.schemas.wire.errors import ModelError, TinkermqError

from tests.clients.command import tinkermq_here
from tests.support.configs import small_job
from tests.support.harbor_tasks import TASKS, write_tasks
from tests.support.stack import Stack

HERE = "tests.envs"
ADAPTERS = Path(__file__).parent / "adapters"
SHOP = {"name": "shop", "command": "{python}", "args": [str(ADAPTERS / "mcp_servers.py"), "shop"]}
ASK = """
import http.client, json, os
from urllib.parse import urlsplit
url = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.netloc, timeout=600)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}]})
connection.request("POST", url.path + "/chat/completions", body, headers)
assert connection.getresponse().status == 200
"""
PYTHON = ["{python}", "-S", "-c"]
REWARD = "open(os.environ['TINKERMQ_REWARD'], 'w').write('1.0')"


@dataclass(frozen=True)
class Kind:
    """An example of a kind of environment, and a mistake in it."""

    job: Mapping[str, Any]
    """Sections; `{url}` is the server's, `{folder}` holds data."""
    mistake: Mapping[str, Any]
    """Laid over the sections."""
    fails: str
    """The check that finds the mistake."""
    model: str = "tools"
    serves: Callable[[], Any] | None = None
    """Runs a server and yields its URL."""
    mark: str = "long"


def game(name: str, fails: str, mistake: Mapping[str, Any], **env: Any) -> Kind:
    """A game whose kwargs, unless the mistake names a section, are mistaken."""
    own = dict(mistake)
    told = own if own.keys() & {"env", "model"} else {"env": {"kwargs": own}}
    return Kind({"env": {"game": name, **env}}, told, fails)


def program(code: str, fails: str, mistake: str, **agent: Any) -> Kind:
    """An agent program."""
    own, wrong = ({"agent": {"command": [*PYTHON, text], **agent}} for text in (code, mistake))
    return Kind(own, wrong, fails)


@contextmanager
def mcp_server() -> Iterator[str]:
    """Run a server of MCP's package over HTTP."""
    from tests.envs.adapters.test_mcp import served

    with served("shop") as url:
        yield url


@contextmanager
def openenv_server() -> Iterator[str]:
    """Run a server that speaks OpenEnv's wire."""
    from tests.envs.adapters.openenv_server import Behaviour, serving

    with serving(Behaviour()) as (url,):
        yield url


PLAIN = {"model": {"path": "{plain}"}}
MADE, TYPES, PROMPTS = "the game can be made", "types are right", "first prompts fit"
REWARDS = "the reward function answers"
DATA = {"train_data": ["{folder}/rows.jsonl"]}
NO_PROMPT = {"env": {"train_data": ["{folder}/no_prompts.jsonl"]}}
OWN_REWARD = {"source": "function", "function": f"{HERE}.reward_functions:says_all"}
RAISES = {"env": {"reward": {"function": f"{HERE}.reward_functions:raises"}}}
OVER_HTTP = {"servers": [{"name": "shop", "url": "{url}"}], "allowed_hosts": ["127.0.0.1"]}
ELSEWHERE = {"servers": [{"name": "shop", "url": "http://127.0.0.1:1/mcp"}]}
TRL = f"trl:{HERE}.adapters.trl_classes"
TRL_REWARDS = [f"{HERE}.adapters.trl_classes:counted"]
KINDS = {
    "many turns": game("guess", MADE, {"highest": 0}),
    "one turn of data": game("addition", TYPES, NO_PROMPT, **DATA),
    "rewards of a function": game("math", REWARDS, RAISES, **DATA, reward=OWN_REWARD),
    "players": game("negotiation", MADE, {"max_offers": 0}),
    "images": replace(
        game("geo3k", PROMPTS, PLAIN, train_data=["{folder}/train.parquet"]), model="vision"
    ),
    "gymnasium": game("gymnasium", MADE, {"env_id": "No-v1"}, kwargs={"env_id": "FrozenLake-v1"}),
    "textarena": game(
        "textarena", MADE, {"env_id": "No-v0"}, kwargs={"env_id": "GuessTheNumber-v0"}
    ),
    "ToolGame": game(f"{HERE}.tool_games:Adding", PROMPTS, PLAIN),
    "reasoning-gym": replace(
        game("reasoning_gym", MADE, {"datasets": "none"}, kwargs={"datasets": "leg_counting"}),
        mark="extras",
    ),
    "verifiers": replace(
        game("verifiers", MADE, {"taskset": "none"}, kwargs={"taskset": "word-tasks"}),
        mark="extras",
    ),
    "TRL": game(f"{TRL}:WordEnv", MADE, {"env": {"game": f"{TRL}:NoDoc"}}),
    "TRL's rewards": game(
        f"{TRL}:CounterEnv",
        MADE,
        {"reward_funcs": [f"{HERE}.adapters.trl_classes:none"]},
        kwargs={"reward_funcs": TRL_REWARDS},
        **DATA,
    ),
    "MCP": game(
        "mcp",
        MADE,
        {"servers": [{**SHOP, "args": ["-c", "raise SystemExit('no shop')"]}]},
        kwargs={"servers": [{**SHOP, "read": [SHOP["args"][0]]}]},
        reward=OWN_REWARD,
        **DATA,
    ),
    "MCP over HTTP": replace(
        game("mcp", MADE, ELSEWHERE, kwargs=OVER_HTTP, reward=OWN_REWARD, **DATA),
        serves=mcp_server,
    ),
    "OpenEnv": replace(
        game("openenv", MADE, {"url": "http://127.0.0.1:1"}, kwargs={"url": "{url}"}),
        serves=openenv_server,
    ),
    "OpenEnv's package": game(
        "openenv",
        MADE,
        {"package": "no_such_package:app"},
        kwargs={"package": f"{HERE}.adapters.openenv_server:app"},
    ),
    "program": program(ASK + REWARD, "end", "raise SystemExit(3)"),
    "Harbor": Kind(
        {"agent": {"command": [*PYTHON, ASK], "tasks": "harbor:{folder}/tasks"}},
        {"agent": {"tasks": "harbor:{folder}/odd_tasks"}},
        "end",
    ),
    "conversations": Kind(
        {"sft": {"data": ["{folder}/chats.jsonl"]}},
        {"sft": {"data": ["{folder}/no_chats.jsonl"]}},
        "data",
    ),
}

ROLLOUT = {
    "group_size": 2,
    "max_prompt_tokens": 2000,
    "max_turn_tokens": 64,
    "max_response_tokens": 600,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models, and data."""
    made = tmp_path_factory.mktemp("kinds")
    save_tiny_model(made / "tools", width=64, template=make_tiny._WITH_TOOLS)
    save_tiny_model(made / "plain", width=64)
    save_tiny_vision_model(made / "vision")
    geo3k.make_data(made, 4, 0)
    write_rows(made / "rows.jsonl", [{"prompt": "What do two pears cost?", "answer": "6"}])
    write_rows(made / "no_prompts.jsonl", [{"prompt": [], "answer": "6"}])
    write_tasks(made / "tasks", ("makes-folder",))
    odd = replace(TASKS["makes-folder"], dockerfile="FROM scratch\nHEALTHCHECK CMD true\n")
    odd.write(made / "odd_tasks" / "odd")
    asked = {"role": "user", "content": "hi"}
    write_rows(made / "chats.jsonl", [{"messages": [asked, {**asked, "role": "assistant"}]}] * 4)
    write_rows(made / "no_chats.jsonl", [{"messages": [asked]}])
    return made


def job(kind: Kind, folder: Path, url: str = "", *, mistaken: bool = False) -> dict[str, Any]:
    """Return the configuration of a kind's example, or of the one with its mistake."""
    tree: dict[str, Any] = small_job(folder / kind.model, rollout=ROLLOUT)
    tree["env"] = {"num_val": 0}
    tree["learner"] |= {"max_row_tokens": 2600, "microbatch_tokens": 2600}
    tree["training"] |= {"num_steps": 1, "batch_size": 1, "save_freq": 0}
    if "env" in kind.job:
        tree["rollout"]["max_turns"] = 3
    if "sft" in kind.job:
        del tree["env"], tree["rollout"]["group_size"]
    _lay(tree, kind.job)
    if mistaken:
        _lay(tree, kind.mistake)
    text = json.dumps(tree).replace("{folder}", str(folder)).replace("{url}", url)
    return json.loads(text.replace("{plain}", str(folder / "plain")))


def _lay(tree: dict[str, Any], over: Mapping[str, Any]) -> None:
    for name, value in over.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), dict):
            _lay(tree[name], cast("Mapping[str, Any]", value))
        else:
            tree[name] = dict(value) if isinstance(value, Mapping) else value


def failed(tree: Mapping[str, Any], file: Path, nats: str) -> list[dict[str, dict[str, Any]]]:
    """Return the checks that fail, by name: of `env check` or its like, and of the dry run."""
    file.write_text(yaml.safe_dump(dict(tree)))
    train = ["sft" if "sft" in tree else "train", str(file), "--dry-run"]
    own = ["agent" if "agent" in tree else "env", "check", str(file)]
    commands = [train] if "sft" in tree else [own, train]
    found: list[dict[str, dict[str, Any]]] = []
    for words in commands:
        told = tinkermq_here(*words, "--json", env={"TINKERMQ_NATS_URL": nats})
        results = json.loads(told.out.splitlines()[-1])["checks"]
        found.append({one["name"]: one for one in results if not one["ok"]})
        assert (told.code == 0) == (not found[-1]), told
    return found


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(one, id=name, marks=getattr(pytest.mark, one.mark))
        for name, one in KINDS.items()
    ],
)
async def test_checks_dry_run_and_run_say_the_same_of_a_kind_of_environment(
    stack: Stack, kind: Kind, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    with ExitStack() as servers:
        url = servers.enter_context(kind.serves()) if kind.serves else ""
        sound, mistaken = job(kind, folder, url), job(kind, folder, url, mistaken=True)
        checks = await asyncio.to_thread(failed, sound, file, stack.server.url)
        assert checks == [{}] * len(checks)
        trained = await stack.submit(sound)
        await trained.until("COMPLETED")
        checks = await asyncio.to_thread(failed, mistaken, file, stack.server.url)
        details = {one[kind.fails]["detail"] for one in checks}
        assert len(details) == 1, checks
        try:
            refused = await stack.submit(mistaken)
        except TinkermqError as error:
            told = error.message
        else:
            told = (await refused.until("FAILED")).reason
        assert details.pop() in told


WITH_TOOLS = ("ToolGame", "TRL", "MCP")


@pytest.mark.full
@pytest.mark.parametrize("model", ["plain", "tools"])
@pytest.mark.parametrize(
    "name", ["many turns", "one turn of data", "players", "gymnasium", *WITH_TOOLS]
)
def test_first_prompts_are_counted_as_an_episode_makes_them(
    folder: Path, name: str, model: str
) -> None:
    example = JobConfig.model_validate(job(replace(KINDS[name], model=model), folder))
    assert all(one.ok for one in check_game(example.env))
    found = {one.name: one for one in run_checks(model_checks(example, conversations(example.env)))}
    meets = _first_prompt(example)
    assert (
        found[PROMPTS].ok == isinstance(meets, int) == (model == "tools" or name not in WITH_TOOLS)
    )
    if isinstance(meets, int):
        low, _, high, *_ = found[PROMPTS].detail.split()
        assert int(low) <= meets <= int(high)
    else:
        assert meets == found[PROMPTS].detail


def _first_prompt(example: JobConfig) -> int | str:
    """Return the tokens of an episode's first prompt, or why a generator cannot make it."""
    with (
        closing(HostData(example.env, 0)) as data,
        closing(LocalGame(example.env, load_game(example.env.game), data)) as played,
    ):
        episode = played.start(0)
        try:
            return len(open_chat(example.model).first_prompt(episode.messages, episode.tools))
        except ModelError as error:
            return error.message


@pytest.mark.full
def test_a_submission_plays_a_slow_game_once_and_says_what_it_left_out() -> None:
    *made, left_out = check_game(EnvConfig(game="guess"), within_s=0)
    assert [one.name for one in made][-1] == "reset and step are in time"
    assert made[-1].detail.startswith("4 calls")
    assert (left_out.outcome, left_out.detail) == ("skipped", "not made: 0 s were over")
