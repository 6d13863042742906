"""A machine on which systemd runs, in namespaces of this one: the units of deploy/ as they stand.

The machine has a root folder, processes, a network and cgroups of its own; of this one it sees
`/usr`, Python with its packages as `/opt/tinkermq`, the repository as `/src`, and a folder of the
test as `/srv`. What its services print is in `/run/log/UNIT`. Needs root, systemd, util-linux and
iproute2.
"""

import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

from tinkermq.schemas.local.process import die_with

from tests.support.configs import REPOSITORY
from tests.support.waiting import PATIENCE_S, until
from tests.support.wheel import ROOMS

SYSTEMD = Path("/usr/lib/systemd/systemd")
_TARGETS = ("sysinit", "basic", "multi-user", "network-online", "shutdown", "machine")
_IN_SRC = ("sh", "-c", 'cd /src && exec "$@"', "sh")
_IS_UP = ("systemctl", "is-active", "machine.target")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$1"
cd "$1"
mkdir -p usr etc/systemd/system proc sys dev run tmp var/lib var/cache opt root home src srv old
for link in bin sbin lib lib64; do ln -s usr/$link $link; done
mount --bind /usr usr
mount -o remount,bind,ro usr
mount -t tmpfs -o mode=755 tmpfs usr/lib/systemd/system
for name in {targets}; do
  printf '[Unit]\\nDefaultDependencies=no\\n' > usr/lib/systemd/system/$name.target
done
cp -L /etc/services etc/
printf '127.0.0.1 localhost machine\\n' > etc/hosts
printf 'root:x:0:0::/root:/bin/sh\\nnobody:x:65534:65534::/:/bin/false\\n' > etc/passwd
printf 'root:x:0:\\nnogroup:x:65534:\\n' > etc/group
printf '00000000000000000000000000000001\\n' > etc/machine-id
mkdir -p etc/systemd/system/service.d etc/sysusers.d etc/tmpfiles.d
printf '[Service]\\nStandardOutput=append:/run/log/%%n\\nStandardError=inherit\\n' \\
  > etc/systemd/system/service.d/log.conf
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
{cgroups}
mount -t tmpfs -o mode=755 tmpfs dev
for name in {devices}; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mkdir dev/pts dev/shm dev/mqueue
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=755 tmpfs run
mkdir run/log
mount -t tmpfs -o mode=1777 tmpfs tmp
mkdir -p opt/python opt/tinkermq/bin opt/upper opt/work
mount --bind {python} opt/python
mount --bind {repository} src
mount --bind "$2" srv
python=$(ls opt/python/bin | grep -E '^python3\\.[0-9]+$' | head -1)
site=opt/tinkermq/lib/$python/site-packages
mkdir -p $site
mount -t overlay -o lowerdir={packages},upperdir=opt/upper,workdir=opt/work overlay $site
mkdir $site/tinkermq
cp src/package/__init__.py $site/tinkermq
for room in {rooms}; do
  mkdir $site/tinkermq/$room
  mount --bind src/$room $site/tinkermq/$room
done
ln -s /opt/python/bin/$python opt/tinkermq/bin/python
ln -s python opt/tinkermq/bin/$python
printf 'home = /opt/python/bin\\ninclude-system-site-packages = false\\n' > opt/tinkermq/pyvenv.cfg
cp {nats_server} opt/tinkermq/bin/nats-server
sed '1s,.*,#!/opt/tinkermq/bin/python,' {tinkermq} > opt/tinkermq/bin/tinkermq
chmod 755 opt/tinkermq/bin/tinkermq
(echo /opt/python/lib && cat /etc/ld.so.conf.d/*.conf) > etc/ld.so.conf
ldconfig -r .
ip link set lo up
pivot_root . old
umount -l /old
rmdir /old
mount --make-rshared /
exec env -i container=test PATH=/usr/sbin:/usr/bin {systemd} --system --unit=machine.target \\
  --show-status=no --log-target=console --log-level=notice
"""


class Machine:
    """A machine with systemd: starts with `start`, and ends with `close` or with the test."""

    def __init__(self, folder: Path, shared: Path) -> None:
        """Keep the machine's boot script and its messages in `folder`; `/srv` is `shared`."""
        self._folder = folder
        self._shared = shared
        self._groups = [mount / f"tmq-{os.getpid()}" for mount in _own_cgroups().values()]
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    async def start(self) -> None:
        """Boot, until systemd takes commands."""
        self._process = self._boot()
        await until(lambda: self._find_first() and not self.call(*_IS_UP)[0], "systemd")

    def _boot(self) -> subprocess.Popen[bytes]:
        root = self._folder / "root"
        root.mkdir(parents=True)
        boot = self._folder / "boot.sh"
        boot.write_text(_boot_script())
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--cgroup", "--uts"]
        words += ["--ipc", "--net", "sh", str(boot), str(root), str(self._shared)]
        for group in self._groups:
            group.mkdir()
            if (group / "cgroup.clone_children").exists():  # version 1, whose cpusets start empty
                for setting in (group / "cpuset.cpus", group / "cpuset.mems"):
                    if setting.exists():
                        setting.write_text((group.parent / setting.name).read_text())
        enters = "".join(f"echo $$ > {group}/cgroup.procs\n" for group in self._groups)
        with (self._folder / "messages").open("wb") as messages:
            return subprocess.Popen(
                ["sh", "-ec", f"{enters}exec {shlex.join(words)}"],
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
                preexec_fn=die_with(os.getpid()),
            )

    def _find_first(self) -> bool:
        """Return whether the machine has its first process; raise if it has ended."""
        assert self._process is not None
        number = self._process.pid
        assert self._process.poll() is None, (self._folder / "messages").read_text()
        children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        self._pid = int(children[0]) if children else 0
        return bool(children)

    def call(self, *command: str, **environment: str) -> tuple[int, str]:
        """Run a command as the machine's root, in `/src`; return its exit code and output."""
        variables = {"PATH": "/usr/sbin:/usr/bin", "HOME": "/root", **environment}
        done = subprocess.run(
            ["nsenter", "-t", str(self._pid), "-a", "--root", *_IN_SRC, *command],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S * 4,
            check=False,
        )
        return done.returncode, done.stdout

    def run(self, *command: str, **environment: str) -> str:
        """Run a command that must succeed; return its output."""
        code, output = self.call(*command, **environment)
        assert code == 0, f"{shlex.join(command)}\n{output}\n{self.logs()}"
        return output

    def logs(self) -> str:
        """Return the last lines of what systemd and the services have printed."""
        messages = (self._folder / "messages").read_text()[-3000:]
        return messages + self.call("sh", "-c", "tail -n 12 /run/log/*")[1]

    async def close(self) -> None:
        """End all processes of the machine, and remove its cgroups."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for group in self._groups:
            if group.exists():
                await until(partial(_is_empty, group), "the end of the machine")
                for each in [*sorted(group.rglob("*/"), reverse=True), group]:
                    each.rmdir()


def _is_empty(group: Path) -> bool:
    return not any(file.read_text() for file in group.rglob("cgroup.procs"))


def _own_cgroups() -> dict[str, Path]:
    """Return this process's cgroup in each hierarchy, by the hierarchy's controllers."""
    found: dict[str, Path] = {}
    mounted: dict[str, str] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup2":
            mounted[""] = place
        elif kind == "cgroup":
            mounted |= dict.fromkeys(options.split(","), place)
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        place = mounted.get(controllers.split(",")[0])
        if place is not None:
            found[controllers] = Path(place + path)
    return found


def _boot_script() -> str:
    hierarchies = _own_cgroups()
    mounts = ["mount -t tmpfs -o mode=755 tmpfs sys/fs/cgroup"] if set(hierarchies) != {""} else []
    for name in hierarchies:
        if not mounts:
            mounts.append("mount -t cgroup2 cgroup2 sys/fs/cgroup")
            break
        folder = name.removeprefix("name=") or "unified"
        kind = "-t cgroup2 cgroup2" if not name else f"-t cgroup -o {name} cgroup"
        kind = kind.replace("-o name=", "-o none,name=")
        mounts.append(f"mkdir sys/fs/cgroup/{folder}\nmount {kind} sys/fs/cgroup/{folder}")
    programs = Path(sys.executable).parent
    (packages,) = (path for path in sys.path if Path(path).name == "site-packages")
    return _BOOT.format(
        targets=" ".join(_TARGETS),
        devices=" ".join(_DEVICES),
        rooms=" ".join(ROOMS),
        cgroups="\n".join(mounts),
        python=shlex.quote(sys.base_prefix),
        packages=shlex.quote(packages),
        repository=shlex.quote(str(REPOSITORY)),
        nats_server=shlex.quote(str(programs / "nats-server")),
        tinkermq=shlex.quote(str(programs / "tinkermq")),
        systemd=SYSTEMD,
    )
