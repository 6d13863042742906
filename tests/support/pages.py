"""Pages of the documentation: their fenced blocks, the commands in these, and how they are run."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [
    *(ROOT / name for name in FIRST),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SHELLS = {"sh", "bash", "console"}
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
        """The file that it is saved as; in README, which GitHub shows, its first line names it."""
        found = re.search(r'title="([^"]+)"', self.info) or re.match(r"# (\w+\.\w+)\n", self.text)
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


def of_language(*languages: str) -> list[Block]:
    """Return the blocks of all pages that are in one of some languages."""
    return [block for block in blocks(*PAGES) if block.language in languages]


def script(block: Block) -> str:
    """Return what is typed of a shell block; of a console's, what follows its prompts."""
    if block.language != "console":
        return block.text
    lines: list[str] = []
    for line in block.text.splitlines():
        if line.startswith("$ ") or (lines and lines[-1].endswith("\\")):
            lines.append(line.removeprefix("$ "))
    return "\n".join(lines) + "\n"


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of every command of a shell block."""
    return typed(script(block))


def typed(text: str) -> Iterator[list[str]]:
    """Yield the words of every command that is typed; variables stay as they are.

    What a command reads from the text itself (`<<END`) and where it writes is left out.
    """
    text = re.sub(r"<<(\w+)\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\$\([^)]*\)", "VALUE", text.replace("\\\n", " "))
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                yield from [found] if (found := _named(words)) else []
                words = []
            else:
                words.append(word)


def _named(words: list[str]) -> list[str]:
    """Return a command from its name on, without what the shell takes of it."""
    while words and (re.match(r"\w+=", words[0]) or words[0] in {"do", "exec"}):
        words = words[1:]
    redirects = [place for place, word in enumerate(words) if set(word) <= set("<>")]
    return words[: redirects[0]] if redirects else words


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
    line: str, folder: Path, timeout_s: float = PATIENCE_S, env: Mapping[str, str] | None = None
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
    line: str, folder: Path, timeout_s: float = 2 * PATIENCE_S, env: Mapping[str, str] | None = None
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
