"""Names under the Tinker API: computed, read back, and nothing else taken for one."""

import pytest
from tinkermq.schemas.tinker.names import CheckpointName, ModelName, OperationName
from tinkermq.schemas.tinker.sampling import SampleName, SamplerName
from tinkermq.schemas.wire.errors import NotFoundError

MODEL = ModelName("s0af", 3)


def test_names_are_read_as_they_are_written() -> None:
    operation = OperationName(MODEL, 17)
    checkpoint = CheckpointName(MODEL, "sampler_weights", "step-40.b")
    sampler = SamplerName("s0af", 2, str(checkpoint))
    sample = SampleName(sampler, 10**18, "sampler-0")
    assert ModelName.parse(str(MODEL)) == MODEL
    assert OperationName.parse(str(operation)) == operation
    assert CheckpointName.parse(str(checkpoint)) == checkpoint
    assert SamplerName.parse(str(sampler)) == sampler
    assert sampler.checkpoint == checkpoint
    assert SampleName.parse(str(sample)) == sample
    assert SamplerName.of_base("s", 0, "org/tiny").base == "org/tiny"


@pytest.mark.parametrize(
    "text", ["", "s:train:x", "s:train:01", "S:train:0", "s:train:0:1", "a.b:train:1"]
)
def test_what_is_no_model_is_not_there(text: str) -> None:
    with pytest.raises(NotFoundError, match="there is no model"):
        ModelName.parse(text)


@pytest.mark.parametrize(
    "path",
    [
        "tinker://s:train:0/weights/",
        "tinker://s:train:0/weights/../x",
        "tinker://s:train:0/weights/a/b",
        "tinker://s:train:0/weights/.hidden",
        "tinker://s:train:0/state/3",
        "tinker://../../x:train:0/weights/a",
        "/etc/passwd",
    ],
)
def test_no_path_leads_out_of_a_users_checkpoints(path: str) -> None:
    with pytest.raises(NotFoundError, match="there is no checkpoint"):
        CheckpointName.parse(path)


def test_a_sampling_session_that_nobody_made_is_not_there() -> None:
    for text in ("s:sample:0", "s:sample:0:%%", "s:sample:0:_w"):
        with pytest.raises(NotFoundError, match="there is no sampling session"):
            SamplerName.parse(text)
    assert SampleName.parse("s:train:0:4") is None
