"""`tinkermq auth`, `scheduler`, `node`, `gateway`, `learner` …: one actor in the foreground.

The actor replaces this process (exec): the command line never imports one. Its own parser reads
the options, `--help` included.
"""

import os
import sys
from typing import Annotated, NoReturn

from cyclopts import Parameter

from ..home import URL_VARIABLE, find_url

Words = Annotated[str, Parameter(allow_leading_hyphen=True)]


def scheduler(*words: Words) -> None:
    """Run a scheduler; several may run, one leads."""
    _become("scheduler", words)


def auth(*words: Words) -> None:
    """Run the auth service of a pool that `tinkermq init` has made."""
    _become("auth", words)


def node(*words: Words) -> None:
    """Run a node: `--name NAME --slots N`."""
    _become("node", words)


def gateway(*words: Words) -> None:
    """Run a gateway: `--host ADDRESS --port N`."""
    _become("gateway", words)


def learner(*words: Words) -> None:
    """Run the learner of a job: `--job ID --name NAME`."""
    _become("learner", words)


def generator(*words: Words) -> None:
    """Run one more generator of a job: `--job ID --name NAME`."""
    _become("generator", words)


def evaluator(*words: Words) -> None:
    """Run an evaluator of a job: `--job ID --name NAME`."""
    _become("evaluator", words)


def server(*words: Words) -> None:
    """Run one more inference server of a job: `--job ID --name NAME`."""
    _become("server", words)


def environment(*words: Words) -> None:
    """Run an environment host of a job: `--job ID --name NAME`."""
    _become("environment", words)


def _become(role: str, words: tuple[str, ...]) -> NoReturn:
    if not {"--nats", "--help", "-h"} & set(words):
        os.environ[URL_VARIABLE] = find_url()
    command = [sys.executable, "-P", "-m", f"tinkermq.actors.{role}", *words]
    os.execv(sys.executable, command)  # noqa: S606  no shell is wanted
