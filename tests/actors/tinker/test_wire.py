"""Protobuf and JSON as clients send them, and what of it cannot be read."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tinkermq.actors.tinker.sampling.sampler import SampleBody
from tinkermq.schemas.tinker import wire
from tinkermq.schemas.tinker.datum import LossResult
from tinkermq.schemas.tinker.wire import (
    CreateModelBody,
    OptimStepBody,
    SaveWeightsBody,
    plain_body,
    write_result,
)
from tinkermq.schemas.wire.errors import ConfigError, DataError, MessageError

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4


def request(**inputs: Any) -> Any:
    """Return a request of one datum with three tokens."""
    message = wire.ForwardBackwardRequest(model_id="s:train:0", seq_id=4, loss_fn="ppo")
    datum = message.data.add()
    for tokens in ([5, 6], [7]):
        datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    for name, (array, dtype) in inputs.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = array.tobytes(), dtype
        tensor.shape.extend(array.shape)
    return message


def _read(body: bytes) -> wire.ForwardBackward:
    return wire.request_of(wire.parse_request(body))


def read(message: Any) -> Any:
    return _read(message.SerializeToString())


def test_a_request_is_read_with_its_chunks_and_arrays() -> None:
    weights = np.array([1, 0.5, -2], "<f4")
    found = read(
        request(
            target_tokens=(np.array([6, 7, 8], "<i4"), INT32),
            weights=(weights, FLOAT32),
            advantages=((weights.view("<u4") >> 16).astype("<u2"), BFLOAT16),
        )
    )
    assert (found.model, found.seq, found.loss_fn, found.forward_only) == (
        "s:train:0",
        4,
        "ppo",
        False,
    )
    (datum,) = found.data
    assert datum.tokens.tolist() == [5, 6, 7]
    assert datum.inputs["target_tokens"].dtype == np.int64
    assert datum.inputs["weights"].tolist() == datum.inputs["advantages"].tolist() == [1, 0.5, -2]


def test_the_newer_form_of_the_config_counts_and_the_mask_is_the_clients_own() -> None:
    message = request(mask=(np.ones(3, "<f4"), FLOAT32))
    message.loss_fn_config["beta"] = 1.0
    assert read(message).config == {"beta": 1.0}
    message.loss_fn_config_v2["beta"].number = 2.0
    message.loss_fn_config_v2["kind"].text = "k"
    found = read(message)
    assert found.config == {"beta": 2.0, "kind": "k"}
    assert not found.data[0].inputs


def test_a_sparse_array_is_the_dense_one() -> None:
    message = request()
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.dtype = FLOAT32
    tensor.shape.extend([3, 4])
    tensor.sparse_csr.values = np.array([1, 2, 3], "<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 2, 2, 3], "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array([0, 3, 1], "<i8").tobytes()
    found = read(message).data[0].inputs["weights"]
    assert found.tolist() == [[1, 0, 0, 2], [0, 0, 0, 0], [0, 3, 0, 0]]


def _shape(tensor: Any, *shape: int) -> None:
    del tensor.shape[:]
    tensor.shape.extend(shape)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda one: _shape(one, 4), "datum 0: weights has 3 values for the shape"),
        (lambda one: _shape(one, -1), "cannot have the shape"),
        (lambda one: _shape(one, 1 << 40, 1 << 40), "cannot have the shape"),
        (lambda one: setattr(one, "dtype", 9), "is of type 9"),
        (lambda one: setattr(one, "dense", b"abc"), "3 bytes, which are not values"),
        (lambda one: one.ClearField("dense"), "has no values"),
        (lambda one: setattr(one.sparse_csr, "values", b"1234"), "not a sparse array"),
    ],
)
def test_arrays_that_cannot_be_are_named(spoil: Any, words: str) -> None:
    message = request(weights=(np.ones(3, "<f4"), FLOAT32))
    spoil(message.data[0].loss_fn_inputs["weights"])
    with pytest.raises(DataError, match=words):
        read(message)


def test_indices_outside_a_sparse_array_are_refused() -> None:
    for rows, columns in (([0, 1, 2], [0, 4]), ([0, 2, 1], [0, 1]), ([1, 1, 2], [0, 1])):
        message = request()
        tensor = message.data[0].loss_fn_inputs["weights"]
        tensor.dtype = FLOAT32
        tensor.shape.extend([2, 4])
        tensor.sparse_csr.values = np.ones(2, "<f4").tobytes()
        tensor.sparse_csr.crow_indices = np.array(rows, "<i8").tobytes()
        tensor.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()
        with pytest.raises(DataError, match="indices outside the shape"):
            read(message)


def test_what_is_no_text_and_no_protobuf_is_refused() -> None:
    message = request()
    message.data[0].model_input.add().image.data = b"png"
    with pytest.raises(DataError, match="datum 0 has a chunk of type image"):
        read(message)
    with pytest.raises(MessageError, match="is not a ForwardBackwardRequest"):
        _read(b"\xff\xff\xff")


def test_a_compressed_body_is_bounded_when_it_is_unpacked() -> None:
    packed = pa.compress(b"x" * 1000, codec="zstd", asbytes=True)
    assert plain_body(packed, is_zstd=True) == b"x" * 1000
    with pytest.raises(MessageError, match="is not zstd"):
        plain_body(packed[:-4], is_zstd=True)
    bomb = pa.compress(b"\0" * (300 << 20), codec="zstd", asbytes=True)
    with pytest.raises(MessageError, match="the uncompressed body has more than"):
        plain_body(bomb, is_zstd=True)


def test_a_result_has_each_datums_log_probs_in_their_own_shape() -> None:
    made = [np.array([[1, 2]], np.float32), np.array([[3, 4], [5, 6]], np.float32)]
    message = wire.ForwardBackwardOutput.FromString(
        write_result(LossResult(made, {"loss:sum": 2.5}))
    )
    (record,) = message.loss_fn_outputs
    logprobs = record.fields["logprobs"]
    assert record.num_datums == 2
    assert np.frombuffer(logprobs.offsets, "<i8").tolist() == [0, 8, 24]
    assert np.frombuffer(logprobs.data, "<f4").tolist() == [1, 2, 3, 4, 5, 6]
    assert list(logprobs.trailing_shape) == [2]
    assert dict(message.metrics) == {"loss:sum": 2.5}


def test_datums_of_different_widths_keep_their_shapes() -> None:
    shapes = [(2,), (3,), (2, 3), (1, 5), (4,)]
    made = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for shape in shapes]
    message = wire.ForwardBackwardOutput.FromString(write_result(LossResult(made, {})))
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1, 1, 1]
    read: list[Any] = []
    for record in message.loss_fn_outputs:
        batch = record.fields["logprobs"]
        ends = np.frombuffer(batch.offsets, "<i8") // 4
        for first, last in pairwise(ends.tolist()):
            values = np.frombuffer(batch.data, "<f4")[first:last]
            read.append(values.reshape(-1, *batch.trailing_shape))
    assert [one.tolist() for one in read] == [one.tolist() for one in made]


def test_sparse_arrays_are_bounded_together() -> None:
    """Each is a few bytes in a request and any size in memory."""
    message = request()
    for number in range(2):
        datum = message.data[0] if not number else message.data.add()
        tensor = datum.loss_fn_inputs["weights"]
        tensor.dtype = FLOAT32
        tensor.shape.extend([2, wire.MAX_ELEMENTS // 3])
        tensor.sparse_csr.crow_indices = np.zeros(3, "<i8").tobytes()
    with pytest.raises(DataError, match="datum 1: weights cannot have the shape"):
        read(message)


def test_empty_parts_of_a_request_are_bounded() -> None:
    """Two bytes each, which compress to nothing and were gigabytes in memory."""
    datums = request().SerializeToString() + b"\x1a\x00" * wire.MAX_PARTS
    chunks = request()
    chunks.data[0].MergeFromString(b"\x0a\x00" * wire.MAX_PARTS)
    shape = request(weights=(np.ones(3, "<f4"), FLOAT32))
    shape.data[0].loss_fn_inputs["weights"].shape.extend([1] * 1000)
    for body, words in (
        (datums, "the request has 100,001 datums"),
        (chunks.SerializeToString(), "100,003 datums, chunks"),
        (shape.SerializeToString(), "weights has 1,001 dimensions"),
    ):
        with pytest.raises(DataError, match=words):
            _read(body)


def test_the_name_of_a_request_is_read_without_its_data() -> None:
    message = request(weights=(np.ones(3, "<f4"), FLOAT32))
    name = wire.parse_request(message.SerializeToString(), wire.RequestName)
    assert (name.model_id, name.seq_id) == (message.model_id, message.seq_id)
    assert {field.name for field, _ in name.ListFields()} <= {"model_id", "seq_id"}


CREATE = {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": {"rank": 4}}


@pytest.mark.parametrize(
    ("model", "body", "words"),
    [
        (CreateModelBody, {**CREATE, "lora_config": {"rank": 0}}, "lora_config.rank"),
        (CreateModelBody, {**CREATE, "optimizer_config": {"type": "dimuon"}}, "optimizer_config"),
        (CreateModelBody, {**CREATE, "new_key": 1}, "new_key=1 is not offered here"),
        (OptimStepBody, {"model_id": "m", "seq_id": 1, "adam_params": {"beta1": 1}}, "beta1"),
        (OptimStepBody, {"model_id": "m", "seq_id": 1, "adam_params": {"x": 1}}, "adam_params.x"),
        *(
            (OptimStepBody, {"model_id": "m", "seq_id": 1, "adam_params": {name: value}}, name)
            for name, value in (
                ("learning_rate", float("nan")),
                ("learning_rate", -1.0),
                ("beta2", 1.0),
                ("grad_clip_norm", float("inf")),
            )
        ),
        (SaveWeightsBody, {"model_id": "m", "seq_id": 1, "kind": "other"}, "kind"),
        (
            SampleBody,
            {
                "sampling_session_id": "s",
                "seq_id": 1,
                "prompt": {"chunks": []},
                "topk_sample_logprobs": 5,
            },
            "topk_sample_logprobs=5 is not offered",
        ),
        (
            SampleBody,
            {
                "sampling_session_id": "s",
                "seq_id": 1,
                "prompt": {"chunks": []},
                "record_stability_info": True,
            },
            "record_stability_info=True is not offered.*\\n.*loss_fn=importance_sampling",
        ),
    ],
)
def test_json_that_asks_for_what_is_not_offered_is_refused_by_name(
    model: Any, body: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigError, MessageError), match=words):
        model.parse(json.dumps(body).encode())


def test_values_that_change_nothing_are_taken() -> None:
    more = {"type": "create_model", "user_metadata": {"a": 1}, "project_id": None}
    assert CreateModelBody.parse(json.dumps({**CREATE, **more}).encode()).lora_config.rank == 4


@pytest.mark.parametrize(
    ("tokens", "words"),
    [([], "the prompt is empty"), ([3, 300], "token 300 of the prompt"), ([-1], "token -1")],
)
def test_prompts_that_the_model_cannot_read_are_refused(tokens: list[int], words: str) -> None:
    chunk = {"type": "encoded_text", "tokens": tokens}
    body = {"sampling_session_id": "s", "seq_id": 1, "prompt": {"chunks": [chunk]}}
    with pytest.raises(DataError, match=words):
        SampleBody.parse(json.dumps(body).encode()).prompt.token_ids(264)
