"""What is told of a hub's model that cannot be had, with errors of huggingface_hub's classes."""

import os
import subprocess
import sys

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from tinkermq.actors.policy.model_folder import hub_error

from tests.support.waiting import PATIENCE_S

_OPEN = """
from tinkermq.actors.policy.model_folder import load_model_config
from tinkermq.schemas.wire.errors import ModelError
try:
    load_model_config("nowhere/model")
except ModelError as error:
    print(error.message, "|", error.hint)
"""


def _raised(kind: type[Exception]) -> OSError:
    """Return transformers' error, which tells its cause by the one behind it only."""
    error = OSError("nowhere/model")
    error.__cause__ = kind.__new__(kind)
    return error


@pytest.mark.parametrize(
    ("kind", "offline", "words", "hint"),
    [
        (LocalEntryNotFoundError, True, "offline mode (HF_HUB_OFFLINE)", "unset HF_HUB_OFFLINE"),
        (LocalEntryNotFoundError, False, "the hub cannot be reached", "HF_ENDPOINT"),
        (RepositoryNotFoundError, False, "the hub has no such model", "see owner and name"),
        (GatedRepoError, False, "is gated on the hub", "accept its terms"),
        (ValueError, True, "cannot be read", "model_type"),
    ],
)
def test_each_way_in_which_a_model_cannot_be_had_is_told_apart(
    kind: type[Exception], offline: bool, words: str, hint: str
) -> None:
    error = hub_error("nowhere/model", _raised(kind), offline=offline)
    assert words in error.message
    assert hint in (error.hint or "")


def test_offline_mode_is_named_by_who_opens_the_model() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _OPEN],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert "nowhere/model is neither a folder on" in done.stdout
    assert "offline mode" in done.stdout
