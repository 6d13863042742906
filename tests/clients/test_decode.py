"""`tinkermq decode` prints any payload that can be met on the broker."""

import json

import numpy as np
import pytest
from tinkermq.clients.cli.decode import render
from tinkermq.schemas.metric import Metric
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.codec import pack
from tinkermq.schemas.wire.errors import MessageError

from tests.clients.command import tinkermq


def test_a_message_is_shown_key_by_key() -> None:
    task = Task(task=3, sample=17, seed=5, group_size=8)
    lines = render(task.to_bytes()).splitlines()
    assert "v: 1" in lines
    assert "task: 3" in lines
    assert "sample: 17" in lines
    assert "greedy_baseline: false" in lines


def test_arrays_are_shown_by_dtype_shape_and_first_values() -> None:
    payload = pack(
        {"token_ids": np.arange(100, dtype=np.int32), "x": np.array([0.5, 1.25], np.float32)}
    )
    assert render(payload).splitlines() == [
        "token_ids: int32[100] 0 1 2 3 4 5 6 7 …",
        "x: float32[2] 0.5 1.25",
    ]


def test_lists_and_maps_nest_and_long_lists_are_cut() -> None:
    text = render(pack({"a": [{"b": 1}], "many": list(range(30)), "none": None, "e": {}}))
    assert text.splitlines()[:3] == ["a:", "  -", "    b: 1"]
    assert "  … 10 more of 30" in text
    assert "none: null" in text
    assert "e: {}" in text


def test_full_shows_everything() -> None:
    payload = pack({"ids": np.arange(20, dtype=np.int64), "many": list(range(30))})
    text = render(payload, full=True)
    assert "…" not in text
    assert "19" in text


def test_json_keeps_arrays_with_dtype_and_shape() -> None:
    payload = pack({"ids": np.array([[1, 2]], dtype=np.int16), "raw": b"\x00\xff"})
    assert json.loads(render(payload, as_json=True)) == {
        "ids": {"dtype": "int16", "shape": [1, 2], "values": [[1, 2]]},
        "raw": {"bytes": "00ff"},
    }


def test_text_of_other_programs_is_shown_as_it_is() -> None:
    assert render(b'{"type":"io.nats.micro.v1.ping_response"}').startswith('{"type"')


def test_an_empty_payload_is_said_to_be_empty() -> None:
    assert render(b"") == "(empty payload)"


@pytest.mark.parametrize("payload", [b"\xc1", b"\x81\xa1", b"\xff\xfe\x00" * 9])
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(MessageError):
        render(payload)


def test_the_command_reads_one_payload_from_a_pipe() -> None:
    payload = Metric(step=4, values={"training_step_reward": 0.5}, time=1.0).to_bytes()
    outcome = tinkermq("decode", stdin=payload)
    assert outcome.code == 0
    assert "training_step_reward: 0.5" in outcome.out


def test_garbage_in_the_pipe_is_an_error_without_a_traceback() -> None:
    outcome = tinkermq("decode", stdin=b"\xc1\x00")
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert "Traceback" not in outcome.err
