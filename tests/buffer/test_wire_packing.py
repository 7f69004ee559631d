"""Commands with large values go out uncopied, and byte for byte as hiredis packs them."""

from __future__ import annotations

from typing import Any

import hiredis
import pytest

from rollmesh.buffer.redis_backend.connection import _packed


@pytest.mark.parametrize("size", [0, 10, (8 << 10) - 1, 8 << 10, 100_000])
def test_packed_commands_are_what_hiredis_packs(size: int) -> None:
    value = b"x" * size
    commands: list[Any] = [
        ("SET", "key-ä", value, "EX", 86400, "NX"),
        ("PING",),
        ("SET", "other", value),
        ("EVALSHA", "digest", 1, "run", b"z"),
    ]
    parts = _packed(commands)
    assert b"".join(parts) == b"".join(hiredis.pack_command(command) for command in commands)
    assert any(part is value for part in parts) == (size >= 8 << 10)
