"""Any network: buckets in chunks over gRPC; a broken transfer goes on at the byte where it stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from generators.learner_link import closed_under_call
from generators.weights.transports.base import Fetch, Received, Transport
from mesh.errors import WeightsError
from mesh.rpc import is_transient, to_rollmesh_error
from mesh.weights import Wanted
from protos import weights_pb2

_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0


class Grpc(Transport):
    """Fetches from the learner's Weights service."""

    name = "grpc"
    alone = True

    def refusal(self, wanted: Wanted) -> str:  # noqa: ARG002  it can always
        """See Transport: the service has every version that is kept."""
        return ""

    async def receive(self, fetch: Fetch, arrived: Callable[[memoryview, int], None]) -> Received:
        """See Transport."""
        wanted = fetch.wanted
        data = memoryview(bytearray(wanted.nbytes))
        for index in range(len(wanted.buckets)):
            await _BucketFetch(fetch, index, wanted.part(data, index)).run()
            arrived(data, index)
        return Received(data)


class _BucketFetch:
    """One bucket, over as many calls as it takes."""

    def __init__(self, fetch: Fetch, index: int, target: memoryview) -> None:
        self._fetch = fetch
        wanted = fetch.wanted
        self._request = weights_pb2.FetchBucketRequest(policy=wanted.policy.to_proto(), bucket=index)
        if wanted.base is not None:
            self._request.base.CopyFrom(wanted.base.to_proto())
        self._name = wanted.name(index)
        self._target = target
        self._done = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._fetch.timeout_s
        pause = _FIRST_RETRY_S
        last_error = "no answer"
        while self._done < len(self._target):
            if self._fetch.superseded():
                raise WeightsError(f"{self._name}: given up, another learner has announced its own weights")
            remaining = deadline - loop.time()
            if remaining <= 0:
                raise WeightsError(
                    f"{self._name} did not arrive within {self._fetch.timeout_s:.0f} s: {last_error}",
                    hint="raise weights.timeout_s if the link is slow",
                )
            before = self._done
            try:
                await self._one_call(remaining)
            except grpc.aio.AioRpcError as error:
                if not is_transient(error):
                    raise _as_weights_error(error, self._name) from error
                last_error = error.details() or error.code().name
            except (grpc.aio.UsageError, asyncio.CancelledError) as error:
                if not closed_under_call(error):
                    raise
                raise WeightsError(f"{self._name}: the connection was closed, the learner has changed") from None
            if self._done > before:
                pause = _FIRST_RETRY_S
            elif self._done < len(self._target):
                await asyncio.sleep(min(pause, remaining))
                pause = min(2 * pause, _LONGEST_RETRY_S)

    async def _one_call(self, timeout_s: float) -> None:
        self._request.offset = self._done
        async for chunk in self._fetch.learner.FetchBucket(self._request, timeout=timeout_s):
            end = self._done + len(chunk.data)
            if chunk.offset != self._done or end > len(self._target):
                raise WeightsError(f"{self._name}: got bytes from {chunk.offset} on, {self._done} was next")
            self._target[self._done : end] = chunk.data
            self._done = end


def _as_weights_error(error: grpc.aio.AioRpcError, what: str) -> WeightsError:
    typed = to_rollmesh_error(error, what)
    return typed if isinstance(typed, WeightsError) else WeightsError(typed.message, hint=typed.hint)
