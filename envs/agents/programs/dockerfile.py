"""Follow simple Dockerfiles in the sandbox, without a container engine.

The sandbox has the machine's programs and libraries, no network and no root. So a Dockerfile can be
followed if it starts from a plain image (`debian`, `ubuntu`, `python`) and then only makes folders,
copies files, sets variables and runs commands of a short list. Everything else is refused, with the
line: a task must not run in half of its environment.

The steps become one shell script, which runs in the sandbox with the rights of a program.
"""

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, cast

from ....schemas.wire.errors import DataError
from ...sandbox.sandbox import SYSTEM_FOLDERS
from .sandbox import CONTEXT, TASK

LINE = f"{TASK}/line"
"""File with the line of the running step."""
COMMANDS = frozenset(
    [
        "[",
        "cat",
        "cd",
        "chmod",
        "cp",
        "cut",
        "echo",
        "export",
        "false",
        "git",
        "grep",
        "gunzip",
        "gzip",
        "head",
        "ln",
        "ls",
        "mkdir",
        "mv",
        "printf",
        "pwd",
        "rm",
        "rmdir",
        "sed",
        "seq",
        "set",
        "sort",
        "tail",
        "tar",
        "tee",
        "test",
        "touch",
        "tr",
        "true",
        "truncate",
        "uniq",
        "wc",
    ]
)
"""Commands that a RUN line may use."""
GIT_COMMANDS = frozenset(
    ["add", "branch", "checkout", "commit", "config", "init", "merge", "mv", "rm", "switch", "tag"]
)
"""Subcommands of git that it may use."""
_BASE = re.compile(
    r"(?:docker\.io/)?(?:library/)?(debian|ubuntu|python)(?::([\w.-]+))?(?:@sha256:[0-9a-f]{64})?"
)
_IGNORED = frozenset(
    ["CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME"]
)
"""Instructions that do not change the environment of a program."""
_OPERATORS = frozenset(["&&", "||", ";", "|", "(", ")"])
_REDIRECTIONS = frozenset([">", ">>", "<", ">&"])
_VARIABLE = re.compile(r"\\(\$)|\$(?:\{([A-Za-z_]\w*)([^}]*)\}|([A-Za-z_]\w*))")
_COPY = """copy() {
  target=$1; shift
  for one in "$@"; do
    if [ -d "$one" ]; then mkdir -p "$target" && cp -R "$one/." "$target" || return
    else
      case $target in */) mkdir -p "$target" ;; *) mkdir -p "$(dirname "$target")" ;; esac
      cp -R "$one" "$target" || return
    fi
  done
}
"""


class DockerfileRefused(DataError):
    """A line of a Dockerfile that the sandbox cannot follow."""

    def __init__(self, line: int, reason: str) -> None:
        """Name the line, from 1."""
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    line: int
    """Its first line, from 1."""
    name: str
    text: str
    """The text after the name, lines joined."""

    def refuse(self, reason: str) -> NoReturn:
        """Raise DockerfileRefused."""
        raise DockerfileRefused(self.line, reason)


@dataclass
class SandboxPlan:
    """How to make a task's environment in the sandbox."""

    base: str = ""
    """The image that the Dockerfile starts from."""
    python: str | None = None
    """The version of Python in its name: `3.11`, `3`; None: none."""
    variables: dict[str, str] = field(default_factory=dict[str, str])
    """Variables that `ENV` sets."""
    workdir: str = "/"
    script: str = "set -e\n"
    """The script that makes it, for a POSIX shell."""


def read_dockerfile(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile."""
    instructions: list[Instruction] = []
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        if words.startswith("#") or (not words and not parts):
            continue
        first = first if parts else number
        parts.append(words.removesuffix("\\").rstrip())
        if not words.endswith("\\"):
            instructions.append(_instruction(first, parts))
            parts = []
    if parts:
        instructions.append(_instruction(first, parts))
    return instructions


def _instruction(line: int, parts: list[str]) -> Instruction:
    name, _, rest = " ".join(part for part in parts if part).partition(" ")
    return Instruction(line, name.upper(), rest.strip())


def plan_sandbox(text: str, *, ignores_files: bool = False) -> SandboxPlan:
    """Return how to follow a Dockerfile in the sandbox; DockerfileRefused if that is impossible.

    `ignores_files`: a `.dockerignore` excludes files, which copies of folders here would not.
    """
    plan, arguments = SandboxPlan(), dict[str, str]()
    for step in read_dockerfile(text):
        values = {**arguments, **plan.variables}
        if step.name == "FROM":
            _take_base(plan, step, arguments)
        elif step.name == "ARG":
            name, has_default, default = step.text.partition("=")
            if not has_default:
                step.refuse(f"ARG {name} has no value")
            arguments[name] = _word(_expanded(default, values, step))
        elif not plan.base:
            step.refuse(f"{step.name} is before FROM")
        elif step.name == "ENV":
            plan.variables |= _pairs(step, values)
        elif step.name == "WORKDIR":
            plan.workdir = _inside(plan, _word(_expanded(step.text, values, step)), step)
            plan.script += f"{_at(step)}mkdir -p {shlex.quote(plan.workdir)}\n"
        elif step.name in ("COPY", "ADD"):
            if ignores_files:
                step.refuse(f"{step.name} with a .dockerignore")
            plan.script += _at(step) + _copy(plan, step, values)
        elif step.name == "RUN":
            plan.script += _at(step) + _run(plan, step, values)
        elif step.name == "USER" and step.text in ("root", "0", "root:root", "0:0"):
            continue
        elif step.name not in _IGNORED:
            step.refuse(
                f"{step.name} {step.text}".strip()[:80] + " is not supported in the sandbox"
            )
    if not plan.base:
        raise DockerfileRefused(1, "FROM is missing")
    plan.script = _COPY + plan.script
    return plan


def _take_base(plan: SandboxPlan, step: Instruction, arguments: Mapping[str, str]) -> None:
    """Read the image that the Dockerfile starts from, if the sandbox can replace it."""
    if plan.base:
        step.refuse("a second FROM")
    words = [word for word in step.text.split() if not word.startswith("--")]
    plan.base = _expanded(words[0], arguments, step) if words else ""
    match = _BASE.fullmatch(plan.base)
    tag = (match[2] or "") if match is not None else ""
    if match is None or "alpine" in tag or "windows" in tag:
        step.refuse(
            f"FROM {plan.base}: the sandbox replaces only images of debian, ubuntu and python"
        )
    if match[1] == "python":
        version = re.match(r"\d+(?:\.\d+)?", tag)
        plan.python = version[0] if version else "3"


def _at(step: Instruction) -> str:
    return f"echo {step.line} >{LINE}\n"


def _expanded(text: str, values: Mapping[str, str], step: Instruction) -> str:
    """Return a text with the values of its variables."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name, more = match[2] or match[4], match[3] or ""
        if more and not more.startswith(":-"):
            step.refuse(f"{match[0]} is not known")
        return values.get(name) or more.removeprefix(":-")

    return _VARIABLE.sub(value, text)


def _word(text: str) -> str:
    """Return a text without the quotes around it."""
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _pairs(step: Instruction, values: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an ENV sets: `NAME=value ...`, or `NAME value`."""
    name, _, rest = step.text.partition(" ")
    if "=" not in name:
        return {name: _expanded(rest.strip(), values, step)}
    try:
        words = shlex.split(step.text)
    except ValueError as error:
        step.refuse(f"ENV: {error}")
    pairs = [word.partition("=") for word in words]
    return {name: _expanded(value, values, step) for name, _, value in pairs}


def _inside(plan: SandboxPlan, path: str, step: Instruction) -> str:
    """Return a path of the environment; DockerfileRefused for one that cannot be written."""
    whole = posixpath.normpath(posixpath.join(plan.workdir, path))
    if whole.split("/")[1] in (*SYSTEM_FOLDERS, "dev", "proc", "sys", "tmp", "episode"):
        step.refuse(f"{step.name} {path}: the sandbox's /{whole.split('/')[1]} cannot be written")
    return f"{whole.rstrip('/')}/" if path.endswith("/") and whole != "/" else whole


def _listed(step: Instruction, text: str) -> list[str]:
    """Return the words of an instruction, given as a JSON list or separated by spaces."""
    try:
        if text.startswith("["):
            return [str(word) for word in cast("list[object]", json.loads(text))]
        return shlex.split(text)
    except ValueError as error:
        step.refuse(f"{step.name}: {error}")


def _copy(plan: SandboxPlan, step: Instruction, values: Mapping[str, str]) -> str:
    """Return the script of a COPY."""
    text, mode = step.text, ""
    while match := re.match(r"--(\w+)=(\S+)\s+", text):
        if match[1] == "chmod" and re.fullmatch(r"[0-7]{3,4}", match[2]):
            mode = match[2]
        elif match[1] != "chown":  # all files belong to the program's user
            step.refuse(f"{step.name} --{match[1]}")
        text = text[match.end() :]
    *sources, target = [_expanded(word, values, step) for word in _listed(step, text)] or [""]
    if not sources or "<<" in text:
        step.refuse(f"{step.name} {text[:60]} needs a file and its destination")
    for source in sources:
        is_fetched = "://" in source or source.startswith("git@")
        if is_fetched or (step.name == "ADD" and re.search(r"\.(tar|tgz|gz|bz2|xz|zst)\b", source)):
            step.refuse(f"{step.name} {source} is fetched or unpacked")
        if ".." in source.split("/"):
            step.refuse(f"{step.name} {source} is outside of the environment's folder")
    target = _inside(plan, target, step)
    if len(sources) > 1 and not target.endswith("/"):
        target += "/"
    # patterns stay unquoted for the shell
    names = " ".join(
        "/".join(_pattern(part) for part in f"{CONTEXT}/{source.lstrip('/')}".split("/"))
        for source in sources
    )
    chmod = f"chmod -R {mode} {shlex.quote(target)}\n" if mode else ""
    return f"copy {shlex.quote(target)} {names}\n{chmod}"


def _pattern(part: str) -> str:
    pieces = re.split(r"([*?])", part)
    return "".join(
        piece if piece in ("*", "?") else shlex.quote(piece) for piece in pieces if piece
    )


def _run(plan: SandboxPlan, step: Instruction, values: Mapping[str, str]) -> str:
    """Return the script of a RUN, if all its commands are in the list."""
    text = step.text
    if text.startswith("["):
        text = shlex.join(_listed(step, text))
    if text.startswith("--"):
        step.refuse(f"RUN {text.split()[0]}")
    for command in _commands(step, text):
        if command[0] not in COMMANDS:
            step.refuse(f"RUN {command[0]}: the sandbox runs only {' '.join(sorted(COMMANDS))}")
        git = next((word for word in _git_words(command) if not word.startswith("-")), "init")
        if command[0] == "git" and git not in GIT_COMMANDS:
            step.refuse(f"RUN git {git}: of git only {' '.join(sorted(GIT_COMMANDS))}")
    exports = "".join(
        f"export {name}={shlex.quote(value)}; "
        for name, value in values.items()
        if name.isidentifier()
    )
    return f"( cd {shlex.quote(plan.workdir)}; {exports}\n{text}\n)\n"


def _git_words(command: list[str]) -> Iterator[str]:
    """Yield the words of a git command without the values of `-C` and `-c`."""
    words = iter(command[1:])
    for word in words:
        if word in ("-C", "-c"):
            next(words, "")
        else:
            yield word


def _commands(step: Instruction, text: str) -> Iterator[list[str]]:
    """Yield the simple commands of a shell line; DockerfileRefused for other syntax."""
    for mark in ("$(", "`", "<<", "<("):
        if mark in text:
            step.refuse(f"RUN with {mark}")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        tokens = list(lexer)
    except ValueError as error:
        step.refuse(f"RUN: {error}")
    command: list[str] = []
    is_file = False
    for token in tokens:
        if token in _OPERATORS:
            yield from [command] if command else []
            command = []
        elif token in _REDIRECTIONS:
            is_file = True
        elif set(token) <= set("();<>|&"):
            step.refuse(f"RUN with {token}")
        elif is_file:
            is_file = False
        elif command or not re.match(r"[A-Za-z_]\w*=", token):
            command.append(token)
    yield from [command] if command else []
