"""Envoy's access-log messages, cut down to what the service reads.

The same wire format as `envoy.data.accesslog.v3`, but every text is declared as bytes: a client may put any
byte into a header, and one text that is not UTF-8 would make a whole batch of entries unreadable.
"""

from typing import Any, Final, TypeAlias

from envoy.data.accesslog.v3 import accesslog_pb2
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto

_PACKAGE: Final = "inferact"
_Type: TypeAlias = "FieldDescriptorProto.Type.ValueType"
_BYTES: Final = FieldDescriptorProto.TYPE_BYTES
_UINT32: Final = FieldDescriptorProto.TYPE_UINT32

# message -> field -> (number, type, repeated); a type that is a string names a message.
_MESSAGES: Final[dict[str, dict[str, "tuple[int, _Type | str, bool]"]]] = {
    "Batch": {"http_logs": (2, ".inferact.Logs", False)},
    "Logs": {"log_entry": (1, ".inferact.Entry", True)},
    "Entry": {
        "common": (1, ".inferact.Common", False),
        "request": (3, ".inferact.Request", False),
        "response": (4, ".inferact.Response", False),
    },
    "Common": {
        "start_time": (5, ".google.protobuf.Timestamp", False),
        "upstream_cluster": (15, _BYTES, False),
        "response_flags": (16, ".envoy.data.accesslog.v3.ResponseFlags", False),
        "metadata": (17, ".inferact.Metadata", False),
        "route_name": (19, _BYTES, False),
        "duration": (23, ".google.protobuf.Duration", False),
        "attempts": (24, _UINT32, False),
        "kind": (33, _UINT32, False),
    },
    "Request": {"request_id": (9, _BYTES, False), "headers": (13, ".inferact.Pair", True)},
    "Response": {
        "code": (1, ".google.protobuf.UInt32Value", False),
        "headers": (4, ".inferact.Pair", True),
        "details": (6, _BYTES, False),
    },
    "Pair": {"key": (1, _BYTES, False), "value": (2, _BYTES, False)},
    "Metadata": {"namespaces": (1, ".inferact.Namespace", True)},
    "Namespace": {"key": (1, _BYTES, False), "value": (2, ".inferact.Struct", False)},
    "Struct": {"fields": (1, ".inferact.Field", True)},
    "Field": {"key": (1, _BYTES, False), "value": (2, ".inferact.Value", False)},
    "Value": {"text": (3, _BYTES, False)},
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="inferact/entries.proto", package=_PACKAGE, syntax="proto3"
    )
    file.dependency.extend(
        [
            *(f"google/protobuf/{name}.proto" for name in ("duration", "timestamp", "wrappers")),
            accesslog_pb2.DESCRIPTOR.name,
        ]
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, repeated) in fields.items():
            label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
            if isinstance(kind, str):
                message.field.add(
                    name=field,
                    number=number,
                    label=label,
                    type=FieldDescriptorProto.TYPE_MESSAGE,
                    type_name=kind,
                )
            else:
                message.field.add(name=field, number=number, label=label, type=kind)
    return file


descriptor_pool.Default().Add(_file())
_BATCH: Final[Any] = message_factory.GetMessageClass(
    descriptor_pool.Default().FindMessageTypeByName(f"{_PACKAGE}.Batch")
)


def read_batch(message: bytes) -> list[Any]:
    """The entries of a `StreamAccessLogsMessage`. Raises `DecodeError` for what is none."""
    return list(_BATCH.FromString(message).http_logs.log_entry)
