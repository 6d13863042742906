"""The guide for those who come from OpenTinker is true: its diffs apply, and the result runs."""

import asyncio
import subprocess
import warnings
from pathlib import Path

import pytest
import yaml
from tinkermq.clients.opentinker import NeedlessWarning, translate
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.wire.codec import merged

from tests.support.pages import blocks, save, succeed
from tests.support.stack import Stack

GUIDE = Path(__file__).parents[2] / "docs" / "opentinker.md"


def changed(folder: Path) -> list[str]:
    """Save the guide's files and apply its diffs; return the names of the files."""
    for block in blocks(GUIDE):
        if block.title:
            save(block, folder)
    for diff in sorted(folder.glob("*.diff")):
        done = subprocess.run(
            ["patch", "-p0", "--fuzz=0", "-i", diff.name],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
    return sorted(path.name for path in folder.glob("*.[py]*") if path.suffix != ".diff")


def test_the_diffs_of_the_guide_leave_nothing_of_opentinkers(tmp_path: Path) -> None:
    for name in changed(tmp_path):
        if name.endswith(".py"):
            assert "opentinker" not in (tmp_path / name).read_text()


def test_the_configuration_of_the_guide_is_a_whole_job_with_one_warning(tmp_path: Path) -> None:
    changed(tmp_path)
    with pytest.warns(NeedlessWarning) as caught:
        tree = translate(yaml.safe_load((tmp_path / "train.yaml").read_text()))
    assert len(caught) == 1
    config = parse_config(merged(tree, {"env": {"game": "word_game:WordGame"}}))
    assert (config.rollout.max_turns, config.rollout.max_turn_tokens) == (1, 8)
    assert (config.generator.count, config.name) == (1, "first-words")


def test_every_key_that_the_guide_calls_needless_is(tmp_path: Path) -> None:
    keys = ("algorithm", "num_workers", "agent_num_workers", "weave_project", "enable_tracing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeedlessWarning)
        assert translate(dict.fromkeys([*keys, "gpu_memory_utilization", "wandb_key"], "x")) == {}


@pytest.mark.full
@pytest.mark.asyncio(loop_scope="session")
async def test_the_script_of_the_guide_trains_after_its_diff(
    stack: Stack, tmp_path: Path, model: Path
) -> None:
    changed(tmp_path)
    settings = tmp_path / "train.yaml"
    text = settings.read_text().replace("nats://127.0.0.1:4222", stack.server.url)
    settings.write_text(text.replace("Qwen/Qwen2.5-0.5B-Instruct", str(model)))
    said = await asyncio.to_thread(succeed, "python train.py", tmp_path)
    assert said.endswith("trained 2 steps\n")
    assert said.count("NeedlessWarning: left out") == 1
