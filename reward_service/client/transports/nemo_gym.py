"""The transport of `nemo-gym+http://`: a resources server of NeMo Gym, one `POST /verify` per item."""

from __future__ import annotations

import asyncio
import json
import time

import grpc

from rollmesh.mesh.errors import PayloadError
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.adapters.nemo_gym import read_verified, verify_body
from rollmesh.reward_service.adapters.results import OutputError
from rollmesh.reward_service.client.transports.http_calls import HttpCalls, Site, read_json
from rollmesh.reward_service.client.transports.interface import CallError
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, not_begun, to_proto

_PATH = "/verify"
# Requests at a time of one call: others of its items wait for them.
_AT_ONCE = 16


class NemoGymTransport:
    """Calls in NeMo Gym's form."""

    def __init__(self, site: Site) -> None:
        self._calls = HttpCalls(site)

    async def score(self, request: reward_pb2.ScoreRequest, timeout_s: float) -> reward_pb2.ScoreResponse:
        """See `Transport.score`. A request that fails is an error of its item; if all fail, the call does."""
        deadline = time.monotonic() + timeout_s
        free = asyncio.Semaphore(_AT_ONCE)

        async def verified(item: reward_pb2.ScoreItem) -> Outcome | CallError:
            async with free:
                return await self._verified(item, deadline)

        found = await asyncio.gather(*map(verified, request.items))
        errors = [each for each in found if isinstance(each, CallError)]
        if errors and len(errors) == len(found):
            raise errors[0]
        results = [
            to_proto(item.item_id, _of_item(each) if isinstance(each, CallError) else each)
            for item, each in zip(request.items, found, strict=True)
        ]
        return reward_pb2.ScoreResponse(results=results)

    async def info(self, timeout_s: float) -> reward_pb2.InfoResponse:
        """See `Transport.info`. The form has no such call: whatever is answered says that the server is there."""
        await self._calls.get("", timeout_s)
        raise CallError(grpc.StatusCode.UNIMPLEMENTED, "NeMo Gym's form has no description of the server")

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._calls.close()

    async def _verified(self, message: reward_pb2.ScoreItem, deadline: float) -> Outcome | CallError:
        if (left := deadline - time.monotonic()) <= 0:
            return not_begun("the call's other items took its time")
        try:
            body = verify_body(RewardItem.from_proto(message))
            return read_verified(body, read_json(await self._calls.post(_PATH, json.dumps(body).encode(), left)))
        except PayloadError as error:
            return Failed("bad_input", str(error))
        except OutputError as error:
            return Failed("bad_output", f"the server {error}")
        except CallError as error:
            return error


def _of_item(error: CallError) -> Outcome:
    """The outcome of one item whose request failed."""
    if error.throttled:
        return not_begun(error.details)
    if error.status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Failed("timeout", error.details, retryable=True)
    return Failed("endpoint", error.details, retryable=error.status is not grpc.StatusCode.INVALID_ARGUMENT)
