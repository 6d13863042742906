"""Configuration of agent programs and their limits."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from .sections import MAX_WAIT_S, Section, given_section, when, with_implied

IMPLIED_OF_ENV = ("game", "hosts", "reset_timeout_s", "step_timeout_s", "on_step_timeout")
"""Keys of `env` implied by the section `agent`."""
TRAIN_WORDS = ("all", "main")
"""Values of `agent.train` other than patterns."""
_GAME = "agent"
_MARGIN_S = 30.0
_TASKS = "harbor:"


class TaskSource(NamedTuple):
    """A folder of Harbor tasks, or a share of them, as `env.train_data` and `val_data` name it."""

    folder: str
    share: float = 0.0
    """Share of the tasks for validation; 0: no split."""
    is_val: bool = False
    """Whether these are meant; else all others."""

    @property
    def name(self) -> str:
        """The name that `parse` reads."""
        share = f"{self.share:.6f}".rstrip("0")
        split = f"#{'val' if self.is_val else 'train'}={share}" if self.share else ""
        return f"{_TASKS}{self.folder}{split}"

    @classmethod
    def parse(cls, name: str) -> "TaskSource | None":
        """Read `harbor:FOLDER`, `harbor:FOLDER#train=SHARE` or `#val=SHARE`; None for a file.

        Raises ValueError for a share that is none.
        """
        if not name.startswith(_TASKS):
            return None
        folder, mark, split = name.removeprefix(_TASKS).partition("#")
        if not folder:
            raise ValueError(f"{name!r} names no folder: give harbor:FOLDER")
        if not mark:
            return cls(folder)
        match = re.fullmatch(r"(train|val)=(0?\.\d{1,6})", split)
        if match is None or not float(match[2]):
            raise ValueError(
                f"{name!r} does not say which tasks are meant: give harbor:FOLDER, or the two "
                "parts harbor:FOLDER#train=0.2 and harbor:FOLDER#val=0.2, the same share in both"
            )
        return cls(folder, float(match[2]), match[1] == "val")


def name_with_folder(name: str, change: Callable[[str], str]) -> str:
    """Return the name of a dataset with its path changed, that of a task folder, too."""
    source = TaskSource.parse(name)
    return change(name) if source is None else source._replace(folder=change(source.folder)).name


# -- MCP servers (Model Context Protocol) ----------------------------------------------------------


class McpServer(Section):
    """An MCP server: a command that speaks over its standard input and output, or a URL."""

    name: str = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]{0,31})?$")
    """Its name among the servers; default: `server1`, `server2` and so on."""
    command: str = Field(default="", max_length=4096)
    """Program of a server over stdio; `{python}` stands for the pool's interpreter."""
    args: list[str] = Field(
        default_factory=list[str], max_length=1024, json_schema_extra=when("command")
    )
    """Its arguments."""
    env: dict[str, str] = Field(default_factory=dict[str, str], json_schema_extra=when("command"))
    """Its environment variables."""
    url: str = Field(default="", max_length=4096, pattern=r"^(https?://[!-~]+)?$")
    """URL of a server over streamable HTTP."""
    headers: dict[str, str] = Field(default_factory=dict[str, str], json_schema_extra=when("url"))
    """Headers of each request to it."""

    @model_validator(mode="after")
    def _one_transport(self) -> Self:
        if bool(self.command) == bool(self.url):
            problem = "both" if self.command else "neither"
            raise ValueError(f"give command or url; {problem} is set")
        return self

    def named(self, number: int) -> Self:
        """Return it with a name: its own, or one by its number."""
        return self if self.name else self.model_copy(update={"name": f"server{number}"})


class AgentConfig(Section):
    """Programs that call the model through OpenAI's or Anthropic's API, one per episode."""

    command: list[str] = Field(default_factory=list[str], max_length=1024)
    """Program and arguments to run for each episode. `{prompt}`, `{workdir}`, `{files}`,
    `{input}` and `{python}` stand for the task's last user message, the working folder, the copy of
    `files`, the file with the task's row, and the pool's interpreter. Empty: no agent run, or
    `client`."""
    client: bool = False
    """Clients run the episodes: with `env.hosts=0` (then the default) callers of `AgentEpisodes` or
    hosts of a Python function, with `env.hosts=1` clients of a gateway's `/v1/episodes`."""
    tasks: str | None = Field(default=None, max_length=4096, json_schema_extra=when("command"))
    """`harbor:FOLDER`: the folder's [Harbor tasks](harbor.md) are the data; short for
    `env.train_data`, which then holds it. Their tests give the reward."""
    val_share: float = Field(default=0.0, ge=0, lt=1, json_schema_extra=when("tasks"))
    """Share of `tasks`, by a digest of their names, that is `env.val_data` and not trained."""
    files: str | None = Field(default=None, json_schema_extra=when("command"))
    """Folder that is copied as the program's folder for each try; default: an empty folder. Folders
    here are relative to where the run is submitted or, with `env.hosts=0`, to where `tinkermq agent
    host` runs."""
    setup: list[str] = Field(default_factory=list[str], json_schema_extra=when("command"))
    """Command run there before the program, in the same sandbox."""
    reward: list[str] = Field(default_factory=list[str], json_schema_extra=when("command"))
    """Command run after all processes of the program have ended. Its last line of output is a
    number, or an object with `reward` and optionally `success` and `info`; posted rewards then do
    not count."""
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
    """Time limit of `reward`, and of a Harbor task's tests the longest that may be asked for."""
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
    read-only, instead of the machine's, and `{python}` is its `python3`. Its user, folder and entry
    point are ignored."""
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
    """[MCP servers](mcp.md#agent-programs) for the program, written to the JSON file that `{mcp}`
    and TINKERMQ_MCP name. The program starts those with a `command` in its sandbox; a `url` needs
    `network: open`."""
    sampling: Literal["job", "request"] = "job"
    """job: sample as `rollout` says; request: with the program's temperature, top_p and top_k.
    Tokens drawn at other settings than the learner computes with are off-policy."""
    train: str = Field(default="all", max_length=4096)
    """Which calls are trained: `all`, `main`, `/PATTERN/` or `not /PATTERN/` ([what is
    trained](train-an-agent.md#what-is-trained))."""
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
        names = [server.name for server in self.named_mcp()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several servers of mcp have the name {twice[0]}: rename one of them")
        if self.network != "open" and (urls := [server.url for server in self.mcp if server.url]):
            raise ValueError(
                f"programs with network={self.network} do not reach the MCP server {urls[0]}: set "
                "network: open, or give its command"
            )
        return self

    def named_mcp(self) -> list[McpServer]:
        """Return the MCP servers, each with a name."""
        return [server.named(number) for number, server in enumerate(self.mcp, start=1)]

    @property
    def runs_programs(self) -> bool:
        """Whether the run's episodes are those of programs."""
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
        raise ValueError(f"agent.train={value!r} must be a regular expression: {error}") from error


def runs_programs(tree: Mapping[str, Any]) -> bool:
    """Return whether a configuration, perhaps incomplete, is one of agent programs."""
    section = given_section(tree, "agent")
    return bool(section.get("command") or section.get("client"))


def _with_tasks(tree: Mapping[str, Any], agent: AgentConfig) -> dict[str, Any]:
    """Return a tree with the tasks of `agent.tasks` as its data, in place of that key."""
    if agent.tasks is None:
        return dict(tree)
    source = TaskSource.parse(agent.tasks)
    if source is None or source.share:
        raise ValueError(f"agent.tasks={agent.tasks!r} is not known: give harbor:FOLDER")
    env = dict(given_section(tree, "env"))
    named = {"train_data": [source.name]}
    if agent.val_share:
        named = {
            f"{split}_data": [source._replace(share=agent.val_share, is_val=split == "val").name]
            for split in ("train", "val")
        }
    for key in named:
        if env.get(key):
            raise ValueError(f"agent.tasks gives env.{key}={env[key]} already: remove one of them")
    section = {
        key: value
        for key, value in given_section(tree, "agent").items()
        if key not in ("tasks", "val_share")
    }
    return {**tree, "agent": section, "env": {**env, **named}}


def settle_agent(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an agent run's tree with implied keys; any other tree unchanged.

    Raises ValueError for a key without effect.
    """
    tree = dict(values)
    section = given_section(tree, "agent")
    if not runs_programs(tree):
        return tree
    if given_section(tree, "sft").get("data"):
        raise ValueError(
            "sft.data makes an SFT run, which runs no programs, and the section agent an agent "
            "run: remove one of them"
        )
    agent = AgentConfig.model_validate(dict(section))
    tree = _with_tasks(tree, agent)
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
    return with_implied(tree, implied, "an agent run")
