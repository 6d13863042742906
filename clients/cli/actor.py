"""`tinkermq auth`, `scheduler`, `node`, `gateway`, `learner` …: one actor in the foreground.

The actor replaces this process (exec): the command line never imports one. Its own parser reads
the options, `--help` included.
"""

import os
import sys
from collections.abc import Callable
from typing import Annotated

from cyclopts import Parameter

from ..home import URL_VARIABLE, find_url

Words = Annotated[str, Parameter(allow_leading_hyphen=True)]


def _command(role: str) -> Callable[..., None]:
    """Return the command that runs an actor."""

    def run(*words: Words) -> None:
        if not {"--nats", "--help", "-h"} & set(words):
            os.environ[URL_VARIABLE] = find_url()
        command = [sys.executable, "-P", "-m", f"tinkermq.actors.{role}", *words]
        os.execv(sys.executable, command)  # noqa: S606  no shell is wanted

    return run


auth = _command("auth")
scheduler = _command("scheduler")
node = _command("node")
gateway = _command("gateway")
learner = _command("learner")
generator = _command("generator")
evaluator = _command("evaluator")
server = _command("server")
environment = _command("environment")
