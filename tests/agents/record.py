"""Records anew what the installed programs send.

`.venv/bin/python -m tests.agents.record [ID …]`
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.agents.published import PUBLISHED, SDKS, PublishedAgent
from tests.agents.recording import recording
from tests.agents.scripts import PROMPT, SCRIPTS

GOLDEN = Path(__file__).parent / "golden"
MOST_CHARS = 400
"""Longer texts are shortened: the prompts of programs are their makers', and say nothing here."""


def record(agent: PublishedAgent) -> list[dict[str, Any]]:
    """Run a program against a scripted model; return what it sent."""
    with tempfile.TemporaryDirectory() as folder, recording(SCRIPTS[agent.script]) as (url, kept):
        work = Path(folder, "work")
        work.mkdir()
        if files := agent.agent.get("files"):
            shutil.copytree(files, work, dirs_exist_ok=True)
        values = {"{prompt}": PROMPT, "{python}": sys.executable}
        words = [values.get(word, word) for word in agent.command]
        done = subprocess.run(
            words, cwd=work, env=_environment(agent, url, folder), capture_output=True, timeout=180
        )
        if done.returncode:
            raise SystemExit(f"{agent.id} failed: {done.stdout!r:.2000} {done.stderr!r:.4000}")
        said = [turn.words for turn in SCRIPTS[agent.script].turns]
        return [_told(line, folder, said) for line in kept.lines]


def _environment(agent: PublishedAgent, url: str, home: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": home,
        "LANG": "C.UTF-8",
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": "sk-none",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "sk-none",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false",
        "DO_NOT_TRACK": "1",
        **agent.agent.get("environment", {}),
    }


def _told(value: Any, folder: str, said: Sequence[str]) -> Any:
    """Shorten long texts to their beginning, what was `said`, and what tells them apart."""
    if isinstance(value, dict):
        return {
            key: one if key == "answer" else _told(one, folder, said) for key, one in value.items()
        }
    if isinstance(value, list):
        return [_told(one, folder, said) for one in value]
    if not isinstance(value, str):
        return value
    text = value.replace(folder, "/tmp/agent")
    if len(text) <= MOST_CHARS:
        return text
    digest = blake2b(text.encode(), digest_size=6).hexdigest()
    quoted = "".join(f"{words} … " for words in said if words in text)
    return f"{text[:60]} … {quoted}[{len(text)} characters, {digest}]"


def main(wanted: list[str]) -> None:
    """Record the programs that are named, or all that are installed."""
    for agent in PUBLISHED:
        if agent.lacking or agent.name == SDKS or (wanted and agent.id not in wanted):
            continue  # what the libraries send is tested where the model APIs are
        lines = [json.dumps(line, ensure_ascii=False) for line in record(agent)]
        (GOLDEN / f"{agent.id}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        print(f"{agent.id}: {len(lines)} calls")


if __name__ == "__main__":
    main(sys.argv[1:])
