"""`tinkermq deploy check`: whether this machine is set up as deploy/ sets machines up."""

import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ...broker.jetstream.streams import REPLICAS_VARIABLE
from ...broker.nats_server import binary_path
from ...schemas.checks import CheckResult
from ...schemas.wire.errors import TinkermqError
from .checks import finding, print_checks
from .session import COMMON, Common
from .stack import LOOPBACK

# The top level of a nats-server configuration: enough to see who can reach the server.
#
# The server judges the rest itself (`nats-server -t`).

_TOKEN = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|#[^\n]*|//[^\n]*|[{}\[\]\n;,]|[^\s{}\[\];,\"']+")
_STATEMENT = re.compile(r"([\w-]+)\s*[:=]?\s*(.*)")
_ANYWHERE = "all addresses"


def read_nats_conf(
    path: Path, variables: Mapping[str, str], above: frozenset[Path] = frozenset()
) -> dict[str, str]:
    """Return the top-level keys, also those of included files; of blocks only their presence.

    `$NAME` is looked up in `variables`; files `above`, which include this one, are not read again.
    Raises OSError for a file that cannot be read.
    """
    values: dict[str, str] = {}
    above |= {path.resolve()}
    for statement in _statements(_text(path)):
        match = _STATEMENT.match(statement)
        if match is None:
            continue
        key, value = match[1], match[2].strip("\"'")
        included = path.parent / value
        if key == "include" and included.resolve() not in above:
            values |= read_nats_conf(included, variables, above)
        elif key != "include":
            values[key] = variables.get(value[1:], value) if value.startswith("$") else value
    return values


def _text(path: Path) -> str:
    """Return what a file holds; names in passwd, for example, may have bytes that are no UTF-8."""
    return path.read_text(encoding="utf-8", errors="replace")


def _statements(text: str) -> list[str]:
    """Return the top-level statements, without comments and contents of brackets."""
    done, words, depth = list[str](), list[str](), 0
    for part in [*_TOKEN.findall(text), "\n"]:
        if part.startswith(("#", "//")):
            continue
        depth += (part in "{[") - (part in "}]")
        if depth == 0 and part in "\n;,":
            done.append(" ".join(words))
            words = []
        elif depth == 0 and part not in "}]":
            words.append(part)
    return [statement for statement in done if statement]


def listening_host(conf: Mapping[str, str]) -> str:
    """Return the address that clients connect to; nats-server's default is all addresses."""
    host, colon, _ = conf.get("listen", "").rpartition(":")
    return (host.strip("[]") if colon else conf.get("host", conf.get("net", ""))) or _ANYWHERE


_SERVICES = ("nats", "auth", "scheduler", "node", "gateway", "environment@")
_UNIT_FOLDERS = ("etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
_MIN_FREE_BYTES = 10 * 2**30
_MIN_FILES = 65_536
_EXPIRY_S = 14 * 24 * 3600
_TIMEOUT_S = 20


def check(*, root: Path = Path("/"), common: Common = COMMON) -> int:
    """Check units, users, folders, secrets, NATS configuration, certificates, clock and sandbox.

    Parameters
    ----------
    root
        Folder to treat as `/`, to check an image.
    """
    units = _units(root)
    findings = [_installed(units), *(_unit(root, unit) for unit in units)]
    findings += [_accounts(root, units), _environment(root), *_secrets(root)]
    findings += [*_nats(root), *_certificates(root), _storage(root), _clock(), _sandbox()]
    return print_checks(findings, as_json=common.json)


def _units(root: Path) -> list[Path]:
    folders = [root / folder for folder in _UNIT_FOLDERS]
    candidates = (folder / f"tinkermq-{name}.service" for name in _SERVICES for folder in folders)
    return list({path.name: path for path in candidates if path.is_file()}.values())


def _installed(units: list[Path]) -> CheckResult:
    if not units:
        return finding(
            "units",
            False,
            "no tinkermq unit is installed",
            "cp deploy/systemd/* /etc/systemd/system",
        )
    return finding("units", True, ", ".join(path.stem for path in units))


def _unit(root: Path, unit: Path) -> CheckResult:
    """Check that a unit's program exists and that its limit of open files is high enough."""
    text = _text(unit)
    # An empty one takes back those before it; a program may have marks of systemd before it.
    commands = re.findall(r"^ExecStart=[-@:+!]*(\S.*)$", text, re.MULTILINE)
    try:
        programs = [Path(shlex.split(command)[0]) for command in commands]
    except ValueError as error:
        return finding(unit.stem, False, f"ExecStart: {error}", f"correct it in {unit}")
    missing = [
        str(program)
        for program in programs
        if program.is_absolute() and not (root / program.relative_to("/")).exists()
    ]
    limits = [int(one) for one in re.findall(r"^LimitNOFILE=(\d+)$", text, re.MULTILINE)]
    if missing:
        hint = f"install tinkermq into {Path(missing[0]).parents[1]}, or edit the unit"
        return finding(unit.stem, False, f"{missing[0]} is not there", hint)
    if limits and min(limits) < _MIN_FILES:
        return finding(
            unit.stem, False, f"LimitNOFILE={min(limits)}", f"set it to {_MIN_FILES} or more"
        )
    return finding(unit.stem, True, "; ".join(commands))


def _accounts(root: Path, units: list[Path]) -> CheckResult:
    """Check that the users of the units exist."""
    names = {
        name for unit in units for name in re.findall(r"^User=(.+)$", _text(unit), re.MULTILINE)
    }
    passwd = root / "etc/passwd"
    known = _text(passwd) if passwd.is_file() else ""
    missing = sorted(name for name in names if f"\n{name}:" not in f"\n{known}")
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


def _variables(path: Path) -> dict[str, str]:
    """Return the variables that an environment file sets; their values may stand in quotes."""
    lines = _text(path).splitlines() if path.is_file() else []
    pairs = (line.split("=", 1) for line in lines if "=" in line and line[0] not in "#;")
    return {name.strip(): value.strip().strip("\"'") for name, value in pairs}


def _secrets(root: Path) -> list[CheckResult]:
    """Check that files with secrets are not readable by others."""
    folder = root / "etc/tinkermq"
    paths = [one for one in sorted(folder.rglob("*")) if one.is_file() and not _is_public(one)]
    exposed = [path for path in paths if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH)]
    if exposed:
        hint = f"chmod o= {' '.join(map(str, exposed))}"
        return [finding("secrets", False, f"everybody may read {exposed[0]}", hint)]
    return [finding("secrets", True, f"{len(paths)} files that others cannot read")]


def _is_public(path: Path) -> bool:
    return path.suffix in (".crt", ".pem") and "key" not in path.stem


def _nats(root: Path) -> list[CheckResult]:
    """Check the configuration of this machine's nats-server, if there is one."""
    config = root / "etc/tinkermq/nats.conf"
    if not config.is_file():
        return [finding("nats.conf", True, "none: the server runs on another machine")]
    return [_accepted(config), _guarded(config)]


def _accepted(config: Path) -> CheckResult:
    """Run nats-server's own check of its configuration."""
    try:
        command = [str(binary_path()), "-t", "-c", str(config)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (TinkermqError, OSError, subprocess.TimeoutExpired) as error:
        return finding("nats.conf", False, str(error))
    output = (done.stderr or done.stdout).strip().splitlines()
    detail = output[-1] if output else "nats-server said nothing"
    return finding(
        "nats.conf", done.returncode == 0, detail, "" if not done.returncode else "fix it"
    )


def _guarded(config: Path) -> CheckResult:
    """Check that a server reachable from other machines requires keys and encrypts."""
    try:
        conf = read_nats_conf(config, _variables(config.with_name("nats.env")))
    except OSError as error:
        return finding("nats access", False, f"{error.filename}: {error.strerror}", "fix it")
    host = listening_host(conf)
    if host in LOOPBACK:
        return finding("nats access", True, f"listens on {host} only")
    lacks = [name for name, key in (("users", "authorization"), ("TLS", "tls")) if key not in conf]
    if lacks:
        hint = 'include "accounts.conf" of `tinkermq init --home /etc/tinkermq`, and set tls { … }'
        detail = f"listens on {host} without {' and '.join(lacks)}"
        return finding("nats access", False, detail, f"{hint}; or listen on 127.0.0.1")
    return finding("nats access", True, f"listens on {host}, with users and TLS")


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
    """Check that the clock is synchronised: keys expire and events are ordered by it."""
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
    """Check that processes may make the namespaces that the sandbox of games needs."""
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
