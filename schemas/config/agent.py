"""Configuration of agent programs and their limits."""

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from .mcp import McpServer
from .sections import MAX_WAIT_S, Section, given_section, when, with_implied

IMPLIED_OF_ENV = ("game", "hosts", "reset_timeout_s", "step_timeout_s", "on_step_timeout")
"""Keys of `env` implied by the section `agent`."""
TRAIN_WORDS = ("all", "main", "alive")
"""Values of `agent.train` other than patterns."""
_GAME = "agent"
_MARGIN_S = 30.0


class AgentConfig(Section):
    """Programs that call the model through OpenAI's or Anthropic's API, one per episode."""

    command: list[str] = Field(default_factory=list[str], max_length=1024)
    """Program and arguments to run for each episode. `{prompt}`, `{workdir}`, `{input}` and
    `{python}` stand for the task's last user message, the working folder, the file with the task's
    row, and the pool's interpreter. Empty: no agent job, or `client`."""
    client: bool = False
    """Clients run the episodes: with `env.hosts=0` (then the default) callers of `AgentEpisodes` or
    hosts of a Python function, with `env.hosts=1` clients of a gateway's `/v1/episodes`."""
    files: str | None = Field(default=None, json_schema_extra=when("command"))
    """Folder that is copied as the program's folder for each try; default: an empty folder. Folders
    here are relative to where the job is submitted or, with `env.hosts=0`, to where `tinkermq agent
    host` runs."""
    setup: list[str] = Field(default_factory=list[str], json_schema_extra=when("command"))
    """Command run there before the program, in the same sandbox."""
    reward: list[str] = Field(default_factory=list[str], json_schema_extra=when("command"))
    """Command run after all processes of the program have ended. Its last line of output is a
    number, or an object with `reward` and optionally `success` and `info`."""
    reward_files: str | None = Field(default=None, json_schema_extra=when("reward"))
    """Folder visible to the reward command only, as `{grader}`; it runs in a copy of the program's
    folder."""
    per_host: int = Field(default=16, ge=1, le=1024)
    """Concurrent programs per host."""
    timeout_s: float = Field(default=1800.0, gt=0, le=MAX_WAIT_S)
    """Time limit of one try."""
    setup_timeout_s: float = Field(default=300.0, gt=0, le=MAX_WAIT_S)
    """Time limit of `setup`, and of waiting for a place at the host."""
    reward_timeout_s: float = Field(default=120.0, gt=0, le=MAX_WAIT_S)
    """Time limit of `reward`."""
    grace_s: float = Field(default=20.0, ge=0, le=MAX_WAIT_S)
    """Seconds from SIGTERM to SIGKILL for a program over a limit."""
    idle_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """A program without an open call for this long is stuck."""
    max_calls: int = Field(default=200, ge=1, le=100_000)
    """Model calls per episode."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Generated tokens per episode, all calls together; default: no bound."""
    on_crash: Literal["retry", "score"] = "retry"
    """When a program fails after calling the model: retry: try again, and count the last try;
    score: count it at once. A stuck program is retried once."""
    failed_reward: float = 0.0
    """Reward of an episode that failed, timed out, was stuck or crashed, and has no other."""
    image: str | None = Field(
        default=None,
        max_length=512,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$",
        json_schema_extra=when("command"),
    )
    """Container image that podman or docker has on the hosts' machines: programs see its files,
    read-only, instead of the machine's, and `{python}` is its `python3`. Its variables are set; its
    user, folder and entry point are ignored."""
    network: Literal["model", "open"] = Field(default="model", json_schema_extra=when("command"))
    """What a program reaches: only the model, or all that the machine does."""
    memory_mb: int = Field(default=2048, ge=64, le=1 << 24, json_schema_extra=when("command"))
    """Memory of a program, all processes together."""
    processes: int = Field(default=256, ge=1, le=1 << 16, json_schema_extra=when("command"))
    """Concurrent processes and threads of a program."""
    disk_mb: int = Field(default=1024, ge=1, le=1 << 24, json_schema_extra=when("command"))
    """Disk space of its folder, home and temporary folder."""
    environment: dict[str, str] = Field(
        default_factory=dict[str, str], json_schema_extra=when("command")
    )
    """Further environment variables; of the host's own the program sees PATH, LANG and TZ."""
    read: list[str] = Field(default_factory=list[str], json_schema_extra=when("command"))
    """Further folders that the program may read, such as a virtual environment."""
    mcp: list[McpServer] = Field(
        default_factory=list[McpServer], max_length=32, json_schema_extra=when("command")
    )
    """MCP servers for the program: written as `mcpServers` to the JSON file that `{mcp}` and the
    variable TINKERMQ_MCP name. The program starts those with a `command` in its sandbox; a `url`
    needs `network: open`."""
    sampling: Literal["job", "request"] = "job"
    """Whether `rollout` sets the sampling, or the program's temperature, top_p and top_k do if
    sent; tokens drawn at other settings than the learner computes with are off-policy."""
    train: str = Field(default="all", max_length=4096)
    """Which calls are trained: `all` delivered ones; those of the `main` conversation; `/PATTERN/`:
    of conversations whose system message (else first message) matches the regular expression; `not
    /PATTERN/`; or `alive`: those that can have influenced the outcome."""
    reasoning: Literal["keep", "template"] = "keep"
    """Earlier reasoning at the next user message: keep: its tokens stay; template: the history is
    rendered by the chat template, as a branch."""

    @field_validator("train")
    @classmethod
    def _which_calls(cls, value: str) -> str:
        if value not in TRAIN_WORDS:
            train_pattern(value)
        return value

    @model_validator(mode="after")
    def _reachable_servers(self) -> Self:
        names = [one.name for one in self.named_mcp()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several servers of mcp have the name {twice[0]}: rename one of them")
        if self.network != "open" and (urls := [one.url for one in self.mcp if one.url]):
            raise ValueError(
                f"programs with network={self.network} do not reach the MCP server {urls[0]}: set "
                "network: open, or give its command"
            )
        return self

    def named_mcp(self) -> list[McpServer]:
        """Return the MCP servers, each with a name."""
        return [one.named(number) for number, one in enumerate(self.mcp, start=1)]

    @property
    def runs_programs(self) -> bool:
        """Whether the job's episodes are those of programs."""
        return self.client or bool(self.command)

    @property
    def episode_s(self) -> float:
        """Longest time from the program's start to its reward."""
        return self.timeout_s + self.grace_s + self.reward_timeout_s + _MARGIN_S


def train_pattern(value: str) -> tuple[re.Pattern[str], bool]:
    """Return the pattern of an `agent.train` value, and whether matching calls are trained.

    Raises ValueError if there is none.
    """
    text = value.removeprefix("not ").strip()
    if len(text) < 3 or not (text.startswith("/") and text.endswith("/")):
        raise ValueError(
            f"agent.train={value!r} does not say which calls are trained: give "
            f"{', '.join(TRAIN_WORDS)}, a pattern such as /You are a coder/, or not /Write titles/ "
            "for all that it does not match"
        )
    try:
        return re.compile(text[1:-1]), not value.startswith("not ")
    except re.error as error:
        raise ValueError(f"agent.train={value!r} is no regular expression: {error}") from error


def runs_programs(tree: Mapping[str, Any]) -> bool:
    """Whether a configuration, perhaps incomplete, is one of agent programs."""
    section = given_section(tree, "agent")
    return bool(section.get("command") or section.get("client"))


def settle_agent(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an agent job's tree with implied keys; any other tree unchanged.

    Raises ValueError for a key without effect.
    """
    tree = dict(values)
    given = given_section(tree, "agent")
    if not runs_programs(tree):
        return tree
    if given_section(tree, "sft").get("data"):
        raise ValueError(
            "sft.data makes an SFT job, which runs no programs, and the section agent an agent "
            "job: remove one of them"
        )
    agent = AgentConfig.model_validate(dict(given))
    implied: dict[str, dict[str, Any]] = {
        "env": {
            "game": _GAME,
            "reset_timeout_s": min(MAX_WAIT_S, 2 * agent.setup_timeout_s + _MARGIN_S),
            "step_timeout_s": min(MAX_WAIT_S, agent.episode_s),
        },
        "rollout": {"max_turns": agent.max_calls},
    }
    if agent.client:
        hosts = given_section(tree, "env").get("hosts", 0)
        if hosts not in (0, 1):
            raise ValueError(
                f"env.hosts={hosts} cannot be with agent.client: give 0 where a process of yours "
                "hosts the episodes, 1 where they are asked for at a gateway"
            )
        implied["env"]["hosts"] = hosts
    return with_implied(tree, implied, "an agent job")
