"""Messages that no service would send: from a descriptor, with values from the brink, and bytes that were damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

_WHOLE = (0, 1, 2, 3, 7, 255, 2**31 - 1, 2**32 - 1, 10**13, 2**48, 2**53, 2**63 - 1, 2**64 - 1)
_REAL = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"))
_TEXT = (
    "",
    "|",
    "a b",
    "{",
    "}",
    "\x00",
    "../../x",
    "é\U0001f600",
    "x" * 5000,
    "-1",
    "0",
    "null",
    "[]",
    "'; redis.call",
)
_BITS = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_FIXED32: 32}
_DEPTH = 4
Pool = Callable[[str], Sequence[Any]]
"""Field name -> values that mean something to the service at present (ids, leases, payloads)."""


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, pool: Pool, depth: int = 0) -> Message:
    """A message with any of its fields set, to values that mean something or to none that do."""
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw(st.integers(0, 3)) == 0 or depth > _DEPTH:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(draw, message, field)
        elif field.is_repeated:
            count = draw(st.sampled_from([0, 1, 1, 2, 5]))
            for _ in range(count):
                if field.message_type is not None:
                    getattr(message, field.name).append(draw(messages(field.message_type, pool, depth + 1)))
                else:
                    getattr(message, field.name).append(_value(draw, field, pool))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(messages(field.message_type, pool, depth + 1)))
        else:
            setattr(message, field.name, _value(draw, field, pool))
    return message


def _fill_map(draw: st.DrawFn, message: Message, field: FieldDescriptor) -> None:
    value = field.message_type.fields_by_name["value"]
    if value.type == FieldDescriptor.TYPE_DOUBLE:
        getattr(message, field.name)[draw(st.sampled_from(_TEXT))] = draw(st.sampled_from(_REAL))


def _value(draw: st.DrawFn, field: FieldDescriptor, pool: Pool) -> Any:
    known = [value for value in pool(field.name) if _fits(field, value)]
    if known and draw(st.integers(0, 3)):
        return draw(st.sampled_from(known))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return draw(st.binary(max_size=40))
        return draw(st.sampled_from(_TEXT))
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        real = draw(st.sampled_from(_REAL))
        return real if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE or abs(real) < 1e38 else float("inf")
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw(st.booleans())
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return draw(st.sampled_from([0, 1, 2, 3, 99]))
    return draw(st.sampled_from([v for v in _WHOLE if v < 2 ** _BITS.get(field.type, 64)]))


def _fits(field: FieldDescriptor, value: Any) -> bool:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return isinstance(value, bytes)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return isinstance(value, str)
    return isinstance(value, int) and field.cpp_type in (
        FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
    )  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The same bytes, cut, with some flipped, or with others before them."""
    kind = draw(st.sampled_from(["cut", "flip", "front", "noise"]))
    if kind == "cut":
        return data[: draw(st.integers(0, len(data)))]
    if kind == "front":
        return draw(st.binary(min_size=1, max_size=8)) + data
    if kind == "noise" or not data:
        return draw(st.binary(max_size=64))
    flipped = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        flipped[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(flipped)
