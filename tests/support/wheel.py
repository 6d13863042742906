"""The package as users install it: a wheel, in an environment that has no checkout beside it."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.support.configs import REPOSITORY
from tests.support.waiting import PATIENCE_S

ROOMS = ("schemas", "broker", "envs", "actors", "clients")
PACKAGE = "package"
"""The folder of `tinkermq` itself, above the rooms."""
_PIP = (sys.executable, "-W", "ignore", "-m", "pip", "-q", "--disable-pip-version-check")


def build_wheel(folder: Path) -> Path:
    """Build the wheel below `folder`, from a copy, so that the checkout is left as it is."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for room in (PACKAGE, *ROOMS):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / room, source / room, ignore=ignored)
    _pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment that sees this one's packages; return its programs.

    The packages are found by their folders: what a checkout installed there for itself is not.
    The NATS server is looked for beside Python, where its wheel puts it.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    beside = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "beside.pth").write_text("\n".join(beside) + "\n")
    (folder / "bin" / "nats-server").symlink_to(Path(sys.executable).parent / "nats-server")
    _pip(
        "--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel)
    )
    return folder / "bin"


def _pip(*words: str) -> None:
    done = subprocess.run(
        [*_PIP, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
