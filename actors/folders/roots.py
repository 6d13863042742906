"""Folders below which jobs may write: their runs, and weights that they share."""

import os
from collections.abc import Sequence
from pathlib import Path

from ...schemas.config.job import JobConfig
from ...schemas.wire.errors import ConfigError

ROOTS_VARIABLE = "TINKERMQ_OUTPUT_ROOTS"
"""Of the scheduler's environment: those folders, joined by `:`; the first is for jobs that name
none."""
MODELS_VARIABLE = "TINKERMQ_MODEL_FOLDERS"
"""Of scheduler and nodes: folders of models and data that functions of users may read, joined by
`:`."""
_DEFAULT = "outputs"


def output_roots(*, has_users: bool) -> list[Path]:
    """Return where jobs may write; nothing means anywhere, the default of a pool without users."""
    named = os.environ.get(ROOTS_VARIABLE, _DEFAULT if has_users else "")
    return [Path(one).expanduser().resolve() for one in named.split(os.pathsep) if one]


def in_default_folder(config: JobConfig, roots: Sequence[Path]) -> JobConfig:
    """Return a configuration that names a folder for its runs: the first root if it named none."""
    if not roots or "output_dir" in config.model_fields_set:
        return config
    return config.model_copy(update={"output_dir": str(roots[0])})


def with_allowed_folders(config: JobConfig, roots: Sequence[Path]) -> JobConfig:
    """Return a configuration whose folders are without links and lie below the roots.

    Raises ConfigError for one that does not.
    """
    if not roots:
        return config
    output = below_roots("output_dir", config.output_dir, roots)
    changes: dict[str, object] = {"output_dir": str(output)}
    if config.weights.folder is not None:
        folder = below_roots("weights.folder", config.weights.folder, roots)
        changes["weights"] = config.weights.model_copy(update={"folder": str(folder)})
    return config.model_copy(update=changes)


def below_roots(key: str, value: str, roots: Sequence[Path]) -> Path:
    """Return where a folder lies when all links are followed; ConfigError if not below a root.

    Without roots it may lie anywhere.
    """
    folder = Path(os.path.realpath(without_tilde(value)))
    if roots and not any(folder.is_relative_to(root.resolve()) for root in roots):
        allowed = ", ".join(map(str, roots))
        raise ConfigError(
            f"{key}={value!r} is outside of the folders where jobs may write: {allowed}",
            hint=f"leave {key} out, or name a folder there; the operator allows further ones in "
            f"${ROOTS_VARIABLE} of the scheduler",
        )
    return folder


def is_of_another(path: Path, user: str, roots: Sequence[Path]) -> bool:
    """Whether a path without links is in a folder of runs, and in none of this user's."""
    below = [path.relative_to(one) for root in roots if path.is_relative_to(one := root.resolve())]
    return any(user not in one.parts for one in below)


def shown_from(path: Path, user: str, roots: Sequence[Path]) -> Path | None:
    """Return the folder whose files functions of a user may read, and that holds a path; or None.

    Such folders are those that the operator names for models and data, and that of the user's own
    runs; without roots, as an admin's jobs are, all. The path is one without links.
    """
    if not roots:
        return Path(path.anchor)
    named = os.environ.get(MODELS_VARIABLE, "").split(os.pathsep)
    models = [Path(one).expanduser().resolve() for one in named if one]
    own = [one for root in roots if user in _below(path, one := root.resolve())]
    return next((one for one in [*models, *own] if path.is_relative_to(one)), None)


def _below(path: Path, root: Path) -> tuple[str, ...]:
    return path.relative_to(root).parts if path.is_relative_to(root) else ()


def without_tilde(value: str) -> Path:
    """Return a path with the home of whoever `~` names."""
    return Path(os.path.expanduser(value))  # noqa: PTH111  a strange ~name stays as it is
