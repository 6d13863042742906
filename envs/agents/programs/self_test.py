"""What walls must prove before a program runs behind them, and whether its commands are there."""

import asyncio
import json
from typing import Any

from ....schemas.config.agent import AgentConfig
from ....schemas.wire.errors import ConfigError, SandboxError
from ...sandbox.program import remedy
from .environment import filled, plain_variables
from .launcher import ProgramLauncher
from .walls import Reach, grader_mounts

_PROCESSES = 8
_DEADLINE_S = 60.0
_PROBE = """
import json, os, shutil, socket, sys
told = json.loads(sys.argv[1])

def comes_off(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return False
    return True

def fork_on():
    ends = os.pipe()
    children = []
    try:
        for _ in range(told["processes"] + 1):
            child = os.fork()
            if not child:
                os.read(ends[0], 1)
                os._exit(0)
            children.append(child)
    finally:
        os.write(ends[1], b"." * (len(children) + 1))
        for child in children:
            os.waitpid(child, 0)

def reach_out():
    socket.create_connection(("192.0.2.1", 9), timeout=1).close()

def other_networks():
    return {name for _, name in socket.if_nameindex()} - {"lo"}

def write_root():
    open("/written", "w").close()

failed = [
    name
    for name, holds in (
        ("programs run as root", os.getuid() != 0),
        ("their root can be written", not comes_off(write_root)),
        ("their processes are not limited", not comes_off(fork_on)),
        ("they see what is not theirs", not any(os.path.lexists(one) for one in told["hidden"])),
        ("they reach a network", told["open"] or not (comes_off(reach_out) or other_networks())),
    )
    if not holds
]
absent = [one for one in told["commands"] if shutil.which(one) is None]
print(json.dumps({"failed": failed, "absent": absent}))
"""


async def prove(config: AgentConfig, launcher: ProgramLauncher) -> None:
    """Run a program behind the walls that says whether they stand.

    Raises SandboxError if they do not, and ConfigError for a command that is not there.
    """
    if any("{grader}" in word for word in config.reward) and launcher.grader is None:
        raise ConfigError(
            "agent.reward names {grader}, and there is no agent.reward_files",
            hint="set agent.reward_files to the folder with what the reward command needs",
        )
    commands = {
        name: filled(config, getattr(config, name)) for name in ("command", "setup", "reward")
    }
    wanted = {words[0]: name for name, words in commands.items() if _is_looked_for(config, words)}
    told = await _answer(config, launcher, sorted(wanted))
    if told["failed"]:
        raise SandboxError(
            f"the walls of programs do not hold: {'; '.join(told['failed'])}",
            hint="no program is run here; a newer kernel or bubblewrap (0.8) may help",
        )
    for absent in told["absent"]:
        raise ConfigError(
            f"agent.{wanted[absent]}: programs find no {absent!r}",
            hint="they see agent.files, agent.read, and agent.image or else the system's folders "
            "and the pool's interpreter ({python}); its folder must also stand in PATH",
        )


async def _answer(
    config: AgentConfig, launcher: ProgramLauncher, commands: list[str]
) -> dict[str, Any]:
    """Run the probe and return what it says."""
    is_open = config.network == "open"
    reach: Reach = "open" if is_open else "model"
    asked = {
        "processes": _PROCESSES,
        "hidden": [str(one) for one in launcher.walls.unseen],
        "open": is_open,
        "commands": commands,
    }
    words = [*launcher.walls.python, "-I", "-S", "-c", _PROBE, json.dumps(asked)]
    async with launcher.folder(launcher.files) as folder:
        environment = plain_variables(config)
        async with launcher.running(
            folder,
            words,
            environment,
            reach,
            more=grader_mounts(launcher.grader),
            processes=_PROCESSES,
        ) as running:
            await asyncio.wait({running.program.ended}, timeout=_DEADLINE_S)
            exit_code = await running.program.kill()
    printed = running.program.printed
    try:
        return json.loads(printed.out.text())
    except ValueError:
        said = printed.tail().strip() or f"a first program exited with code {exit_code}"
        raise SandboxError(
            f"no program runs behind walls here: {said}", hint=remedy(said)
        ) from None


def _is_looked_for(config: AgentConfig, words: list[str]) -> bool:
    """Whether a command must be there before anything has been set up."""
    return bool(words) and (words[0].startswith("/") or "/" not in words[0] or not config.setup)
