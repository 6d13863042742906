"""One example of each kind of game: what the checks say is what an episode of a run meets."""

import sys
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors import make_tiny
from tinkermq.actors.model_checks import model_checks
from tinkermq.actors.policy.chat import open_chat
from tinkermq.actors.policy.tiny_models import save_tiny_model
from tinkermq.envs.check import check_game, conversations
from tinkermq.envs.data import HostData
from tinkermq.envs.registry import load_game
from tinkermq.envs.running.local import LocalGame
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.checks import run_checks
from tinkermq.schemas.config.job import EnvConfig, JobConfig
from tinkermq.schemas.wire.errors import ModelError

pytestmark = pytest.mark.full

SERVERS = Path(__file__).parent / "adapters" / "mcp_servers.py"
TRL = '''
class CountEnv:
    def reset(self, goal: int = 3, **kwargs) -> str:
        self.counter, self.goal = 0, goal
        return f"Count to {goal}."

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: What to add.

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter

    def get_reward(self) -> float:
        return float(self.counter == self.goal)
'''
KINDS = {
    "generated": ({"game": "guess"}, False),
    "dataset": ({"game": "math", "train_data": ["rows"]}, False),
    "players": ({"game": "negotiation"}, False),
    "gymnasium": ({"game": "gymnasium", "kwargs": {"env_id": "FrozenLake-v1"}}, False),
    "ToolGame": ({"game": "tool_games:Adding"}, True),
    "TRL": ({"game": "trl:kind_of_trl:CountEnv"}, True),
    "MCP": ({"game": "mcp", "train_data": ["rows"]}, True),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Two models, by whether their template has tools."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "tools", template=make_tiny._WITH_TOOLS)
    return {False: save_tiny_model(folder / "plain"), True: folder / "tools"}


@pytest.mark.parametrize("has_tools", [False, True], ids=["plain template", "with tools"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_checks_of_a_kind_of_game_say_what_its_first_episode_meets(
    models: dict[bool, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    has_tools: bool,
) -> None:
    job = _job(kind, models[has_tools], tmp_path, monkeypatch)
    played = check_game(job.env)
    assert [f"{one.name}: {one.detail}" for one in played if not one.ok] == []
    found = {one.name: one for one in run_checks(model_checks(job, conversations(job.env)))}
    prompts = found["first prompts fit"]
    meets = _first_prompt(job)
    assert prompts.ok == isinstance(meets, int) == (has_tools or not KINDS[kind][1])
    if isinstance(meets, int):
        low, _, high, *_ = prompts.detail.split()
        assert int(low) <= meets <= int(high)
    else:
        assert meets == prompts.detail


def _job(kind: str, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    env: dict[str, Any] = dict(KINDS[kind][0])
    monkeypatch.syspath_prepend(folder)
    if "train_data" in env:
        row = {"prompt": "What do two pears cost?", "answer": "6"}
        env["train_data"] = [str(write_rows(folder / "rows.jsonl", [row]))]
    if kind == "TRL":
        (folder / "kind_of_trl.py").write_text(TRL)
        sys.modules.pop("kind_of_trl", None)
    if kind == "MCP":
        shop = {"command": "{python}", "args": [str(SERVERS), "shop"], "read": [str(SERVERS)]}
        env |= {"kwargs": {"servers": [{"name": "shop", **shop}]}}
        (folder / "right.py").write_text("def right(solution_str, **_):\n    return 1.0\n")
        env["reward"] = {"source": "function", "function": "right:right"}
    rollout = {"max_prompt_tokens": 2000, "max_turns": 4}
    return JobConfig.model_validate({"model": {"path": str(model)}, "env": env, "rollout": rollout})


def _first_prompt(job: JobConfig) -> int | str:
    """Return the tokens of an episode's first prompt, or why a generator cannot make it."""
    data = HostData(job.env, 0)
    game = LocalGame(job.env, load_game(job.env.game), data)
    try:
        episode = game.start(0)
        return len(open_chat(job.model).first_prompt(episode.messages, episode.tools))
    except ModelError as error:
        return error.message
    finally:
        game.close()
        data.close()


def test_a_submission_plays_a_slow_game_once_and_says_what_it_left_out() -> None:
    *made, left_out = check_game(EnvConfig(game="guess"), within_s=0)
    assert [one.name for one in made][-1] == "reset and step are in time"
    assert made[-1].detail.startswith("4 calls")
    assert (left_out.outcome, left_out.detail) == ("skipped", "not made: 0 s were over")
