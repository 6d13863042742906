"""A real Slurm on this machine, as root: munge, one slurmctld and several slurmd."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.waiting import PATIENCE_S

PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo")
_DEADLINE_S = 60.0


ACCOUNTING = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db")
_PACKAGES = "slurmctld slurmd slurm-client munge"


def lacking(*more: str) -> str:
    """Say what this machine lacks to run Slurm, and `more` of it; empty if nothing."""
    missing = [name for name in (*PROGRAMS, *more) if shutil.which(name) is None]
    if missing:
        packages = _PACKAGES + (" slurmdbd mariadb-server-core mariadb-client-core" if more else "")
        return f"no {', '.join(missing)}: apt-get install {packages}"
    return "" if os.geteuid() == 0 else "several slurmd on one machine need root"


class Slurm:
    """A cluster of nodes of two cores each; its partition `p` preempts what runs in `low`."""

    def __init__(
        self, folder: Path, num_nodes: int = 3, *, settings: str = "", accounting: bool = False
    ) -> None:
        self.folder = folder
        self.num_nodes = num_nodes
        self._settings = settings
        self._accounting = accounting
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Slurm":
        self.folder.mkdir(parents=True)
        try:
            self._start_munge()
            if self._accounting:
                self._start_accounting()
            self._write()
            if self._accounting:
                self.tell("sacctmgr", "-i", "add", "cluster", "test")
            self._run("slurmctld", "-D", "-f", self.environment["SLURM_CONF"])
            for number in range(1, self.num_nodes + 1):
                self._run("slurmd", "-D", "-N", f"n{number}", "-f", self.environment["SLURM_CONF"])
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def tell(self, *command: str) -> str:
        """Run one of Slurm's commands; return what it wrote."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        return done.stdout

    def jobs(self) -> list[str]:
        """Return names and states of what is in the queue."""
        return self.tell("squeue", "--noheader", "--format=%j %T").splitlines()

    def _start_munge(self) -> None:
        account = pwd.getpwnam("munge")
        folder = Path("/tmp") / f"munge-{os.getpid()}"  # its socket's path must be short and open
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o755)
        key = folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for path in (folder, key):
            os.chown(path, account.pw_uid, account.pw_gid)
        self._socket = folder / "socket"
        self._run(
            "munged",
            "--foreground",
            f"--key-file={key}",
            f"--socket={self._socket}",
            f"--pid-file={folder / 'pid'}",
            f"--log-file={folder / 'log'}",
            f"--seed-file={folder / 'seed'}",
            user="munge",
        )
        _until(self._socket.exists, "munged")

    def _start_accounting(self) -> None:
        """Start slurmdbd, which keeps accounts and their limits, and its database."""
        data, (database, port) = self.folder / "database", _free_ports(2)
        plain = ("--no-defaults", f"--datadir={data}", "--user=root")
        subprocess.run(
            ("mariadb-install-db", *plain), check=True, capture_output=True, timeout=PATIENCE_S
        )
        listen = ("--bind-address=127.0.0.1", f"--port={database}", "--skip-grant-tables")
        self._run("mariadbd", *plain, *listen, f"--socket={data}/socket")
        _until((data / "socket").exists, "mariadbd")
        config = self.folder / "slurmdbd.conf"
        config.write_text(f"""
AuthType=auth/munge
AuthInfo=socket={self._socket}
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=root
LogFile={self.folder}/slurmdbd.log
PidFile={self.folder}/slurmdbd.pid
""")
        config.chmod(0o600)
        self._run("slurmdbd", "-D")
        _until(lambda: _answers(port), "slurmdbd")
        self._settings += f"""
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={self._socket}
AccountingStorageEnforce=associations,limits,qos
"""

    def _write(self) -> None:
        host, ports = socket.gethostname().split(".")[0], _free_ports(self.num_nodes + 1)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        nodes = "\n".join(
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 "
            "RealMemory=4000 State=UNKNOWN"
            for number, port in enumerate(ports[1:], 1)
        )
        lines = f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={self._socket}
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
ReturnToService=2
KillWait=20
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
{self._settings}
"""
        Path(self.environment["SLURM_CONF"]).write_text(lines, encoding="utf-8")

    def _run(self, *command: str, user: str | None = None) -> None:
        name = f"{command[0]}-{len(self._processes)}.out"
        with (self.folder / name).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=user,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )
        self._processes.append(process)

    def _wait(self) -> None:
        def up() -> bool:
            try:
                states = self.tell("sinfo", "--noheader", "--Node", "--partition=p", "--format=%T")
            except subprocess.CalledProcessError:
                return False
            return states.split() == ["idle"] * self.num_nodes

        _until(up, "all nodes of Slurm")


def _until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come up within {_DEADLINE_S:g} s")
        time.sleep(0.2)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
