"""A bubblewrap that leaves something out, for the self-test of sandboxes to find."""

import os
import shutil
import sys
from pathlib import Path

WITHOUT = """#!{python} -S
import os, sys
words, number, option = sys.argv[1:], {number}, {option!r}
at = words.index(option)
os.execv({bwrap!r}, [{bwrap!r}, *words[:at], *words[at + number:]])
"""
"""Stands for bubblewrap, and leaves an option out with the words behind it."""


def path_without(folder: Path, option: str, number: int) -> str:
    """Return a PATH on which bubblewrap leaves out an option of so many words."""
    fake, bwrap = folder / "bwrap", shutil.which("bwrap")
    python = os.path.realpath(sys.executable)
    fake.write_text(WITHOUT.format(python=python, number=number, option=option, bwrap=bwrap))
    fake.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
