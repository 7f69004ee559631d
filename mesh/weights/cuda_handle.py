"""A block of CUDA memory, described in plain fields, so that another process of the machine can open it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from mesh.errors import WeightsError


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """What CUDA and torch need to open a block that another process has allocated.

    Attributes:
        device: UUID of the device; its number may differ from process to process.
        block: handle of the allocation, hex.
        nbytes: length of the block.
        offset: of the block in the allocation, in bytes.
        counter: name of torch's file of reference counters, hex.
        counter_offset: the block's counter in it.
        event: handle of the event after which the block is whole, hex.
        event_needed: whether that has to be waited for.
    """

    device: str
    block: str
    nbytes: int
    offset: int
    counter: str
    counter_offset: int
    event: str
    event_needed: bool

    def address(self) -> str:
        """As it travels in an offer."""
        return json.dumps(asdict(self))

    @classmethod
    def from_address(cls, address: str) -> CudaHandle:
        """Reads `address`.

        Raises:
            WeightsError: it is no such text, or a field is missing or of the wrong type.
        """
        try:
            fields = json.loads(address)
            handle = cls(**fields)
            for name in ("block", "counter", "event"):
                bytes.fromhex(fields[name])
        except (ValueError, TypeError) as error:
            raise WeightsError(f"a CUDA handle cannot be read: {error}") from error
        numbers = (handle.nbytes, handle.offset, handle.counter_offset)
        if not isinstance(handle.device, str) or not all(type(number) is int and number >= 0 for number in numbers):
            raise WeightsError("a CUDA handle cannot be read: a field has the wrong type")
        return handle
