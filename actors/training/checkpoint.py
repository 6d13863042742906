"""Checkpoints: a Hugging Face folder with the learner's state beside it, written atomically.

`checkpoints/step_000040/` is a folder for `from_pretrained`; its `learner/` holds the optimiser
state, `state.json`, and the critic if there is one; its `policies/<role>/` the same for roles with
a policy of their own. Several ranks write it together, from a copy (`checkpoint_copy.py`); any
number of ranks can read it. It is written to a hidden folder and renamed when complete; `latest` is
a link to the newest. Master weights and saved weights are float32.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig

from ...schemas.version import VERSION
from ...schemas.wire.errors import NotFoundError, StorageError, TinkermqError
from ...schemas.wire.message import summarize
from ..policy.model_folder import check_reread, save_model, save_plain_weights, unsavable
from ..policy.policies import policy_folder
from ..storage import files
from ..storage.run_folders import checkpoint_name, step_of
from .state import LearnerState

_log: structlog.stdlib.BoundLogger = structlog.get_logger()
_STATE = "learner/state.json"
_REPLACED = ".replaced_"
_DAMAGED = "damaged_"
_TRIAL = ".trial"
_KEPT = "kept_weights_"


class CheckpointJudge(Protocol):
    """Selects the best checkpoints, and those to keep."""

    def best(self, steps: Sequence[int]) -> int | None:
        """Return the best of these steps; None if unknown."""
        ...

    def spared(self, steps: Sequence[int]) -> set[int]:
        """Return those of these steps whose checkpoints are kept."""
        ...


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, run_dir: Path, *, keep_last: int, keep_every: int) -> None:
        self.folder = run_dir / "checkpoints"
        self._keep_last = keep_last
        self._keep_every = keep_every
        self.judged: CheckpointJudge | None = None
        """Selects the best checkpoints and those to keep; None: no selection."""

    def save(self, state: LearnerState, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint and return its folder; on an error, earlier checkpoints remain.

        `write` creates the given folder and writes all files but the state into it.

        Raises StorageError with path and free space when it cannot be written.
        """
        final = self.folder / checkpoint_name(state.step)
        temporary = self.folder / f".{final.name}.{os.getpid()}"
        try:
            self._remove_leftovers()
            write(temporary)
            state.has_digests = True
            (temporary / _STATE).write_text(state.model_dump_json(indent=1))
            files.permit_as_folder(temporary)
            files.write_digests(temporary)
            files.flush(temporary)
            self._put_in_place(temporary, final)
            self._point("latest", final)
            self.remove_old()
        except Exception as error:
            # before old checkpoints are removed to free space
            failure = files.storage_error(final, error, SafetensorError)
            shutil.rmtree(temporary, ignore_errors=True)
            if failure is None:
                raise
            raise failure from error
        return final

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step`."""
        final = self.folder / checkpoint_name(step)
        replaced = self.folder / (_REPLACED + checkpoint_name(step))
        return final if final.exists() or not replaced.exists() else replaced

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending."""
        return [step for step in self._named() if (self.path(step) / _STATE).is_file()]

    def _named(self) -> list[int]:
        """Return the steps of all folders with a checkpoint's name, ascending."""
        if not self.folder.is_dir():
            return []
        names = [path.name.removeprefix(_REPLACED) for path in self.folder.iterdir()]
        return sorted({step for name in names if (step := step_of(name)) is not None})

    def latest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def latest_whole(self) -> tuple[Path | None, list[TinkermqError]]:
        """Return the newest undamaged checkpoint, or None.

        Newer, damaged checkpoints are renamed to `damaged_step_…`, and their errors are returned.
        Raises StorageError for a checkpoint that cannot be read at present.
        """
        damaged: list[TinkermqError] = []
        for step in reversed(self._named()):
            folder = self.path(step)
            try:
                load_state(folder)
            except (StorageError, NotFoundError) as error:
                if error.may_pass:
                    raise
                damaged.append(error)
                self.put_aside(folder, step)
                continue
            if damaged:
                self._point("latest", folder)
            return folder, damaged
        return None, damaged

    def before_latest(self) -> LearnerState | None:
        """Return the state of the second newest checkpoint, unchecked; None if there is none."""
        steps = self.steps()
        return _read_state(self.path(steps[-2])) if len(steps) > 1 else None

    def first_seqs(self) -> dict[int, int]:
        """Return by step the first log entry after each readable checkpoint."""
        seqs: dict[int, int] = {}
        for step in self.steps():
            with contextlib.suppress(StorageError):  # raised when a learner starts from it
                seqs[step] = _read_state(self.path(step)).log_seq
        return seqs

    @property
    def keeps_one_before(self) -> bool:
        """Return whether another checkpoint is kept beside the newest."""
        return self._keep_last > 1

    def put_aside(self, folder: Path, step: int) -> None:
        """Rename a checkpoint to `damaged_step_…`, replacing an earlier one of that name."""
        aside = self.folder / f"{_DAMAGED}{checkpoint_name(step)}"
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)

    def put_back(self, step: int) -> Path:
        """Undo `put_aside`; return the checkpoint's folder."""
        folder = self.folder / checkpoint_name(step)
        (self.folder / f"{_DAMAGED}{folder.name}").rename(folder)
        self._point("latest", folder)
        return folder

    def _put_in_place(self, temporary: Path, final: Path) -> None:
        """Rename a checkpoint to its final name; until then an older one of that step is valid."""
        replaced = self.folder / (_REPLACED + final.name)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        files.flush_entries(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _point(self, name: str, final: Path) -> None:
        link = self.folder.parent / name
        temporary = self.folder.parent / f".{name}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(final.relative_to(self.folder.parent))
        temporary.replace(link)

    def remove_old(self) -> None:
        """Remove checkpoints that are not kept, and link `best` to the best one left.

        The removal of a folder that fails, for example during a read over NFS, is retried later.
        """
        steps = self.steps()
        spared: set[int] = set()
        if self.judged is not None:
            spared = self.judged.spared(steps)
            if (best := self.judged.best(steps)) is not None:
                self._point("best", self.path(best))
        for step in steps[: -self._keep_last]:
            if step not in spared and not (self._keep_every and step % self._keep_every == 0):
                removed = self.folder / f".{checkpoint_name(step)}.{os.getpid()}"
                self.path(step).rename(removed)  # a folder with its name must be complete
                shutil.rmtree(removed, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        with contextlib.suppress(OSError):  # `write` must be called: other ranks wait in it
            for path in self.folder.glob(".step_*"):
                shutil.rmtree(path, ignore_errors=True)


def load_state(folder: Path) -> LearnerState:
    """Read the learner's state of a checkpoint after checking its files.

    Raises StorageError that names a damaged file, StoreAwayError for a file that cannot be read at
    present, NotFoundError for a checkpoint without state.
    """
    files.check_digests(folder)
    file = folder / _STATE
    if not file.is_file():
        raise NotFoundError(
            f"{folder} is not a checkpoint of a learner: it has no {_STATE}",
            hint="name a folder such as outputs/<run>/checkpoints/step_000040",
        )
    state = _read_state(folder)
    files.check_digests(folder, required=state.has_digests)
    return state


def _read_state(folder: Path) -> LearnerState:
    try:
        return LearnerState.model_validate_json(files.read_file(folder, _STATE))
    except ValidationError as error:
        raise StorageError(
            f"checkpoint {folder}: tinkermq {VERSION} cannot read {_STATE}: {summarize(error)}",
            hint="a newer release wrote it, or the file is damaged: update tinkermq, restore the "
            "file, or use another checkpoint of the run (`RUN@STEP`)",
        ) from error


def save_form(folder: Path, model: nn.Module, tokenizer: Any) -> None:
    """Write a model folder without weights, on this rank only."""
    (folder / "learner").mkdir(parents=True)
    save_model(model, folder, {})
    tokenizer.save_pretrained(folder)


def try_saving(
    run_dir: Path,
    write: Callable[[Path], None],
    tokenizer: Any,
    settings: GenerationConfig | None,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Save a checkpoint of the untrained model, read it back, and remove it.

    `write` writes a checkpoint, or one without weights; `settings` are the model's generation
    settings. Raises ModelError if it cannot be saved, StorageError for a disk that cannot be
    written.
    """
    place = run_dir / _TRIAL
    shutil.rmtree(place, ignore_errors=True)
    try:
        folder = CheckpointStore(place, keep_last=1, keep_every=0).save(LearnerState(), write)
        load_state(folder)
        check_reread(folder, tokenizer, settings, trust_remote_code=trust_remote_code)
    except StorageError as error:
        cause = error.__cause__
        if error.is_full or cause is None or isinstance(cause, OSError):
            raise
        raise unsavable("the model", cause) from error
    except TinkermqError:
        raise
    except Exception as error:  # a library's, or code that came with the model
        raise unsavable("the model", error) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def keep_weights(
    places: Sequence[Path],
    step: int,
    policies: Mapping[str, Mapping[str, Tensor]],
    write_form: Callable[[Path], None],
) -> Path:
    """Write the weights of each policy as safetensors into the first writable place.

    Used when a checkpoint could not be written. Other files of a model folder are added as far as
    `write_form` can write them. Weights saved earlier are removed. Returns the folder. Raises
    StorageError if no place is writable.
    """
    failure: Exception | None = None
    for place in places:
        folder = place / f"{_KEPT}{checkpoint_name(step)}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            write_form(folder)
        except Exception as error:  # noqa: BLE001  a library's: it may be why this is needed
            _log.warning("form_not_written", folder=str(folder), error=str(error))
        try:
            for policy, tensors in policies.items():
                _keep(policy_folder(folder, policy), tensors)
            files.permit_as_folder(folder)
            files.flush(folder)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            failure = error
            continue
        for earlier in place.glob(f"{_KEPT}*"):
            if earlier != folder:
                shutil.rmtree(earlier, ignore_errors=True)
        return folder
    raise StorageError(
        f"the weights of step {step} could not be written to {', '.join(map(str, places))}: "
        f"{failure}",
        hint="free some space, or choose another output_dir",
    ) from failure


def _keep(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the weights of a policy under the file names that the libraries expect."""
    critic = {name: tensor for name, tensor in tensors.items() if name.startswith("critic.")}
    rest = {name: tensor for name, tensor in tensors.items() if name not in critic}
    is_adapter = any(name.startswith("base_model.model.") for name in rest)
    save_plain_weights(rest, folder / f"{'adapter_' * is_adapter}model.safetensors")
    if critic:
        save_plain_weights(critic, folder / "critic.safetensors")
