"""`tinkermq up` and `tinkermq down`."""

import contextlib
import importlib.util
import json as json_module
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast
from urllib.parse import urlsplit

from cyclopts import Parameter
from cyclopts.validators import Number

from ...broker.client.faults import shown_url
from ...broker.client.login import KEY_VARIABLE
from ...broker.credentials import PoolSecrets
from ...broker.nats_server import SYNC_INTERVAL
from ...schemas.local.process import die_with
from ...schemas.machines import machines_config
from ...schemas.wire.errors import (
    ConfigError,
    DeadlineError,
    StateError,
    TinkermqError,
    error_from_reply,
)
from ..home import HOME_VARIABLE, Home, StackState, default_folder
from .output import (
    duration,
    literal,
    print_commands,
    print_json,
    print_note,
    print_plain,
    print_text,
)

if TYPE_CHECKING:
    from .supervisor import StackOptions

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
UP_DEADLINE_S = 660.0
"""Time limit of a start; a broker first reads its store, which may be large."""
PATIENCE_S = 15.0
DOWN_DEADLINE_S = 60.0
GATEWAY_PORT = 8780
NATS_PORT = 4222
_NEEDS = ("torch", "transformers", "safetensors", "peft", "psutil")
_EXAMPLES = ("examples/calculator.yaml", "outputs/quickstart.yaml")
"""Of a checkout, and of a quickstart in this folder."""
_POLL_S = 0.1
_GATEWAY_NEEDS = ("starlette", "uvicorn", "sse_starlette", "jinja2", "prometheus_client")


def up(
    *,
    nats_url: str | None = None,
    host: str = "127.0.0.1",
    port: Annotated[int | None, Parameter(validator=Number(gte=0, lte=65535))] = None,
    sync_interval: str = "always",
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    slots: int | None = None,
    store: Path | None = None,
    gateway_port: Annotated[int | None, Parameter(validator=Number(gte=0, lte=65535))] = None,
    no_gateway: bool = False,
    on: str | None = None,
    foreground: bool = False,
    json: bool = False,
) -> int:
    """Start broker, scheduler, one node and the dashboard on this machine, unless they run.

    They run in the background until `tinkermq down`, and each is restarted if it dies. In a
    folder where `tinkermq init` has created secrets, the broker requires a key.

    Parameters
    ----------
    nats_url
        Use a running NATS server (with JetStream) instead of starting one.
    host
        Address that the server listens on; other than loopback only with authentication.
    tls_cert
        Certificate of the server in PEM format, to encrypt connections.
    tls_key
        Its private key.
    port
        Port of the started server; default: 4222, 0: a free one.
    sync_interval
        How often the started server syncs its store to the disk: always, or a time such as 10s,
        which is faster on slow disks. Messages of that time are lost when the machine loses power.
    slots
        Slots of the node; default: its GPUs, or its CPU cores.
    store
        Folder of state, logs and stored messages; default: $TINKERMQ_HOME, or
        ~/.local/share/tinkermq.
    gateway_port
        Port of the dashboard; default: 8780, or a free one if that is taken.
    no_gateway
        Start no dashboard.
    on
        Start no node here, but request machines as the queue needs them, and release them, from
        slurm:PARTITION, ray:ADDRESS, or as a YAML file says (docs/clusters.md).
    foreground
        Run in the foreground until Ctrl-C.
    json
        Print JSON.
    """
    _check_numbers(slots, sync_interval)
    folder = (store or default_folder()).resolve()
    _check_listening(Home(folder), host, nats_url, tls_cert, tls_key)
    running = Home(folder).read_running_stack()
    from .supervisor import StackOptions

    options = StackOptions(
        home=folder,
        nats_url=nats_url,
        host=host,
        port=NATS_PORT if port is None else port or None,
        sync_interval=sync_interval,
        tls_cert=tls_cert.resolve() if tls_cert else None,
        tls_key=tls_key.resolve() if tls_key else None,
        slots=slots,
        on=_machines(on, slots),
    )
    if running is not None:
        chosen = options.model_dump(mode="json", exclude_defaults=True, exclude={"home", "port"})
        chosen |= {"port": port or None, "gateway_port": gateway_port or None}
        _refuse_other(running, {**chosen, "no_gateway": no_gateway or None})
        if not json:
            print_note("a stack is up already; `tinkermq down` stops it")
    else:
        if on is None:
            check_worker("`up` starts a node on this machine")
        gateway = None if no_gateway else _gateway_port(gateway_port, any_port=port == 0)
        options = options.model_copy(update={"gateway_port": gateway})
        if foreground:
            return _hold(options, as_json=json)
        running = start_detached(options)
    _show(running, as_json=json)
    return 0


def _refuse_other(running: StackState, chosen: Mapping[str, Any]) -> None:
    """Refuse options that a running stack was not started with."""
    own = {
        **running.options,
        "port": urlsplit(running.url).port,
        "gateway_port": urlsplit(running.gateway or "").port,
        "no_gateway": running.gateway is None,
    }
    other = [name for name, value in chosen.items() if value is not None and value != own.get(name)]
    if other:
        options = ", ".join(f"--{name.replace('_', '-')} {chosen[name]}" for name in other)
        raise StateError(
            f"a stack is up already, at {shown_url(running.url)}, and was started without "
            f"{options.replace(' True', '')}",
            hint="stop it first: `tinkermq down`; or start another one: `--store FOLDER`",
        )


def check_worker(what: str = "the quickstart trains on this machine") -> None:
    """Raise ConfigError if the packages for `what` are not installed."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what}, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed here",
            hint="pip install 'tinkermq[worker]'",
        )


def down(*, store: Path | None = None, json: bool = False) -> int:
    """Stop what `tinkermq up` started; harmless when nothing runs.

    Running jobs write a checkpoint and continue at the next `up`.

    Parameters
    ----------
    store
        Folder of the stack, as given to `up`.
    json
        Print JSON.
    """
    home = Home(store.resolve() if store else None)
    state = home.read_running_stack()
    if state is not None:
        stop_detached(home, state)
    if json:
        print_json({"stopped": state is not None, "home": str(home.folder)})
    else:
        print_plain("stopped" if state is not None else f"no stack is up in {home.folder}")
    return 0


def _gateway_port(port: int | None, *, any_port: bool) -> int | None:
    """Return the port of the dashboard, 0 for a free one; None when it is not installed."""
    if any(importlib.util.find_spec(name) is None for name in _GATEWAY_NEEDS):
        if port is not None:
            raise ConfigError(
                "the dashboard is not installed", hint="pip install 'tinkermq[gateway]'"
            )
        print_note("without dashboard: pip install 'tinkermq[gateway]'")
        return None
    if port:
        return _free_port(port)
    if port == 0 or any_port:
        return 0
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", GATEWAY_PORT)):
        return GATEWAY_PORT
    return 0


def _free_port(port: int) -> int:
    """Return a port of this machine if it can be listened on; raises ConfigError."""
    try:
        with socket.create_server(("127.0.0.1", port)):
            return port
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the dashboard cannot listen on port {port}: {error}",
            hint="choose another port, or 0 for a free one: --gateway-port N",
        ) from error


def _machines(on: str | None, slots: int | None) -> str | None:
    """Check the source of machines and return it, a file with its absolute path."""
    if on is None:
        return None
    machines_config(on)
    if slots is not None:
        raise ConfigError(
            "--slots are those of a node here, and with --on there is none",
            hint="give the slots of a machine as `slots:` of a YAML file (docs/clusters.md)",
        )
    return on if ":" in on or on == "none" else str(Path(on).resolve())


def _check_numbers(slots: int | None, sync_interval: str) -> None:
    if slots is not None and slots < 1:
        raise ConfigError(f"--slots is {slots}", hint="give at least 1")
    if not SYNC_INTERVAL.fullmatch(sync_interval):
        raise ConfigError(
            f"--sync-interval is {sync_interval!r}", hint="give always, or a time such as 10s or 2m"
        )


def _check_listening(
    home: Home, host: str, nats_url: str | None, tls_cert: Path | None, tls_key: Path | None
) -> None:
    """Refuse a broker open to other machines without keys, and a certificate without its key."""
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together", hint="give both, or neither")
    is_secured = PoolSecrets(home.secrets).exist
    if host not in LOOPBACK and not is_secured:
        raise ConfigError(
            f"a broker on {host} without authentication could be used by anyone",
            hint="create users first: `tinkermq init`",
        )
    if nats_url is not None and is_secured:
        raise ConfigError(
            f"{home.folder} has secrets for its own broker, not for {shown_url(nats_url)}",
            hint="start the actors by hand with their credentials (docs/security.md)",
        )


def start_detached(options: "StackOptions", *, die_with_parent: bool = False) -> StackState:
    """Start a supervisor in the background and wait until its stack is up.

    With `die_with_parent` the kernel stops it when this process ends, in whatever way.
    Raises the supervisor's error, or DeadlineError.
    """
    logs = Home(options.home).logs
    logs.mkdir(parents=True, exist_ok=True)
    log_path = logs / "supervisor.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "tinkermq.clients.cli.supervisor",
                options.model_dump_json(),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with(os.getpid(), signal.SIGTERM) if die_with_parent else None,
        )
    try:
        line = _first_line(process)
    except KeyboardInterrupt:
        process.terminate()  # it stops its own children
        raise
    if line is None:
        process.kill()
        process.wait()
        raise DeadlineError(
            f"the stack did not come up within {UP_DEADLINE_S:.0f} s", hint=f"see {log_path}"
        )
    if not line:
        last = log_path.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]
        raise TinkermqError(
            f"the supervisor of the stack ended with code {process.wait()}: {last}",
            hint=f"see {log_path}",
        )
    message = cast("dict[str, Any]", json_module.loads(line))
    if "error" in message:
        process.wait()
        raise error_from_reply(**message["error"])
    # The supervisor outlives this process on purpose.
    process.returncode = 0
    return StackState.model_validate(message["state"])


def _first_line(process: "subprocess.Popen[bytes]") -> bytes | None:
    """Return the line of a supervisor, empty if it ended without one; None after the deadline."""
    assert process.stdout is not None
    with process.stdout as pipe:
        readable, _, _ = select.select([pipe], [], [], PATIENCE_S)
        if not readable:
            print_note("starting: a broker with a large store takes some minutes to read it")
            readable, _, _ = select.select([pipe], [], [], UP_DEADLINE_S - PATIENCE_S)
        return pipe.readline() if readable else None


def stop_detached(home: Home, state: StackState) -> None:
    """Stop a supervisor and wait until it has released its folder."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_DEADLINE_S
    while home.is_locked():
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the supervisor (process {state.pid}) has not ended after {DOWN_DEADLINE_S:.0f} s",
                hint=f"see {home.logs}; `kill -9 {state.pid}` ends it and what it started",
            )
        time.sleep(_POLL_S)


def _hold(options: "StackOptions", *, as_json: bool) -> int:
    from .supervisor import Supervisor

    Supervisor(options).run(lambda state: _show(state, as_json=as_json, foreground=True))
    print_note("stopped")
    return 0


def _show(state: StackState, *, as_json: bool, foreground: bool = False) -> None:
    if as_json:
        print_json(state.model_dump())
        return
    age = time.time() - state.started
    url, home = literal(shown_url(state.url)), literal(state.home)
    print_text(f"[bold green]up[/]  {url}  (since {duration(age)}, state and logs in {home})")
    if state.gateway:
        print_text(f"  dashboard  [bold]{state.gateway}[/]")
    if Path(state.home) != default_folder().resolve():
        print_text(f"  other commands find it with [bold]{HOME_VARIABLE}={home}[/]")
    if "auth" in state.children and not os.environ.get(KEY_VARIABLE):
        print_text(f"  it requires a key: set {KEY_VARIABLE}")
    if foreground:
        print_text("  Ctrl-C stops it")
        return
    example = next((path for path in _EXAMPLES if Path(path).is_file()), "CONFIG.yaml")
    print_commands(
        {
            f"tinkermq train {example}": "train a model",
            "tinkermq env new my-game": "a game of your own, with its configuration",
            "tinkermq ps": "list runs",
            "tinkermq down": "stop everything",
        }
    )
