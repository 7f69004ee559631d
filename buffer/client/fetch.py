"""The client's side of Fetch: payloads put together from their parts, side data checked by its digest.

Invariants: a payload that was handed on once is not requested again. A call that broke is repeated from the first
payload that had not come whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np
import xxhash
from numpy.typing import NDArray

from rollmesh.buffer.client.upload import SLOWEST_BYTES_PER_S
from rollmesh.buffer.protocol.side_data import array_of
from rollmesh.mesh.errors import DataError, RollmeshError
from rollmesh.mesh.rpc.errors import is_transient, to_rollmesh_error
from rollmesh.mesh.rpc.retries import call_with_retry
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory

_WHAT = "fetching payloads"
# Deadline of one call; a connection that died is noticed long before, by keepalive pings.
_CALL_S = 600.0


async def fetch(
    stub: Any, table: str, refs: Sequence[pb.MemberRef], *, retry_s: float, call_s: float = _CALL_S
) -> AsyncIterator[bytes]:
    """Payloads (or side data, as it is) in the order of `refs`.

    Args:
        stub: of the buffer.
        table: of the groups.
        refs: what is wanted.
        retry_s: seconds without a whole payload after which it gives up.
        call_s: deadline of one call.

    Raises:
        DataError: a group has ended, or has no such data.
        UnreachableError: the buffer stayed away.
    """
    done = 0
    while done < len(refs):
        request = pb.FetchRequest(table=table, members=refs[done:])

        async def begin(request: pb.FetchRequest = request) -> tuple[Any, AsyncIterator[bytes], bytes]:
            call = stub.Fetch(request, timeout=call_s)
            whole = _joined_payloads(call)
            first = await anext(whole, None)
            if first is None:
                raise RollmeshError(
                    f"{_WHAT}: the answer has no payload", hint="do client and buffer have the same version?"
                )
            return call, whole, first

        call, whole, first = await call_with_retry(begin, retry_s=retry_s, what=_WHAT)
        try:
            yield first
            done += 1
            async for payload in whole:
                yield payload
                done += 1
        except grpc.aio.AioRpcError as error:
            if not is_transient(error):
                raise to_rollmesh_error(error, _WHAT) from error
        finally:
            call.cancel()


async def _joined_payloads(call: Any) -> AsyncIterator[bytes]:
    """The payloads of a call, each put together from its parts."""
    parts: list[bytes] = []
    async for response in call:
        payloads = list(response.payloads)
        for index, part in enumerate(payloads):
            parts.append(part)
            if index < len(payloads) - 1 or not response.continues:
                whole = parts[0] if len(parts) == 1 else b"".join(parts)
                parts = []
                yield whole
                del whole


async def fetch_side(
    stub: Any, table: str, group_id: str, member: int, entry: trajectory.SideData, *, retry_s: float
) -> bytes | NDArray[np.generic]:
    """Side data of a member, by its entry in `MemberMeta.side`: an array where it was one.

    Raises:
        DataError: it is gone, or damaged.
        UnreachableError: the buffer stayed away.
    """
    ref = pb.MemberRef(group_id=group_id, member=member, side=entry.name)
    call_s = _CALL_S + entry.bytes / SLOWEST_BYTES_PER_S
    (data,) = [data async for data in fetch(stub, table, [ref], retry_s=retry_s, call_s=call_s)]
    if len(data) != entry.bytes or xxhash.xxh3_64_hexdigest(data) != entry.digest:
        raise DataError(
            f"side data {entry.name} of group {group_id}, member {member} is damaged: {len(data)} bytes with digest "
            f"{xxhash.xxh3_64_hexdigest(data)}, expected {entry.bytes} with {entry.digest}",
            hint="check the disk of buffer.side_dir",
        )
    return array_of(entry, data) if entry.dtype else data
