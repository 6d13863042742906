"""Pages of the documentation: their fenced blocks, and how these are run."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^( *)```(\w+)?(.*)$")


@dataclass
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    info: str
    text: str

    @property
    def title(self) -> str:
        """The file that the block is saved as."""
        found = re.search(r'title="([^"]+)"', self.info)
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(*found: Path) -> Iterator[Block]:
    for page in found:
        opened: Block | None = None
        indent = ""
        for number, line in enumerate(page.read_text().splitlines(), 1):
            fence = FENCE.match(line)
            if fence and opened is None:
                indent = fence[1]
                opened = Block(page, number, fence[2] or "", fence[3], "")
            elif fence and opened is not None:
                yield opened
                opened = None
            elif opened is not None:
                opened.text += line.removeprefix(indent) + "\n"
        assert opened is None, f"{page.name}: a block is never closed"


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a user who works in `folder`."""
    programs = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "NO_COLOR": "1",
        "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",
        "TINKERMQ_HOME": str(folder / "home"),
    }


def run(
    line: str, folder: Path, timeout_s: float = 60, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a line of a shell in `folder`; both streams are in `stdout`."""
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=env or environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def succeed(
    line: str, folder: Path, timeout_s: float = 140, env: Mapping[str, str] | None = None
) -> str:
    """Run a line that must succeed; return what it printed."""
    ended = run(line, folder, timeout_s, env)
    assert ended.returncode == 0, f"{line}\n{ended.stdout}"
    return ended.stdout


def matches(shown: str, said: str) -> bool:
    """Compare output with what a page shows of it.

    A line `...` stands for any number of lines, `...` within a line for any part of it.
    """
    parts = re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE)
    patterns = [re.escape(part).replace(r"\.\.\.", ".*") for part in parts]
    return re.fullmatch("(?:.*\n)*".join(patterns), said) is not None


def save(block: Block, folder: Path) -> None:
    """Write a block to the file that its title names."""
    mode = "a" if "append" in block.info else "w"
    with (folder / block.title).open(mode) as file:
        file.write("\n" * (mode == "a") + block.text)
