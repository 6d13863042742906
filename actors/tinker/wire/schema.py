"""The protobuf messages of the Tinker API, made from a table of their fields.

Field numbers and types are those that the API's own clients send and read. The messages are made
in a pool of their own: an SDK in the same process has its own of the same names.
"""

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE: Final = "tinkermq_tinker"
_Field = tuple[int, str, str]
_REPEATED, _MAP, _ONEOF, _OPTIONAL = "repeated ", "map ", "oneof ", "optional "

_MESSAGES: Final[dict[str, list[_Field]]] = {
    "EncodedTextChunk": [(1, "tokens", "bytes")],
    "ImageChunk": [(1, "data", "bytes"), (2, "format", "string")],
    "DmelChunk": [(1, "dmel", "bytes")],
    "Chunk": [
        (1, "encoded_text", "oneof chunk EncodedTextChunk"),
        (2, "image", "oneof chunk ImageChunk"),
        (3, "dmel", "oneof chunk DmelChunk"),
    ],
    "SparseCsr": [
        (1, "values", "bytes"),
        (2, "crow_indices", "bytes"),
        (3, "col_indices", "bytes"),
    ],
    "Tensor": [
        (1, "dense", "oneof encoding bytes"),
        (2, "sparse_csr", "oneof encoding SparseCsr"),
        (3, "dtype", "int32"),
        (4, "shape", "repeated int64"),
    ],
    "Datum": [(1, "model_input", "repeated Chunk"), (2, "loss_fn_inputs", "map Tensor")],
    "LossConfigValue": [(1, "number", "oneof value double"), (2, "text", "oneof value string")],
    "ForwardBackwardRequest": [
        (1, "model_id", "string"),
        (2, "seq_id", "int32"),
        (3, "data", "repeated Datum"),
        (4, "loss_fn", "string"),
        (5, "loss_fn_config", "map double"),
        (6, "forward_only", "bool"),
        (7, "loss_fn_config_v2", "map LossConfigValue"),
    ],
    "BatchedTensor": [
        (1, "data", "bytes"),
        (2, "offsets", "bytes"),
        (3, "dtype", "int32"),
        (4, "trailing_shape", "repeated int64"),
    ],
    "ArrayRecord": [
        (1, "type_tag", "string"),
        (2, "fields", "map BatchedTensor"),
        (3, "num_datums", "int64"),
    ],
    "ForwardBackwardOutput": [
        (1, "loss_fn_output_type", "string"),
        (2, "loss_fn_outputs", "repeated ArrayRecord"),
        (3, "metrics", "map double"),
    ],
    "TopkLogprobs": [
        (1, "token_ids", "bytes"),
        (2, "logprobs", "bytes"),
        (3, "k", "uint32"),
        (4, "length", "uint32"),
    ],
    "SampledSequence": [
        (1, "stop_reason", "int32"),
        (2, "tokens", "bytes"),
        (3, "logprobs", "optional bytes"),
        (4, "topk_sampled_logprobs", "optional TopkLogprobs"),
    ],
    "SampleResponse": [
        (1, "sequences", "repeated SampledSequence"),
        (2, "prompt_logprobs", "optional bytes"),
        (3, "topk_prompt_logprobs", "optional TopkLogprobs"),
        (4, "prompt_cache_hit_tokens", "int32"),
        (5, "target_prompt_logprobs", "optional Tensor"),
    ],
}
"""Number, name and type of the fields. An enumeration has the wire form of an int32."""

_F = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bytes": _F.TYPE_BYTES,
    "string": _F.TYPE_STRING,
    "int32": _F.TYPE_INT32,
    "uint32": _F.TYPE_UINT32,
    "int64": _F.TYPE_INT64,
    "double": _F.TYPE_DOUBLE,
    "bool": _F.TYPE_BOOL,
}


def _made() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="tinkermq/tinker.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            _add(message, field)
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(names[name]) for name in _MESSAGES}


def _add(message: descriptor_pb2.DescriptorProto, field: _Field) -> None:
    number, name, kind = field
    made = message.field.add(name=name, number=number, label=_F.LABEL_OPTIONAL)
    if kind.startswith(_REPEATED):
        made.label, kind = _F.LABEL_REPEATED, kind.removeprefix(_REPEATED)
    elif kind.startswith(_MAP):
        made.label = _F.LABEL_REPEATED
        entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
        entry.options.map_entry = True
        _add(entry, (1, "key", "string"))
        _add(entry, (2, "value", kind.removeprefix(_MAP)))
        made.type, made.type_name = _F.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{entry.name}"
        return
    elif kind.startswith(_ONEOF):
        _, group, kind = kind.split(" ")
        names = [one.name for one in message.oneof_decl]
        if group not in names:
            message.oneof_decl.add(name=group)
            names.append(group)
        made.oneof_index = names.index(group)
    elif kind.startswith(_OPTIONAL):
        kind = kind.removeprefix(_OPTIONAL)
        made.proto3_optional = True
        made.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    if kind in _SCALARS:
        made.type = _SCALARS[kind]
    else:
        made.type, made.type_name = _F.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


_CLASSES: Final = _made()
ForwardBackwardRequest: Final = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput: Final = _CLASSES["ForwardBackwardOutput"]
SampleResponse: Final = _CLASSES["SampleResponse"]
