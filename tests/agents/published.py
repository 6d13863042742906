"""The agent programs that `make agents` installs, and the ways in which the tests run them."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

AGENTS = Path(__file__).parents[2] / ".agents"
PROGRAMS = Path(__file__).parent / "programs"
EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "products"
TOY = Path(__file__).parent / "toy"
SDKS = "sdks"
"""What development has: OpenAI's and Anthropic's own libraries."""
GRADE = ["{python}", "-c", "print(float('7' in open('answer.txt').read()))"]


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
    agent: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further keys of the section `agent`."""

    @property
    def id(self) -> str:
        """How tests and recordings call it."""
        return f"{self.name}-{self.mode}" if self.mode else self.name

    @property
    def lacking(self) -> str:
        """What keeps it from being run; empty: nothing."""
        if self.name != SDKS and not (AGENTS / f"{self.name}.stamp").exists():
            return f"{self.name} is not installed: make agents AGENTS={self.name}"
        return ""

    @property
    def folders(self) -> list[str]:
        """What it reads."""
        return [str(PROGRAMS), *([] if self.name == SDKS else [str(AGENTS / self.name)])]

    @property
    def section(self) -> dict[str, Any]:
        """The section `agent` of a job that trains it."""
        return {"command": self.command, "read": self.folders, "reward": GRADE, **self.agent}


def _python(name: str, mode: str, script: str = "search", num_rows: int = 1) -> PublishedAgent:
    python = str(AGENTS / name / "bin" / "python")
    driver = str(PROGRAMS / f"with_{name.replace('-', '_')}.py")
    return PublishedAgent(
        name, mode, script, [python, "-B", driver, mode, "{prompt}"], num_rows=num_rows
    )


def _shell(name: str, *words: str) -> PublishedAgent:
    driver = str(PROGRAMS / f"{name}.sh")
    return PublishedAgent(name, "", name, ["sh", driver, *words, "{prompt}"])


def _sdk(mode: str) -> PublishedAgent:
    driver = str(PROGRAMS / "with_sdks.py")
    command = ["{python}", "-B", driver, mode, "{prompt}"]
    return PublishedAgent(SDKS, mode, "search", command, agent={"reward": []})


def _mini(mode: str, script: str, num_rows: int) -> PublishedAgent:
    driver, folder = PROGRAMS / "mini-swe-agent.sh", AGENTS / "mini-swe-agent"
    agent = {
        "files": str(TOY / "repository"),
        "reward": ["{python}", "{grader}/grade.py"],
        "reward_files": str(TOY / "grader"),
    }
    command = ["sh", str(driver), str(folder), "{prompt}"]
    return PublishedAgent(folder.name, mode, script, command, num_rows, agent)


_CODEX = AGENTS / "codex/node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl"
_PI = AGENTS / "pi/node_modules/@mariozechner/pi-coding-agent/dist/cli.js"
PUBLISHED = [
    _sdk("chat"),
    _sdk("responses"),
    _sdk("messages"),
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
    _python("smolagents", "code", "code", 2),
    _mini("", "mini", 1),
    _mini("rejected", "rejected", 2),
    _shell("codex", str(_CODEX / "bin/codex")),
    replace(
        _shell("codex", str(_CODEX / "bin/codex")),
        mode="compacted",
        script="compacted",
        num_rows=3,
        agent={"environment": {"COMPACT_AT": "29000"}},
    ),
    replace(
        _shell("opencode", str(AGENTS / "opencode/node_modules/opencode-linux-x64/bin/opencode")),
        num_rows=2,  # the second is its title
    ),
    _shell("pi", shutil.which("node") or "node", str(_PI)),
]
PRODUCTS_EXAMPLE = PublishedAgent(
    "openai-agents",
    "example",
    "calculate",
    [
        *("sh", "-c", '"$0" -B agent.py "$1" > answer.txt'),
        *(str(AGENTS / "openai-agents" / "bin" / "python"), "{prompt}"),
    ],
    agent={"files": str(EXAMPLE)},
)
"""The agent of examples/products_openai_agents.yaml, as a command."""
