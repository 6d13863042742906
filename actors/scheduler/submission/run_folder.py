"""The folder of a run, made when the run is accepted."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from ....broker.feed import best_of
from ....broker.run_folder import Folder
from ....schemas.config.job import JobConfig
from ....schemas.config.sections import is_url
from ....schemas.job import BEST_STEP, LAST_STEP, JobRecord
from ....schemas.tinker.names import is_path
from ....schemas.wire.errors import NotFoundError, StateError, StorageError
from ...storage.checkpoint_folders import checkpoint_folders
from ...storage.checkpoints import is_put_away, keep_stored, store_of, stored_checkpoints
from ...storage.opening import Stores

_FORK = "fork"
_ADAPTERS = "adapters"
_MODELS = "models"


def run_dir_of(config: JobConfig, owner: str = "") -> Path:
    """Return the folder of a run.

    With an `owner` it lies in a folder of theirs: names are unique for each user only.
    """
    return Path(config.output_dir).expanduser().resolve() / owner / str(config.name)


def make_run_dir(config: JobConfig, owner: str = "") -> Path:
    """Make the folder of a run; one that holds something is another run's.

    Raises StateError, or StorageError for a folder that cannot be made.
    """
    folder = run_dir_of(config, owner)
    try:
        with Folder(folder, make=True) as made:
            inside = {*(one.name for one in made.entries()), *made.strange()}
        occupied = not inside <= {_FORK, _ADAPTERS, _MODELS}
    except OSError as error:
        raise StorageError(
            f"cannot make the run folder {folder}: {error.strerror}",
            hint="set output_dir to a folder that the pool can write to",
        ) from error
    if occupied:
        raise StateError(
            f"the run folder {folder} holds another run",
            hint=f"go on with it (`tinkermq resume {config.name}`), or choose another name",
        )
    return folder


def find_checkpoint(
    origin: JobRecord,
    step: str,
    stores: Stores,
    scores: Mapping[int, float] | None = None,
) -> tuple[int, str]:
    """Return step and place of a run's checkpoint: of a step, of the `last` or the `best` one.

    `scores` of validated versions say which is the best.

    The place is a URL for a run with a store, else a folder. Raises NotFoundError, StorageError.
    """
    if (store := store_of(origin)) is None:
        there = {step: str(path) for step, path in checkpoint_folders(origin.run_dir).items()}
    else:
        there = {number: one.url for number, one in stored_checkpoints(origin, stores).items()}
    if step == BEST_STEP:
        number = best_of(scores or {}, there)
        if number is None:
            raise NotFoundError(
                f"no checkpoint that run {origin.name!r} has left was validated",
                hint=f"{_where_else(origin, there)}; a run with training.keep_best=true and "
                "training.test_freq keeps the best",
            )
        return number, there[number]
    number = max(there, default=0) if step == LAST_STEP else int(step)
    if number not in there:
        which = "yet" if step == LAST_STEP else f"of step {number}"
        raise NotFoundError(
            f"run {origin.name!r} has no checkpoint {which} ({store or origin.run_dir})",
            hint=_where_else(origin, there),
        )
    return number, there[number]


def _where_else(origin: JobRecord, there: dict[int, str]) -> str:
    """Say which steps are there, or why none is."""
    if there:
        return f"there are those of steps {', '.join(map(str, sorted(there)))}"
    if is_put_away(origin) and origin.archived is not None:
        return f"they are in its archive: bring it back (`tinkermq archive {origin.name} --undo`)"
    return "wait until it has written one (training.save_freq)"


def keep_checkpoint(record: JobRecord, run_dir: Path, stores: Stores) -> str:
    """Keep what a job begins with: in its store, or in the run's folder. Raises as below."""
    if is_url(record.fork_dir):
        only = record.weights_only or not record.trains  # who serves needs no optimiser's state
        return keep_stored(record.fork_dir, record.scope, stores, weights_only=only)
    fork = Path(record.fork_dir)
    return str(
        pin_checkpoint(
            fork,
            run_dir,
            weights_only=record.weights_only,
            link=not is_path(record.fork_of or "") and not record.has_own_code,
        )
    )


def pin_checkpoint(
    checkpoint: Path,
    run_dir: Path,
    *,
    weights_only: bool = False,
    link: bool = True,
    place: str = _FORK,
) -> Path:
    """Keep a checkpoint in the folder of the run that starts from it, and return its place there.

    With `weights_only` the state of the other run's learner is left out. The other run may remove
    its own meanwhile. Files get a second name where `link` allows that and they lie on one disk;
    who may write the one then writes the other. Links in the checkpoint are left out.

    Raises NotFoundError when the checkpoint has gone, StorageError when there is no room.
    """
    leave_out = ["learner"] if weights_only else []
    try:
        with Folder(run_dir) as run:
            run.remove(place)  # of a submission that was cut off
            try:
                with Folder(checkpoint.parent) as origin:
                    origin.copy(checkpoint.name, run, place, link=link, leave_out=leave_out)
            except BaseException:
                run.remove(place)
                raise
    except FileNotFoundError as error:
        raise NotFoundError(
            f"the checkpoint {checkpoint} has been removed meanwhile",
            hint="fork from a newer one, or set training.keep_every in the run that makes them",
        ) from error
    except OSError as error:
        raise StorageError(
            f"cannot keep {checkpoint} in {run_dir / place}: {error}",
            hint="see the folder's rights, and df",
        ) from error
    return run_dir / place


def pin_models(
    record: JobRecord, folders: Mapping[str, str], run_dir: Path, stores: Stores
) -> dict[str, str]:
    """Keep checkpoints that a run reads beside its own, by their names; raises the same."""
    return {
        name: keep_stored(each, record.scope, stores, place=f"{_MODELS}/{name}", weights_only=True)
        if is_url(each)
        else str(
            pin_checkpoint(
                Path(each),
                run_dir,
                weights_only=True,
                link=not record.has_own_code,
                place=f"{_MODELS}/{quote(name, safe='@')}",
            )
        )
        for name, each in folders.items()
    }


def pin_adapters(record: JobRecord, run_dir: Path, stores: Stores) -> dict[str, str]:
    """Keep further adapters by their names, `run@step`; raises what `pin_checkpoint` does."""
    return {
        name: keep_stored(
            each, record.scope, stores, place=f"{_ADAPTERS}/{name}", weights_only=True
        )
        if is_url(each)
        else str(
            pin_checkpoint(
                Path(each),
                run_dir,
                weights_only=True,
                link=not is_path(name) and not record.has_own_code,
                place=f"{_ADAPTERS}/{quote(name, safe='@')}",
            )
        )
        for name, each in record.adapters.items()
    }
