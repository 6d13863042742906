"""`tinkermq deploy check`: check a machine that runs the units of deploy/.

systemd-analyze checks the units, and nats-server its configuration.
"""

import asyncio
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

from ...broker.client.server_info import read_server_info
from ...broker.jetstream.streams import REPLICAS_VARIABLE
from ...broker.nats_server import binary_path
from ...schemas.checks import CheckResult
from ...schemas.wire.errors import BrokerError, TinkermqError
from .checks import finding, print_checks
from .session import COMMON, Common
from .stack import LOOPBACK

_SERVICES = ("nats", "auth", "scheduler", "node", "gateway", "environment@")
_UNIT_FOLDERS = ("etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
_MIN_FREE_BYTES = 10 * 2**30
_EXPIRY_S = 14 * 24 * 3600
_TIMEOUT_S = 20


def check(*, root: Path = Path("/"), common: Common = COMMON) -> int:
    """Check units, users, folders, secrets, NATS configuration, certificates, clock and sandbox.

    Parameters
    ----------
    root
        Folder to treat as `/`, to check an image.
    """
    folders = [root / folder for folder in _UNIT_FOLDERS]
    candidates = (folder / f"tinkermq-{name}.service" for name in _SERVICES for folder in folders)
    units = list({path.name: path for path in candidates if path.is_file()}.values())
    findings = [_installed(units), *_verify_units(root, units), _accounts(root, units)]
    findings += [_environment(root), *_secrets(root), _nats_conf(root), _nats_access(root)]
    findings += [*_certificates(root), _storage(root), _clock(), _sandbox()]
    return print_checks(findings, as_json=common.json)


def _installed(units: list[Path]) -> CheckResult:
    if not units:
        return finding(
            "units",
            False,
            "no tinkermq unit is installed",
            "cp deploy/systemd/* /etc/systemd/system",
        )
    return finding("units", True, ", ".join(path.stem for path in units))


def _verify_units(root: Path, units: list[Path]) -> list[CheckResult]:
    """Check the units with `systemd-analyze verify`, also that their programs exist."""
    program = shutil.which("systemd-analyze")
    if program is None:
        return [finding("systemd", True, "units not verified: systemd-analyze is not installed")]
    if not units:
        return []
    command = [program, "verify", "--man=no", "--recursive-errors=no"]
    if root != Path("/"):
        command.append(f"--root={root.absolute()}")
    names = [unit.name.replace("@.", "@check.") for unit in units]
    done = subprocess.run([*command, *names], capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    problems = {unit: [line for line in lines if unit.stem in line] for unit in units}
    if done.returncode and not any(problems.values()):  # systemd before 250 lacks the options
        return [finding("systemd", True, f"units not verified: {' '.join(lines)}")]
    return [
        finding(
            unit.stem,
            not problems[unit],
            "; ".join(problems[unit]) or "verified by systemd-analyze",
            f"correct {unit}, or install what it needs" if problems[unit] else "",
        )
        for unit in units
    ]


def _accounts(root: Path, units: list[Path]) -> CheckResult:
    """Check that the users that the units run as exist."""
    names = {"tinkermq-nats" if unit.stem == "tinkermq-nats" else "tinkermq" for unit in units}
    passwd = root / "etc/passwd"
    lines = _text(passwd).splitlines() if passwd.is_file() else []
    missing = sorted(names - {line.split(":")[0] for line in lines})
    if missing:
        hint = "cp deploy/etc/sysusers.conf /usr/lib/sysusers.d/tinkermq.conf && systemd-sysusers"
        return finding("accounts", False, f"no user {', '.join(missing)}", hint)
    return finding("accounts", True, ", ".join(sorted(names)) or "none needed")


def _environment(root: Path) -> CheckResult:
    """Check the variables that all services share."""
    path = root / "etc/tinkermq/tinkermq.env"
    if not path.is_file():
        return finding("environment", False, f"{path} is not there", "cp deploy/etc/tinkermq.env")
    values = _variables(path)
    if not re.match(r"(nats|tls)://", values.get("TINKERMQ_NATS_URL", "")):
        return finding("environment", False, "TINKERMQ_NATS_URL is not set", f"edit {path}")
    if values.get(REPLICAS_VARIABLE, "1") not in ("1", "3", "5"):
        detail = f"{REPLICAS_VARIABLE}={values[REPLICAS_VARIABLE]}"
        return finding("environment", False, detail, "use 1, or 3 on a cluster of three")
    return finding("environment", True, values["TINKERMQ_NATS_URL"])


def _text(path: Path) -> str:
    """Return the text of a file, which may contain invalid UTF-8, for example names in passwd."""
    return path.read_text(encoding="utf-8", errors="replace")


def _variables(path: Path) -> dict[str, str]:
    """Return the variables that an environment file sets; their values may be quoted."""
    lines = _text(path).splitlines() if path.is_file() else []
    pairs = (line.split("=", 1) for line in lines if "=" in line and line[0] not in "#;")
    return {name.strip(): value.strip().strip("\"'") for name, value in pairs}


def _secrets(root: Path) -> list[CheckResult]:
    """Check that files with secrets are not readable by others."""
    folder = root / "etc/tinkermq"
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _is_public(path)]
    exposed = [path for path in paths if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH)]
    if exposed:
        hint = f"chmod o= {' '.join(map(str, exposed))}"
        return [finding("secrets", False, f"everybody may read {exposed[0]}", hint)]
    return [finding("secrets", True, f"{len(paths)} files that others cannot read")]


def _is_public(path: Path) -> bool:
    return path.suffix in (".crt", ".pem") and "key" not in path.stem


def _nats_conf(root: Path) -> CheckResult:
    """Check the configuration of this machine's nats-server with `nats-server -t`."""
    config = root / "etc/tinkermq/nats.conf"
    if not config.is_file():
        return finding("nats.conf", True, "none: the server runs on another machine")
    try:
        done = subprocess.run(
            [str(binary_path()), "-t", "-c", str(config)],
            env=os.environ | _variables(config.with_name("nats.env")),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (TinkermqError, OSError, subprocess.TimeoutExpired) as error:
        return finding("nats.conf", False, str(error), f"check {config}")
    output = (done.stderr or done.stdout).strip().splitlines()
    detail = output[-1] if output else "nats-server printed nothing"
    return finding(
        "nats.conf", done.returncode == 0, detail, f"correct {config}" if done.returncode else ""
    )


def _nats_access(root: Path) -> CheckResult:
    """Check that a server which other machines reach requires keys and encryption."""
    url = _variables(root / "etc/tinkermq/tinkermq.env").get("TINKERMQ_NATS_URL")
    if url is None:
        return finding("nats access", True, "not checked: TINKERMQ_NATS_URL is not set")
    try:
        info = asyncio.run(read_server_info(url))
    except BrokerError as error:
        return finding("nats access", True, f"not checked: {error.message}")
    host = str(info.get("host"))
    lacks = [
        name
        for name, key in (("users", "auth_required"), ("TLS", "tls_required"))
        if not info.get(key)
    ]
    if lacks and host not in LOOPBACK:
        hint = 'include "accounts.conf" of `tinkermq init --home /etc/tinkermq`, and set tls { … }'
        detail = f"the server listens on {host} without {' and '.join(lacks)}"
        return finding("nats access", False, detail, f"{hint}; or listen on 127.0.0.1")
    secured = "" if lacks else ", with users and TLS"
    return finding("nats access", True, f"the server listens on {host}{secured}")


def _certificates(root: Path) -> list[CheckResult]:
    """Check that the certificates are valid for at least two more weeks."""
    openssl = shutil.which("openssl")
    findings: list[CheckResult] = []
    for path in sorted((root / "etc/tinkermq/tls").glob("*.crt")):
        if openssl is None:
            return [finding("tls", False, "openssl is not installed", "apt-get install openssl")]
        command = [openssl, "x509", "-in", str(path), "-noout", "-enddate"]
        done = subprocess.run(
            [*command, "-checkend", str(_EXPIRY_S)], capture_output=True, text=True, check=False
        )
        detail = (done.stdout or done.stderr).strip().splitlines() or ["unreadable"]
        hint = "" if done.returncode == 0 else "renew it"
        findings.append(finding(f"tls {path.stem}", done.returncode == 0, detail[0], hint))
    return findings


def _storage(root: Path) -> CheckResult:
    """Check that there is disk space for messages and runs."""
    folder = root / "var/lib"
    if not folder.is_dir():
        return finding("storage", False, f"{folder} is not there")
    free = shutil.disk_usage(folder).free
    hint = "" if free >= _MIN_FREE_BYTES else "free some space, or mount a larger disk"
    return finding("storage", not hint, f"{free / 2**30:.0f} GiB free in {folder}", hint)


def _clock() -> CheckResult:
    """Check that the clock is synchronised: it decides on expired keys and the order of events."""
    program = shutil.which("timedatectl")
    if program is None:
        return finding("clock", True, "not known: there is no timedatectl")
    done = subprocess.run(
        [program, "show", "-p", "NTPSynchronized", "--value"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    output = done.stdout.strip()
    if output not in ("yes", "no"):
        return finding("clock", True, "not known: systemd does not run here")
    hint = "" if output == "yes" else "timedatectl set-ntp true"
    return finding("clock", not hint, f"synchronised: {output}", hint)


def _sandbox() -> CheckResult:
    """Check that processes may create the namespaces that the sandbox of games needs."""
    if os.name != "posix" or shutil.which("unshare") is None:
        return finding("namespaces", False, "no unshare on this machine", "use Linux")
    if shutil.which("bwrap") is None:
        return finding("namespaces", False, "there is no bubblewrap", "apt-get install bubblewrap")
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount", "true"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        hint = "sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0"
        return finding("namespaces", False, done.stderr.strip(), hint)
    return finding("namespaces", True, "may be made, so the sandbox of games works")
