"""Protobuf's variable-length integers, for messages that are put together by hand."""


def encode_varint(value: int) -> bytes:
    """A number of at least 0, seven bits a byte, the lowest first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
