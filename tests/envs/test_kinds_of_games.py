"""One example of each kind of environment: the checks, the dry run and a run say the same of it.

A sound example passes `env check` (or `agent check`) and `train --dry-run`, and trains. One with a
mistake fails both with the same check; submitted without them, it is refused or fails with that
check's error.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from tinkermq.actors import make_tiny
from tinkermq.actors.policy.chat import open_chat
from tinkermq.actors.policy.tiny_models import save_tiny_model, save_tiny_vision_model
from tinkermq.envs.check import check_game
from tinkermq.envs.data import HostData
from tinkermq.envs.games import geo3k
from tinkermq.envs.registry import load_game
from tinkermq.envs.running.local import LocalGame
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.config.job import EnvConfig, JobConfig
from tinkermq.schemas.wire.errors import TinkermqError

from tests.clients.command import tinkermq_here
from tests.support.configs import small_job
from tests.support.harbor_tasks import write_tasks
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
    marks: tuple[pytest.MarkDecorator, ...] = ()


def game(name: str, fails: str, mistake: Mapping[str, Any], **env: Any) -> Kind:
    """A game whose kwargs, unless the mistake names a section, are mistaken."""
    own = dict(mistake)
    told = own if own.keys() & {"env", "model"} else {"env": {"kwargs": own}}
    return Kind({"env": {"game": name, **env}}, told, fails)


def program(code: str, fails: str, mistake: str, **agent: Any) -> Kind:
    """An agent program."""
    command = ["{python}", "-S", "-c"]
    own, wrong = ({"agent": {"command": [*command, text], **agent}} for text in (code, mistake))
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
ROWS, REWARDS = "each row can be read", "the reward function answers"
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
    "one turn of data": game("addition", ROWS, NO_PROMPT, **DATA),
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
    "AsyncToolGame": game(f"{HERE}.tool_games:AddingAsync", PROMPTS, PLAIN),
    "TRL": game(f"{TRL}:WordEnv", MADE, {"env": {"game": f"{TRL}:NoDoc"}}),
    "TRL's rewards": game(
        f"{TRL}:CounterEnv",
        MADE,
        {"reward_funcs": [f"{HERE}.adapters.trl_classes:none"]},
        kwargs={"reward_funcs": TRL_REWARDS},
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
    "program": program(ASK + REWARD, "the program ends by itself", "raise SystemExit(3)"),
    "conversations": Kind(
        {"sft": {"data": ["{folder}/chats.jsonl"]}},
        {"sft": {"data": ["{folder}/no_chats.jsonl"]}},
        "data",
    ),
}

ROLLOUT = {
    "group_size": 2,
    "max_turns": 3,
    "max_prompt_tokens": 2000,
    "max_turn_tokens": 24,
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


@pytest.mark.parametrize("kind", [pytest.param(one, id=name) for name, one in KINDS.items()])
def test_checks(kind: Kind, folder: Path, tmp_path: Path) -> None:
    with ExitStack() as servers:
        url = servers.enter_context(kind.serves()) if kind.serves else ""
        told = failed(job(kind, folder, url), tmp_path / "run.yaml", "")
        assert told == [{}] * len(told)
        for one in failed(job(kind, folder, url, mistaken=True), tmp_path / "run.yaml", ""):
            assert kind.fails in one, one
            print(one)
