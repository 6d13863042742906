"""`tinkermq deploy check`: check a machine that runs the units of deploy/.

systemd-analyze checks the units, and nats-server its configuration.
"""

import asyncio
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Mapping
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
_TEMPLATE = "tinkermq-environment@"
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
    findings += [_environment(root), _credentials(root, units), _secrets(root)]
    findings += [_nats_conf(root), _nats_access(root)]
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


def _values(unit: Path, name: str) -> list[str]:
    """Return the values of a setting of a unit."""
    lines = _text(unit).splitlines()
    return [line.split("=", 1)[1].strip() for line in lines if line.startswith(f"{name}=")]


def _accounts(root: Path, units: list[Path]) -> CheckResult:
    """Check that the users and the group that the units run as exist."""
    missing: set[str] = set()
    for setting, file in (("User", "passwd"), ("Group", "group"), ("SupplementaryGroups", "group")):
        path = root / "etc" / file
        lines = _text(path).splitlines() if path.is_file() else []
        named = {value for unit in units for value in _values(unit, setting)}
        missing |= named - {line.split(":")[0] for line in lines}
    if missing:
        hint = "cp deploy/etc/sysusers.conf /etc/sysusers.d/tinkermq.conf && systemd-sysusers"
        return finding("accounts", False, f"no user or group {', '.join(sorted(missing))}", hint)
    return finding("accounts", True, "the users and groups of the units exist")


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


def _credentials(root: Path, units: list[Path]) -> CheckResult:
    """Check that some service has all secrets that systemd is to hand to it."""
    lacks: dict[str, list[str]] = {}
    for unit in units:
        sources = [value.partition(":")[2] for value in _values(unit, "LoadCredential")]
        paths = [source for source in sources if "%" not in source]  # not those of a template
        lacks[unit.stem] = [path for path in paths if not (root / path.lstrip("/")).is_file()]
    without = [f"{name} ({paths[0]})" for name, paths in lacks.items() if paths]
    if not without:
        return finding("credentials", True, "every service has its secrets")
    detail = f"on this machine these services cannot start: {', '.join(without)}"
    hint = "tinkermq init --home /etc/tinkermq, or copy the files from the machine where it ran"
    with_secrets = {unit.stem for unit in units if _values(unit, "LoadCredential")}
    return finding("credentials", len(without) < len(with_secrets - {_TEMPLATE}), detail, hint)


def _secrets(root: Path) -> CheckResult:
    """Check that others cannot read files with secrets, and only root those for systemd."""
    folder = root / "etc/tinkermq"
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _is_public(path)]
    for path in paths:
        of_root = path.parent.name == "secrets" or path.match("environment-*.key")
        exposed = path.stat().st_mode & (stat.S_IRWXO | (stat.S_IRWXG if of_root else 0))
        if exposed:
            who, rights = ("a group", "go=") if of_root else ("everybody", "o=")
            return finding("secrets", False, f"{who} may read {path}", f"chmod {rights} {path}")
    return finding("secrets", True, f"{len(paths)} files that others cannot read")


def _is_public(path: Path) -> bool:
    is_certificate = path.suffix in (".crt", ".pem") and "key" not in path.stem
    return is_certificate or path.name == "accounts.conf"


def _run(*command: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )


def _nats_conf(root: Path) -> CheckResult:
    """Check the configuration of this machine's nats-server with `nats-server -t`."""
    config = root / "etc/tinkermq/nats.conf"
    if not config.is_file():
        return finding("nats.conf", True, "none: the server runs on another machine")
    try:
        variables = _variables(config.with_name("nats.env"))
        done = _run(str(binary_path()), "-t", "-c", str(config), env=os.environ | variables)
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
        read = (openssl, "x509", "-in", str(path), "-noout", "-enddate")
        done = _run(*read, "-checkend", str(_EXPIRY_S))
        detail = (done.stdout or done.stderr).strip().splitlines() or ["unreadable"]
        hint = "" if done.returncode == 0 else "renew it"
        findings.append(finding(f"tls {path.stem}", done.returncode == 0, detail[0], hint))
    return findings


def _storage(root: Path) -> CheckResult:
    """Check that there is disk space for messages and runs."""
    folder = root / "var/lib/tinkermq"
    if not folder.is_dir():
        hint = (
            "cp deploy/etc/tmpfiles.conf /etc/tmpfiles.d/tinkermq.conf && systemd-tmpfiles --create"
        )
        return finding("storage", False, f"{folder} is not there", hint)
    free = shutil.disk_usage(folder).free
    hint = "" if free >= _MIN_FREE_BYTES else "free some space, or mount a larger disk"
    return finding("storage", not hint, f"{free / 2**30:.0f} GiB free in {folder}", hint)


def _clock() -> CheckResult:
    """Check that the clock is synchronised: it decides on expired keys and the order of events."""
    program = shutil.which("timedatectl")
    if program is None:
        return finding("clock", True, "not known: there is no timedatectl")
    output = _run(program, "show", "-p", "NTPSynchronized", "--value").stdout.strip()
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
    done = _run("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount", "true")
    if done.returncode:
        hint = "sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0"
        return finding("namespaces", False, done.stderr.strip(), hint)
    return finding("namespaces", True, "may be made, so the sandbox of games works")
