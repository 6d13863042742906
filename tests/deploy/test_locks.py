"""What deployments install is locked: all that is needed, one version each, with hashes."""

import re
import tomllib
from collections.abc import Iterator

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.configs import REPOSITORY

LOCKS = REPOSITORY / "deploy" / "locks"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = dict(
    re.findall(r"^EXTRAS_(\w+) := (.+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
)
MACHINES = [
    {"sys_platform": "linux", "platform_machine": machine, "python_version": version}
    for machine in ("x86_64", "aarch64")
    for version in ("3.11", "3.12", "3.13")
]


def locked(name: str) -> dict[str, list[Requirement]]:
    """Return what a lock file pins, by name; several versions have markers."""
    found: dict[str, list[Requirement]] = {}
    for entry in re.split(r"\n(?=\S)", (LOCKS / f"{name}.txt").read_text().strip()):
        line, *hashes = entry.replace("\\\n", "\n").splitlines()
        requirement = Requirement(line)
        assert re.fullmatch(r"==[^*]+", str(requirement.specifier)), line
        assert hashes, f"{line} has no hash"
        assert all(re.fullmatch(r"\s+--hash=sha256:[0-9a-f]{64}\s*", one) for one in hashes), line
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def needed(extras: list[str]) -> Iterator[Requirement]:
    """Yield what the package needs itself with some extras, theirs of its own resolved."""
    yield from map(Requirement, PROJECT["dependencies"])
    for extra in extras:
        for text in PROJECT["optional-dependencies"][extra]:
            requirement = Requirement(text)
            if requirement.name == "tinkermq":
                yield from needed(sorted(requirement.extras))
            else:
                yield requirement


@pytest.mark.parametrize("name", sorted(EXTRAS))
def test_a_lock_holds_all_that_the_package_needs(name: str) -> None:
    pins = locked(name)
    for machine in MACHINES:
        environment = {**default_environment(), **machine}
        for requirement in needed(EXTRAS[name].split(",")):
            if requirement.marker is not None and not requirement.marker.evaluate(environment):
                continue
            there = [
                one
                for one in pins.get(canonicalize_name(requirement.name), [])
                if one.marker is None or one.marker.evaluate(environment)
            ]
            assert len(there) == 1, f"make locks: {requirement} has {there} on {machine}"
            version = str(there[0].specifier).removeprefix("==")
            assert requirement.specifier.contains(version, prereleases=True), requirement


def test_there_is_a_lock_for_each_deployment() -> None:
    assert {path.stem for path in LOCKS.glob("*.txt")} == set(EXTRAS) >= {"worker", "gateway"}
