"""The transport of `openrlhf+http://`: a server for OpenRLHF's `--reward.remote_url` (`--remote_rm_url`).

It gets `{"query": [...], "prompts": [...], "labels": [...]}`, where a query is the prompt with its response, and
answers `{"rewards": [...]}`, with `scores` and `extra_logs` if it likes. Source: OpenRLHF 0.11.2,
`SingleTurnAgentExecutor`. There a call that fails leaves the reward out; here it is an error of its items.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import grpc

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.adapters.openrlhf import label_of, read_rewards
from rollmesh.reward_service.adapters.results import OutputError
from rollmesh.reward_service.client.transports.http_calls import HttpCalls, Site, read_json
from rollmesh.reward_service.client.transports.interface import CallError
from rollmesh.reward_service.outcomes import to_proto


class OpenRlhfTransport:
    """Calls in OpenRLHF's form."""

    def __init__(self, site: Site) -> None:
        self._calls = HttpCalls(site)

    async def score(self, request: reward_pb2.ScoreRequest, timeout_s: float) -> reward_pb2.ScoreResponse:
        """See `Transport.score`."""
        answer = read_json(await self._calls.post("", json.dumps(_body(request.items)).encode(), timeout_s))
        try:
            outcomes = read_rewards(len(request.items), answer)
        except OutputError as error:
            raise CallError(grpc.StatusCode.INTERNAL, f"its answer has no rewards: it {error}") from error
        results = [to_proto(item.item_id, outcome) for item, outcome in zip(request.items, outcomes, strict=True)]
        return reward_pb2.ScoreResponse(results=results)

    async def info(self, timeout_s: float) -> reward_pb2.InfoResponse:
        """See `Transport.info`. The form has no such call: whatever is answered says that the server is there."""
        await self._calls.get("", timeout_s)
        raise CallError(grpc.StatusCode.UNIMPLEMENTED, "OpenRLHF's form has no description of the server")

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._calls.close()


def _body(items: Sequence[reward_pb2.ScoreItem]) -> dict[str, list[Any]]:
    return {
        "query": [item.prompt + item.response for item in items],
        "prompts": [item.prompt for item in items],
        "labels": [label_of(json.loads(item.ground_truth_json or "null")) for item in items],
    }
