"""One tiny model for the tests of the engine, and an engine that runs it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from tinkermq.actors.generator.transformers_engine import TransformersEngine
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models import make_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def model(folder: Path) -> PreTrainedModel:
    """The same model, to compare with."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    """An engine of 8 rows and 160 tokens."""
    engine = await TransformersEngine.start(str(folder), max_slots=8, max_context=160)
    yield engine
    await engine.close()
