"""The report of all checks: a JSON file to attach to an issue.

It has versions, devices and figures; no environment variable, host name or address.
"""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

from pydantic import BaseModel, Field

from ...schemas.wire.errors import StorageError
from .outcome import CheckOutcome

_MAIN = ("tinkermq", "torch", "transformers", "vllm", "flash-attn", "triton", "nats-py")


class AcceptanceReport(BaseModel):
    """All that was found on a machine."""

    started: str
    """UTC, ISO 8601."""
    device: str
    """`gpu` or `cpu`."""
    machine: dict[str, str]
    versions: dict[str, str]
    """Of what matters most, and whatever checks have told: driver, CUDA, NCCL."""
    packages: dict[str, str]
    """Of all that is installed."""
    checks: list[CheckOutcome] = Field(default_factory=list[CheckOutcome])

    @classmethod
    def begin(cls, *, on_gpu: bool) -> "AcceptanceReport":
        """Begin a report with what is known without running anything."""
        packages = {one.name: one.version for one in distributions()}
        return cls(
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            device="gpu" if on_gpu else "cpu",
            machine={
                "system": f"{platform.system()} {platform.release()} {platform.machine()}",
                "cores": str(os.cpu_count()),
                "memory": f"{_memory_gib():.0f} GiB",
            },
            versions={"python": platform.python_version()}
            | {name: packages.get(name, "not installed") for name in _MAIN},
            packages=dict(sorted(packages.items())),
        )

    def add(self, outcome: CheckOutcome) -> None:
        """Take the outcome of one more check, with the facts that it tells of the machine."""
        self.checks.append(outcome)
        self.versions |= outcome.facts

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(one.state != "failed" for one in self.checks)

    def write(self, file: Path) -> None:
        """Write the report; StorageError where that is not possible."""
        try:
            file.write_text(self.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise StorageError(
                f"the report cannot be written to {file}: {error.strerror}",
                hint="name another file: --report FILE",
            ) from error


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
