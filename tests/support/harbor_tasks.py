"""Ten small Harbor tasks, and what solves each of them."""

from dataclasses import dataclass, field
from pathlib import Path

from tinkermq.envs.task_folders import HarborTask, read_task
from tinkermq.schemas.local.folder import Folder

TASK_TOML = """schema_version = "1.1"

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = {verifier_s}

[agent]
timeout_sec = 120.0

[environment]
build_timeout_sec = 60.0
"""
_opened: list[Folder] = []
PLAIN = "FROM debian:12-slim\nWORKDIR /app\n"


@dataclass(frozen=True)
class Task:
    """The files of a task."""

    instruction: str
    test: str
    """Of its `test.sh`."""
    solution: str
    """Of its `solve.sh`."""
    dockerfile: str = PLAIN
    files: dict[str, str] = field(default_factory=dict[str, str])
    """Further files, by their names in the task's folder."""
    verifier_s: float = 60.0

    def write(self, folder: Path) -> Path:
        """Write the task's folder."""
        written = {
            "instruction.md": self.instruction + "\n",
            "task.toml": TASK_TOML.format(verifier_s=self.verifier_s),
            "environment/Dockerfile": self.dockerfile,
            "tests/test.sh": f"#!/bin/bash\n{self.test}\n",
            "solution/solve.sh": f"#!/bin/bash\n{self.solution}\n",
            **self.files,
        }
        for name, text in written.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder


def read(folder: Path) -> HarborTask:
    """Read the task in a folder, which stays open until `forget_tasks`."""
    _opened.append(Folder.held(folder.parent))
    return read_task(_opened[-1], folder.name)


def forget_tasks() -> None:
    """Close the folders of tasks that were read."""
    while _opened:
        _opened.pop().close()


def passes_if(condition: str) -> str:
    """Return a test that gives 1 if a condition of the shell holds, else 0."""
    return f"if {condition}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"


TASKS = {
    "adds-numbers": Task(
        "Write the sum of the numbers in /app/numbers.txt into /app/sum.txt.",
        passes_if('[ "$(cat /app/sum.txt)" = "$(cat /tests/expected)" ]'),
        "n=0; while read one; do n=$((n + one)); done < numbers.txt; echo $n > sum.txt",
        PLAIN + "COPY numbers.txt .\n",
        {"environment/numbers.txt": "3\n4\n5\n", "tests/expected": "12\n"},
    ),
    "appends-line": Task(
        "Append the line `done` to /srv/log/work.log.",
        passes_if('[ "$(tail -n 1 /srv/log/work.log)" = done ]'),
        "echo done >> /srv/log/work.log",
        PLAIN + "RUN mkdir -p /srv/log && echo begun > /srv/log/work.log\n",
    ),
    "commits-file": Task(
        "Commit notes.txt in the repository /app/repo.",
        passes_if("git -c safe.directory=/app/repo -C /app/repo cat-file -e HEAD:notes.txt"),
        "cd repo && git add notes.txt && git commit -qm notes",
        PLAIN + "COPY notes.txt repo/\nRUN git init -q repo && git -C repo config user.name me \\\n"
        "  && git -C repo config user.email me@example.org\n",
        {"environment/notes.txt": "a note\n"},
    ),
    "counts-words": Task(
        "Write the number of words of text.txt into count.txt.",
        passes_if('[ "$(tr -d " " < count.txt)" = 4 ]'),
        "wc -w < text.txt > count.txt",
        PLAIN + 'COPY ["text.txt", "/app/text.txt"]\n',
        {"environment/text.txt": "one two three four\n"},
    ),
    "fixes-script": Task(
        "run.sh should print `hello`. Fix it.",
        passes_if('[ "$(sh run.sh)" = hello ]'),
        "sed -i s/helo/hello/ run.sh",
        PLAIN + "COPY --chmod=755 src/ .\n",
        {"environment/src/run.sh": "echo helo\n"},
    ),
    "makes-folder": Task(
        "Make the folder /app/out/deep.",
        passes_if("[ -d /app/out/deep ]"),
        "mkdir -p out/deep",
    ),
    "partial-credit": Task(
        "Make the files a and b in /app.",
        "a=0; b=0; half=(0 0.5 1); [ -e a ] && a=1; [ -e b ] && b=1\n"
        'echo "{\\"reward\\": ${half[a + b]}, \\"has_a\\": $a, \\"has_b\\": $b}"'
        " > /logs/verifier/reward.json",
        "touch a",
    ),
    "reads-variable": Task(
        "Write the value of the variable COLOUR into colour.txt.",
        passes_if('[ "$(cat colour.txt)" = "dark green" ]'),
        'echo "$COLOUR" > colour.txt',
        PLAIN + 'ARG SHADE=dark\nENV COLOUR="${SHADE} green" OTHER=1\n',
    ),
    "renames-files": Task(
        "Rename every .txt file of /app/in to .md.",
        passes_if('[ "$(ls /app/in | tr "\\n" " ")" = "a.md b.md " ]'),
        "cd in && for one in *.txt; do mv $one ${one%.txt}.md; done",
        PLAIN + "COPY *.txt /app/in/\n",
        {"environment/a.txt": "a\n", "environment/b.txt": "b\n"},
    ),
    "uses-home": Task(
        "Write `yes` into /root/answer.",
        passes_if('[ "$(cat /root/answer)" = yes ]'),
        "echo yes > ~/answer",
        "FROM ubuntu:24.04\nWORKDIR /root\n",
    ),
}
"""By their names, in the order of a dataset's rows."""


def write_tasks(folder: Path, names: tuple[str, ...] = tuple(TASKS)) -> Path:
    """Write tasks into a folder, and return it."""
    for name in names:
        TASKS[name].write(folder / name)
    return folder
