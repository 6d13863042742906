"""The agent programs that `make agents` installs, and the ways in which the tests run them."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

AGENTS = Path(__file__).parents[2] / ".agents"
PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class PublishedAgent:
    """One program in one of its ways."""

    name: str
    """Of the environment below `.agents`."""
    mode: str
    script: str
    """Of `scripts.SCRIPTS`."""
    command: Sequence[str]
    """`{prompt}` stands for the task."""
    num_rows: int = 1
    """Rows of its episode."""

    @property
    def id(self) -> str:
        """How tests and recordings call it."""
        return f"{self.name}-{self.mode}" if self.mode else self.name

    @property
    def lacking(self) -> str:
        """What keeps it from being run; empty: nothing."""
        if not (AGENTS / f"{self.name}.stamp").exists():
            return f"{self.name} is not installed: make agents AGENTS={self.name}"
        return ""

    @property
    def folders(self) -> list[str]:
        """What it reads."""
        return [str(AGENTS / self.name), str(PROGRAMS)]


def _python(name: str, mode: str, script: str = "search", num_rows: int = 1) -> PublishedAgent:
    python = str(AGENTS / name / "bin" / "python")
    driver = str(PROGRAMS / f"with_{name.replace('-', '_')}.py")
    return PublishedAgent(
        name, mode, script, [python, "-B", driver, mode, "{prompt}"], num_rows=num_rows
    )


def _shell(name: str, *words: str) -> PublishedAgent:
    driver = str(PROGRAMS / f"{name}.sh")
    return PublishedAgent(name, "", name, ["sh", driver, *words, "{prompt}"])


_CODEX = AGENTS / "codex/node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl"
_PI = AGENTS / "pi/node_modules/@mariozechner/pi-coding-agent/dist/cli.js"
PUBLISHED = [
    _python("openai-agents", "responses"),
    _python("openai-agents", "chat"),
    _python("openai-agents", "streamed"),
    _python("openai-agents", "handoff", "handoff", 2),
    _python("openai-agents", "as_tool", "as_tool", 2),
    _python("pydantic-ai", "chat", "three"),
    _python("pydantic-ai", "responses", "three"),
    _python("pydantic-ai", "messages", "three"),
    _python("langgraph", "chat", "three"),
    _python("langgraph", "responses", "three"),
    _python("langgraph", "messages", "three"),
    _python("langgraph", "trimmed", "long", 3),
    _python("smolagents", "tools", "final", 2),
    _python("smolagents", "code", "code"),
    PublishedAgent(
        "mini-swe-agent",
        "",
        "mini",
        ["sh", str(PROGRAMS / "mini-swe-agent.sh"), str(AGENTS / "mini-swe-agent"), "{prompt}"],
    ),
    _shell("codex", str(_CODEX / "bin/codex")),
    _shell("opencode", str(AGENTS / "opencode/node_modules/opencode-linux-x64/bin/opencode")),
    _shell("pi", shutil.which("node") or "node", str(_PI)),
]
