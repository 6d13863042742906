"""Machines on Ray: one job each, which holds CPUs or GPUs of a Ray node and runs our node there.

Jobs are submitted over HTTP, as `ray job submit` does, so the scheduler does not need Ray, and Ray
does not need this package. A job's submission id is the machine's name and the number of its
request. Ray accepts each id once, so a request repeated after a kill creates only one machine.

Ray ends a job by SIGTERM to each of its processes. With that signal and the node's own signal,
actors would end at once, so the node is detached (`_SCRIPT`): the shell started by Ray forwards one
signal, and ends after the node. If Ray kills the shell, for example when a Ray node leaves, the
node drains. A job that is stopped during its start does not start a node, or ends it.

Ray reports when a job was submitted, not when it started: a machine's time counts from when it was
last seen waiting, or else from its submission.
"""

import asyncio
import json
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ....broker.client.login import CREDENTIALS_VARIABLE
from ....schemas.machines import MachinesConfig
from ....schemas.wire.errors import PlacementError
from .source import ALLOCATED_GPUS, Machine, MachineNames, WebReply, node_command, request

TOKEN_VARIABLE = "RAY_AUTH_TOKEN"  # noqa: S105  a variable's name
_UNREACHABLE = "is the Ray cluster up? try `ray job list --address ADDRESS`"
_REFUSED = (
    "`ray status` on the cluster shows what it has; correct `address:` or `ray:` of the machines"
)
_ENDED = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
_NOT_FOUND = 404
_BESIDE = """\
trap : TERM
: > $notes/begun
{{ trap - TERM; : > $notes/up; exec {node}; }} >&2 < /dev/null &
node=$! stopped=
while kill -0 $node 2> /dev/null && ! grep -qs "^State:.*zombie" /proc/$node/status; do
  if [ -e $notes/stop ] || ! kill -0 $outer 2> /dev/null; then
    if [ -e $notes/up ] && [ -z "$stopped" ]; then
      stopped=yes
      kill -TERM $node
    fi
  fi
  sleep 1 & wait $!
done
: > $notes/ended
kill -0 $outer 2> /dev/null || rm -rf $notes
"""
"""Runs beside the job: the node, and a shell that forwards a signal to it.

Until it is `up`, the node's process is a shell that would drop the signal.
"""
_SCRIPT = """\
trap '[ -n "$notes" ] || exit 143; : > $notes/stop' TERM
notes=$(mktemp -d) outer=$$
export notes outer
[ -e $notes/stop ] || (setsid sh -c {beside} > /dev/null < /dev/null &)
tries=0
while [ ! -e $notes/ended ]; do
  if [ -e $notes/stop ] && [ ! -e $notes/begun ]; then tries=$((tries + 1)); fi
  if [ $tries -gt 3 ]; then break; fi
  sleep 1 & wait $!
done
rm -rf $notes
"""
"""The command of the Ray job; a signal before its notes folder exists ends it."""


class RaySource:
    """Submits, lists and stops jobs through Ray's dashboard."""

    def __init__(self, config: MachinesConfig, url: str) -> None:
        """Nodes connect to the broker at `url`."""
        self._config = config
        self._url = url
        self._names = MachineNames(url)
        self._waited: dict[str, float] = {}
        """Times when machines were last seen waiting, by id in the cluster."""

    async def list_machines(self) -> list[Machine]:
        """Return the pool's jobs that have not ended, by name; raises PlacementError."""
        reply = await self._send("GET", "/api/jobs/")
        jobs = [job for job in _jobs(reply) if self._names.own(_name_of(job))]
        machines = [self._machine(job) for job in jobs if job.get("status") not in _ENDED]
        known = {machine.id for machine in machines}
        self._waited = {name: when for name, when in self._waited.items() if name in known}
        return sorted(machines, key=lambda item: self._names.number(item.name))

    async def request_machine(self, name: str) -> None:
        """Submit the job of a machine, unless it exists; raises PlacementError."""
        before = {
            _time_of(item): item.get("status")
            for item in _jobs(await self._send("GET", "/api/jobs/"))
            if _name_of(item) == name
        }
        if not all(status in _ENDED for status in before.values()):
            return
        job = f"{name}.{max(before, default=0) + 1}"
        node = _node(self._config, self._url, name)
        reply = await self._send("POST", "/api/jobs/", submission(self._config, job, node))
        if reply.status >= 300 and not await self._is_there(job):
            raise _refusal(reply)
        for time_asked in before:  # ended jobs; their ids are never accepted again
            await self._send("DELETE", f"/api/jobs/{name}.{time_asked}")

    async def release_machine(self, machine: Machine, *, drain: bool) -> None:
        """Stop the job; its node always drains. A waiting job stops when it starts."""
        reply = await self._send("POST", f"/api/jobs/{machine.id}/stop")
        if reply.status >= 300 and reply.status != _NOT_FOUND:
            raise _refusal(reply)

    async def _is_there(self, job: str) -> bool:
        """Return whether the machine was requested twice."""
        reply = await self._send("GET", f"/api/jobs/{job}")
        return reply.status != _NOT_FOUND and _json(reply).get("status") not in _ENDED

    def _machine(self, job: Mapping[str, Any]) -> Machine:
        number, submitted = str(job["submission_id"]), float(job.get("start_time") or 0) / 1000
        waits = job.get("status") == "PENDING"
        if waits:
            self._waited[number] = time.time()
        return Machine(
            _name_of(job),
            number,
            "asked" if waits else "started",
            None if waits else max(submitted, self._waited.get(number, 0.0)),
            why=str(job.get("message") or "") if waits else "",
            log=f"`ray job logs --address {address(self._config)} {number}`",
        )

    async def _send(self, method: str, path: str, body: Any = None) -> WebReply:
        token = await asyncio.to_thread(_token)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"{address(self._config)}{path}"
        return await request(method, url, body, headers, hint=_UNREACHABLE)


def _token() -> str:
    """Return the headers that Ray's own tools would send, from the environment or a file."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token:
        return token
    file = os.environ.get(f"{TOKEN_VARIABLE}_PATH") or "~/.ray/auth_token"
    try:
        return Path(file).expanduser().read_text().strip()
    except (OSError, RuntimeError):  # there is no file, or no home folder
        return ""


def _name_of(job: Mapping[str, Any]) -> str:
    """Return the name of a job's machine."""
    return str(job.get("submission_id")).rpartition(".")[0]


def _time_of(job: Mapping[str, Any]) -> int:
    """Return the number of the request for its machine."""
    number = str(job.get("submission_id")).rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


def address(config: MachinesConfig) -> str:
    """Return the URL of Ray's dashboard."""
    url = config.address.rstrip("/") or "127.0.0.1:8265"
    return url if "://" in url else f"http://{url}"


def submission(config: MachinesConfig, job: str, node: str) -> dict[str, Any]:
    """Return the job of one machine, with the command `node`; the owner's additions win."""
    own = config.ray
    runtime_env: Mapping[str, Any] = own.get("runtime_env", {})
    beside = shlex.quote(_BESIDE.format(node=node))
    script = _SCRIPT.replace("{beside}", beside)
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(config.drain_s), **runtime_env.get("env_vars", {})}
    return {
        "entrypoint": f"exec sh -c {shlex.quote(script)}",
        "submission_id": job,
        "entrypoint_num_gpus" if config.gpus else "entrypoint_num_cpus": config.slots,
        **own,
        "runtime_env": {**runtime_env, "env_vars": variables},
    }


def _node(config: MachinesConfig, url: str, name: str) -> str:
    words = node_command(config, url, name)
    if config.credentials:
        words = ["env", f"{CREDENTIALS_VARIABLE}={config.credentials}", *words]
    return shlex.join(words) + (ALLOCATED_GPUS if config.gpus else "")


def _jobs(reply: WebReply) -> list[dict[str, Any]]:
    value = _parsed(reply)
    if not isinstance(value, list):
        raise _refusal(reply)
    return cast("list[dict[str, Any]]", value)


def _json(reply: WebReply) -> dict[str, Any]:
    value = _parsed(reply)
    if not isinstance(value, dict):
        raise _refusal(reply)
    return cast("dict[str, Any]", value)


def _parsed(reply: WebReply) -> object:
    if reply.status >= 300:
        raise _refusal(reply)
    try:
        return json.loads(reply.text)
    except ValueError as error:
        raise PlacementError(
            f"the answer is not from a Ray dashboard: {reply.text[:80]!r}", hint=_UNREACHABLE
        ) from error


def _refusal(reply: WebReply) -> PlacementError:
    return PlacementError(
        f"Ray refused (HTTP {reply.status}): {reply.last_line()[:500]}", hint=_REFUSED
    )
