"""Texts that tests compare with files: `SNAPSHOTS=write pytest FILE` writes down what is so now."""

import difflib
import os
from collections.abc import Callable
from pathlib import Path


def assert_snapshot(file: Path, text: str) -> None:
    """Compare a text with a file."""
    if os.environ.get("SNAPSHOTS") == "write":
        file.write_text(text)
    lines = (file.read_text().splitlines(), text.splitlines())
    changes = "\n".join(difflib.unified_diff(*lines, str(file), "now", lineterm="", n=1))
    assert not changes, f"{changes}\nSNAPSHOTS=write pytest writes it anew"


def assert_transcript(file: Path, answer: Callable[[str], str]) -> None:
    """Compare what follows each line `$ …` of a file with the answer to it; `# …` lines stay."""
    lines: list[str] = []
    for line in file.read_text().splitlines():
        if line.startswith("#"):
            lines += ["", line]
        elif line.startswith("$ "):
            lines += ["", line, *(part.rstrip() for part in answer(line[2:]).splitlines())]
    assert_snapshot(file, "\n".join(lines).lstrip("\n") + "\n")
