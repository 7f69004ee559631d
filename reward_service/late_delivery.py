"""Late rewards from other hosts: their messages, and the call that brings one to a reward service over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollmesh.mesh.config.reward import EndpointTls
from rollmesh.mesh.errors import PayloadError, RewardError
from rollmesh.reward_service.client.transports.http_calls import HttpCalls, Site
from rollmesh.reward_service.client.transports.interface import CallError
from rollmesh.reward_service.late.store import Arrival, Delivery, deliver

PATH = "/v1/deliver"
_CALL_S = 30.0
_MOST_BYTES = 1 << 16


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    ticket: str = Field(min_length=1)
    total: float | None = None
    components: dict[str, float] = {}
    reason: str = ""

    @model_validator(mode="after")
    def _says_something(self) -> _Message:
        if self.total is None and not self.reason:
            raise ValueError("there is neither a reward nor a reason")
        return self


class _Answer(BaseModel):
    arrival: Arrival


def receive(store: Path, content: bytes) -> bytes:
    """Takes a delivery that came over the network; returns the answer's body.

    Args:
        store: `reward.late.store`.
        content: the call's body.

    Raises:
        PayloadError: it is no delivery.
        LateStoreError: the store cannot be used.
    """
    message = _checked(lambda: _Message.model_validate_json(content))
    arrival = deliver(store.expanduser(), message.ticket, Delivery(message.total, message.components, message.reason))
    return _Answer(arrival=arrival).model_dump_json().encode()


async def deliver_to(url: str, ticket: str, delivery: Delivery, *, key: str, ca: Path | None) -> Arrival:
    """Brings the reward for a ticket to a reward service.

    Args:
        url: where the service answers over HTTP.
        ticket: as the reward function gave it.
        key: of `reward.http.key_file` there; empty: none.
        ca: authority of its certificate; None: those that the host trusts.

    Raises:
        ConfigError: the key would be sent in clear to another host.
        PayloadError: it is no delivery.
        RewardError: the service does not take it.
    """
    message = _checked(lambda: _Message(ticket=ticket, **asdict(delivery)))
    calls = HttpCalls(Site(url.rstrip("/"), key, EndpointTls(ca=ca), _MOST_BYTES))
    try:
        answer = await calls.post(PATH, message.model_dump_json().encode(), _CALL_S)
        return _Answer.model_validate_json(answer).arrival
    except (CallError, ValidationError) as error:
        raise RewardError(
            f"{url} has not confirmed the reward for {ticket}: {error}", hint="deliver it again: the first one counts"
        ) from error
    finally:
        await calls.close()


def _checked(make: Callable[[], _Message]) -> _Message:
    try:
        return make()
    except ValidationError as error:
        first = error.errors()[0]
        raise PayloadError(".".join(map(str, first["loc"])) or "delivery", first["msg"]) from error
