"""The tutorials and README's game do what they show: blocks are saved or run, in their order."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import ROOT, Block, blocks, environment, matches, run, save, succeed
from tests.support.waiting import PATIENCE_S

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
_VALIDATION = re.compile(r"^validation ([\d.]+) at step 0, ([\d.]+) at step", re.MULTILINE)
"""What `train` says at its end of a run that is validated."""
_RISES_BY = 0.1


class Reader:
    """Somebody who follows a tutorial in an empty folder."""

    def __init__(self, folder: Path) -> None:
        """Start; what `pip install` installs goes into the folder, not into the tests' own."""
        self.here = folder
        self.said = ""
        self.env = {
            **environment(folder),
            "PIP_TARGET": str(folder / "site"),
            "PYTHONPATH": str(folder / "site"),
            "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "false",  # which is how pip spells yes
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def follow(self, block: Block) -> None:
        """Do what a block says."""
        if block.title:
            save(block, self.here)
        elif block.language == "sh":
            for line in block.text.splitlines():
                self.type(line)
        elif block.language == "console":
            for part in block.text.removeprefix("$ ").split("\n$ "):
                line, _, shown = part.partition("\n")
                said = run(line, self.here, 2 * PATIENCE_S, self.env).stdout
                self.said += said
                assert matches(f"{shown.rstrip()}\n" if shown.strip() else "", said), (
                    f"{block}: {line}\n{said}"
                )

    def type(self, line: str) -> None:
        """Run a line that must succeed; go where a `cd` leads."""
        words = shlex.split(line)
        if words[0] == "cd":
            self.here /= words[1]
        else:
            succeed(line, self.here, env=self.env)


def _param(page: Path) -> Any:
    """Return a page as a parameter; the one that is quick shows all that the others do."""
    mark = pytest.mark.full if page.stem.startswith("2-") else pytest.mark.long
    return pytest.param(page, id=page.stem, marks=mark)


@pytest.mark.parametrize("page", [_param(page) for page in TUTORIALS])
def test_a_tutorial_does_what_it_shows(page: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    try:
        for block in blocks(page):
            reader.follow(block)
    finally:
        run("tinkermq down", tmp_path, env=reader.env)
    rewards = _VALIDATION.findall(reader.said)
    assert bool(rewards) == page.stem.startswith("1-"), reader.said
    for before, after in rewards:
        assert float(after) > float(before) + _RISES_BY, reader.said


@pytest.mark.long
@pytest.mark.learns
@pytest.mark.timeout(1800)
def test_the_first_game_of_the_readme_learns_within_ten_of_its_steps(tmp_path: Path) -> None:
    game, config, typed = list(blocks(ROOT / "README.md"))[1:4]
    shorter = {"up": ["--port", "0"], "train": ["training.num_steps=10"]}
    reader = Reader(tmp_path)
    reader.follow(game)
    reader.follow(config)
    try:
        for line in typed.text.splitlines():
            words = line.partition("#")[0].split()
            words += shorter.get(words[1], [])
            reader.said += succeed(shlex.join(words), tmp_path, 8 * PATIENCE_S, reader.env)
    finally:
        run("tinkermq down", tmp_path, env=reader.env)
    (rewards,) = _VALIDATION.findall(reader.said)
    assert float(rewards[1]) > float(rewards[0]) + _RISES_BY, reader.said
