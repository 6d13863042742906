"""`tinkermq doctor` and `tinkermq pool`: this machine, the broker, and the pool's nodes."""

import asyncio
import contextlib
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from importlib.util import find_spec
from pathlib import Path

from ...broker.calls import SchedulerCalls
from ...broker.client.connection import Broker, connect, flush
from ...broker.client.faults import shown_url
from ...broker.nats_server import binary_path
from ...broker.presence import list_presences
from ...envs.sandbox.interpreters import LocalCodeSandbox, SandboxSettings
from ...envs.sandbox.served import SHORT_FOLDER, listen_at
from ...schemas.checks import CheckResult
from ...schemas.local.folder import temporary_folder
from ...schemas.machines import MachineList, MachineStatus
from ...schemas.metric import LOST_STEPS, Presence
from ...schemas.node import CLOCK_BOUND_S, NodeStatus, differences
from ...schemas.version import VERSION
from ...schemas.wire.errors import (
    ConfigError,
    EngineError,
    NotFoundError,
    SandboxError,
    TinkermqError,
    counted,
)
from ..base import quiet_logs
from ..home import Home, find_url
from ..pool import Pool
from .checks import (
    exit_code,
    finding,
    finding_of_problems,
    print_check,
    print_checks,
    run_process,
)
from .output import (
    duration,
    print_json,
    print_note,
    print_plain,
    print_table,
)
from .session import COMMON, Common, with_pool

# `tinkermq pool`: the pool's nodes, and the machines of a cluster.


def pool(*, common: Common = COMMON) -> int:
    """Show the pool's nodes, the machines requested from a cluster, their state and cost."""

    async def work(pool: Pool) -> tuple[list[NodeStatus], MachineList]:
        return await pool.nodes(), await pool.machines()

    nodes, machines = with_pool(common.nats_url, work)
    if common.json:
        document = {
            "nodes": [node.model_dump() for node in nodes],
            "machines": machines.model_dump(),
        }
        print_json(document)
        return 0
    rows = _rows(nodes, machines, time.time())
    if rows:
        print_table(("machine", "state", "slots", "used", "since", "time left", "waits for"), rows)
    else:
        print_note("no nodes: start one with `tinkermq node`, or machines with `tinkermq up --on`")
    for node in nodes:
        if node.gpus:
            print_plain(describe_gpus(node))
    if machines.on:
        print_plain(_summary(machines))
    if machines.trouble:
        print_note(f"no machines are added now: {machines.trouble}")
    for warning in [*package_differences(nodes), *clock_differences(nodes)]:
        print_note(warning)
    return 0


def describe_gpus(node: NodeStatus) -> str:
    """Return one line: a node's GPUs by model, and the slots that NVLink or a NUMA node joins."""
    models = Counter(gpu.model for gpu in node.gpus)
    parts = [", ".join(f"{count} × {model}" for model, count in models.items())]
    if node.groups_by == "nvlink":
        linked = [_slots(group) for group in node.groups if len(group) > 1]
        parts.append(f"NVLink joins slots {' and '.join(linked)}")
    numa: dict[int, list[int]] = {}
    for slot, gpu in enumerate(node.gpus):
        if gpu.numa is not None:
            numa.setdefault(gpu.numa, []).append(slot)
    parts += [f"NUMA node {place}: slots {_slots(slots)}" for place, slots in sorted(numa.items())]
    return f"{node.node}: {'; '.join(parts)}"


def _slots(slots: list[int]) -> str:
    """Return slots as a list in which neighbours are a range: `0-3, 6`."""
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and slot == runs[-1][-1] + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def package_differences(nodes: list[NodeStatus]) -> list[str]:
    """Describe package differences between nodes; a learner's ranks run on equal nodes only."""
    return [
        f"packages differ: {difference}"
        for difference in differences((node.node, node.packages) for node in nodes)
    ]


def clock_differences(nodes: list[NodeStatus]) -> list[str]:
    """Describe the nodes whose clocks are wrong, as measured by the scheduler."""
    warnings: list[str] = []
    for node in nodes:
        ahead_s = node.clock_ahead_s or 0.0
        if abs(ahead_s) > CLOCK_BOUND_S:
            side = "ahead of" if ahead_s > 0 else "behind"
            warnings.append(
                f"the clock of {node.node} is {abs(ahead_s):.1f} s {side} the scheduler's"
            )
    return warnings


def _rows(nodes: list[NodeStatus], machines: MachineList, now: float) -> list[tuple[object, ...]]:
    by_name = {node.node: node for node in nodes}
    rows = [
        _machine(machine, by_name.pop(machine.name, None), now) for machine in machines.machines
    ]
    return rows + [
        (node.node, "draining" if node.draining else "here", node.slots, _used(node), "", "", "")
        for node in by_name.values()
    ]


def _machine(machine: MachineStatus, node: NodeStatus | None, now: float) -> tuple[object, ...]:
    since = "" if machine.started is None else duration(now - machine.started)
    left = "" if machine.ends is None else duration(machine.ends - now)
    slots, used = (node.slots, _used(node)) if node is not None else ("", "")
    return (machine.name, machine.state, slots, used, since, left, machine.why)


def _used(node: NodeStatus) -> int:
    return len({slot for actor in node.actors for slot in actor.devices})


def _summary(machines: MachineList) -> str:
    """Return one line: requested machines, running machines, and cost."""
    states = Counter(machine.state for machine in machines.machines)
    counts = ", ".join(f"{states[name]} {name}" for name in ("asked", "coming", "here", "draining"))
    budget = machines.slot_hours_per_day
    of_budget = "" if budget is None else f" of {budget:g}"
    return (
        f"{machines.on}: {counts} ({machines.least} to {machines.most} machines of "
        f"{counted(machines.slots, 'slot')}), {machines.slot_hours:.2f}{of_budget} slot-hours today"
    )


_SLOW_S = 0.05
_CLOCK_S = 5.0
_ASK_S = 2.0
_BROKER_S = 3.0
_MIN_FREE_BYTES = 2 * 2**30
_MAX_RECORDS = 10
_GPU_NAME_CHARS = len("flash-attention")


def doctor(
    *,
    gpu: bool = False,
    common: Common = COMMON,
) -> int:
    """Check Python, packages, broker, scheduler, nodes, clock, model cache, GPU and disk.

    Parameters
    ----------
    gpu
        Check this machine's GPUs instead: versions, devices, NCCL, the attention kernel and the
        start of an engine. Seven minutes at most.
    """
    if gpu:
        return _check_gpus(as_json=common.json)
    quiet_logs()
    findings = [_python(), _packages(), _server_binary(), _gpu(), _model_cache(), _sandbox()]
    findings += [_temporary(), _disk(), *_pool(common.nats_url)]
    return print_checks(findings, as_json=common.json)


def _check_gpus(*, as_json: bool) -> int:
    """Run the GPU checks, which need torch, in a process of their own; return its exit code."""
    if find_spec("torch") is None:
        raise ConfigError(
            "torch is not installed, which the checks of GPUs need",
            hint="on a machine of the pool: pip install 'tinkermq[worker]'",
        )
    module = "tinkermq.actors.gpu_check"
    results: list[CheckResult] = []
    for result in run_process("gpus", module, error=EngineError, deadline_s=None):
        results.append(result)
        if not as_json:
            print_check(result, _GPU_NAME_CHARS)
    return print_checks(results, as_json=True) if as_json else exit_code(results)


def _python() -> CheckResult:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return finding("python", sys.version_info >= (3, 11), f"{detail}, {os.cpu_count()} cores")


def _packages() -> CheckResult:
    versions = [f"tinkermq {VERSION}"]
    for package in ("torch", "transformers"):
        try:
            versions.append(f"{package} {package_version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    hint = ""
    if find_spec("torch") is None:
        hint = "enough for a client; a machine of the pool needs: pip install 'tinkermq[worker]'"
    return finding("packages", True, ", ".join(versions), hint)


def _server_binary() -> CheckResult:
    try:
        return finding("nats-server", True, str(binary_path()))
    except TinkermqError as error:
        return finding("nats-server", False, error.message, error.hint)


def _gpu() -> CheckResult:
    tool = shutil.which("nvidia-smi")
    return finding("gpu", True, f"NVIDIA driver tools at {tool}" if tool else "none: CPU only")


def _model_cache() -> CheckResult:
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    count = len(list(folder.glob("models--*"))) if folder.is_dir() else 0
    return finding("model cache", True, f"{count} models in {folder}")


def _sandbox() -> CheckResult:
    """Run the sandbox's self-test; only games that run programs need it."""
    try:
        return finding("sandbox", True, LocalCodeSandbox(SandboxSettings(packages=[])).self_test())
    except SandboxError as error:
        return finding("sandbox", shutil.which("bwrap") is None, error.message, error.hint)


def _temporary() -> CheckResult:
    """Check that a sandboxed game can have a socket in the temporary folder, as on a node."""
    chosen = os.environ.get("TMPDIR", "")
    try:
        folder = tempfile.gettempdir()
        with temporary_folder("doctor") as place:
            listen_at(place / "socket").close()
    except OSError as error:
        return finding("temporary folder", False, str(error), SHORT_FOLDER)
    if chosen and folder != os.path.abspath(chosen):  # noqa: PTH100 - as tempfile does
        detail = f"TMPDIR={chosen} cannot be written: {folder} is used in its place"
        return finding("temporary folder", False, detail, "make the folder, or unset TMPDIR")
    return finding("temporary folder", True, f"{folder} takes files and sockets")


def _disk() -> CheckResult:
    folder = Home().folder
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    detail = f"{free / 2**30:.1f} GiB free at {folder}"
    hint = "" if free > _MIN_FREE_BYTES else "runs, logs and weights need some GiB"
    return finding("disk", free > _MIN_FREE_BYTES, detail, hint)


def _pool(nats_url: str | None) -> list[CheckResult]:
    """Check broker, JetStream, scheduler, nodes and clocks."""
    try:
        return asyncio.run(_check_broker(find_url(nats_url)))
    except TinkermqError as error:
        return [finding("broker", False, error.message, error.hint)]


async def _check_broker(url: str) -> list[CheckResult]:
    async with await connect(url, name="tinkermq-doctor", deadline_s=_BROKER_S) as broker:
        started = time.perf_counter()
        await flush(broker, waiting_for="the broker", deadline_s=_BROKER_S)
        trip_s = time.perf_counter() - started
        server = broker.nc.connected_server_version
        version = f"{server.major}.{server.minor}.{server.patch}"
        detail = f"nats-server {version} at {shown_url(broker.url)}, JetStream on, "
        detail += f"{trip_s * 1e3:.1f} ms away"
        findings = [finding("broker", trip_s < _SLOW_S, detail)]
        try:
            presences = [entry.value for entry in await list_presences(broker, "pool")]
        except NotFoundError:
            presences = []
        for role, hint in (("scheduler", "tinkermq up"), ("node", "tinkermq up")):
            actors = [presence.actor for presence in presences if presence.role == role]
            detail = ", ".join(actors) or f"no {role} sends heartbeats"
            findings.append(finding(role, bool(actors), detail, "" if actors else hint))
        findings.append(check_releases(presences))
        skew = max((abs(time.time() - presence.time) for presence in presences), default=0.0)
        findings.append(
            finding(
                "clock",
                skew < _CLOCK_S,
                f"heartbeats are at most {skew:.1f} s old",
                "" if skew < _CLOCK_S else "set the clocks of the machines by NTP",
            )
        )
        findings += [await _trouble(broker, presences), await _rewound(broker)]
        if any(presence.role == "scheduler" for presence in presences):
            findings += [await _records(broker), *await _machines(broker)]
        return findings


def check_releases(presences: Sequence[Presence]) -> CheckResult:
    """Compare the releases that the pool's processes run with this client's."""
    others = [
        f"{presence.actor} runs {presence.release or 'one before 0.1.0'}"
        for presence in presences
        if presence.release != VERSION
    ]
    hint = f"this client is tinkermq {VERSION}: install one release on all (docs/stability.md)"
    return finding_of_problems("releases", others, f"all run tinkermq {VERSION}", hint)


async def _machines(broker: Broker) -> list[CheckResult]:
    """Request the nodes from the scheduler, and check them."""
    try:
        nodes = await SchedulerCalls(broker).nodes()
    except TinkermqError as error:
        return [finding("machines", False, error.message, error.hint)]
    return check_nodes(nodes)


def check_nodes(nodes: "list[NodeStatus]") -> list[CheckResult]:
    """Check that nodes are equal, their actors are alive, and the broker kept its store."""
    same = "ranks of one learner need equal machines: install the same versions on all"
    silent = [
        f"no heartbeat of {actor.name} of job {actor.job} on {node.node} for {actor.silent_s:.0f} s"
        for node in nodes
        for actor in node.actors
        if actor.silent_s
    ]
    lost = [
        f"the broker came back empty, as {node.node} found at "
        f"{time.strftime('%F %T', time.localtime(node.store_lost))}"
        for node in nodes
        if node.store_lost is not None
    ]
    again = (
        "earlier runs are lost: restore the broker's folder from a copy, or its data with "
        "`tinkermq restore`; restart a node to accept the empty store"
    )
    frozen = "stopped, hung, or disconnected: their nodes restart them if this lasts"
    ntp = "set the clocks of the machines by NTP: times and costs depend on them, leases do not"
    return [
        finding_of_problems("machines", package_differences(nodes), "alike", same),
        finding_of_problems("clocks", clock_differences(nodes), "as the scheduler's", ntp),
        finding_of_problems("actors", silent, "all send heartbeats", frozen),
        finding_of_problems("store", lost, "nothing was lost", again),
    ]


async def _rewound(broker: Broker) -> CheckResult:
    """Describe the user's live runs whose steps the broker's store has lost."""
    own: list[Presence] = []
    with contextlib.suppress(NotFoundError):
        entries = await list_presences(broker, broker.user)
        own = [entry.value for entry in entries if LOST_STEPS in entry.value.numbers]
    if not own:
        return finding("logs of runs", True, "no live run has lost a step")
    steps = sum(presence.numbers[LOST_STEPS] for presence in own)
    return finding(
        "logs of runs",
        False,
        f"the broker's store was set back: {len(own)} runs have lost {steps:.0f} steps, and train "
        "them anew",
        "after a loss of power or from an old copy: sync each write (`sync_interval: always`); "
        "else check the disk of nats-server",
    )


async def _trouble(broker: Broker, presences: Sequence[Presence]) -> CheckResult:
    """Describe problems that block the pool and the user's runs: full disks, missing games."""
    with contextlib.suppress(NotFoundError):
        own = [entry.value for entry in await list_presences(broker, broker.user)]
        presences = [*presences, *own]
    blocked = [presence for presence in presences if presence.missing_since is not None]
    waits = {
        presence.waits_for: f"{presence.actor} waits for {presence.waits_for}"
        for presence in blocked
    }
    with contextlib.suppress(TinkermqError, TimeoutError):
        async with asyncio.timeout(_ASK_S):  # a node answers even if it can store no heartbeat
            trouble = await SchedulerCalls(broker).trouble()
            waits |= {trouble: f"the scheduler waits for {trouble}"} if trouble else {}
    hint = (
        "provide what is missing; if the disk of nats-server was full, make room and restart it "
        "(`systemctl restart tinkermq-nats`; `tinkermq up` restarts its own)"
    )
    fine = "no actor waits for something outside the pool"
    return finding_of_problems("going on", list(waits.values()), fine, hint)


async def _records(broker: Broker) -> CheckResult:
    """Describe the records of the pool that are ignored, with reasons."""
    try:
        damaged = await SchedulerCalls(broker).damaged()
    except TinkermqError as error:
        return finding("records", False, error.message, error.hint)
    if not damaged.total:
        return finding("records", True, "all can be read")
    lines = [
        f"{record.key} of {record.bucket}: {record.why}"
        for record in damaged.records[:_MAX_RECORDS]
    ]
    more = damaged.total - len(lines)
    if more:
        lines.append(f"and {more} more")
    detail = f"{damaged.total} are ignored: " + "; ".join(lines)
    hint = "update what another release wrote, and remove the others: `nats kv del BUCKET KEY`"
    return finding("records", False, detail, hint)
