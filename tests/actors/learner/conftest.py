"""A tiny model for the tests of the learner."""

from pathlib import Path

import pytest

from tests.support.models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))
