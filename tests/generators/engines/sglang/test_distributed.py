"""A broadcast to a server of SGLang that breaks off: former weights stay, and the next version goes to a new group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.sglang.http_client import RefusedError
from rollmesh.generators.engines.sglang.transfers import distributed
from rollmesh.generators.engines.sglang.transfers.distributed import DistributedTransfer
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights.broadcast import connect_group, start_broadcast

TIMEOUT = timedelta(seconds=30)
WEIGHTS = {"a": torch.arange(5.0), "b": torch.ones(2, 3)}


class Server:
    """In the place of a client: the server's side of a broadcast as SGLang makes it, over gloo.

    Attributes:
        address: of the server.
        groups: by name.
        loaded: the last set that it has received.
        asked: paths, in order.
        takes: tensors that it receives before it does so no more; None: all.
        refuses: what it says instead of loading what it has received.
    """

    def __init__(self) -> None:
        self.address = "http://127.0.0.1:9"
        self.groups: dict[str, Any] = {}
        self.loaded: dict[str, torch.Tensor] = {}
        self.asked: list[str] = []
        self.takes: int | None = None
        self.refuses = ""

    async def post(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = 0) -> Any:
        self.asked.append(path)
        answer: Callable[[dict[str, Any]], None] | None = getattr(self, path.removeprefix("/"), None)
        if answer is not None:
            await asyncio.to_thread(answer, body or {})

    def init_weights_update_group(self, body: dict[str, Any]) -> None:
        host, port, name = body["master_address"], body["master_port"], body["group_name"]
        listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert {address.ip for address in listening if address.port == port} == {"127.0.0.1"}
        store = PrefixStore(name, TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT))
        place = PrefixStore("cpu/", PrefixStore(f"{name}/", store))
        size = body["world_size"]
        self.groups[name] = connect_group("gloo", place, rank=1, size=size, timeout=TIMEOUT, host=host)

    def update_weights_from_distributed(self, body: dict[str, Any]) -> None:
        group, layout = self.groups[body["group_name"]], zip(body["shapes"], body["dtypes"], strict=True)
        received = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in layout]
        try:
            for tensor in received[: self.takes]:
                start_broadcast(group, tensor, TIMEOUT).wait()
            if self.takes is not None:
                # It waits for what never comes.
                group.barrier().wait()
        except RuntimeError as error:
            raise RefusedError("/update", 400, f"Failed to receive weights: {error}") from error
        if self.refuses:
            raise RefusedError("/update", 400, self.refuses)
        self.loaded = dict(zip(body["names"], received, strict=True))

    def destroy_weights_update_group(self, body: dict[str, Any]) -> None:
        del self.groups[body["group_name"]]


def transfer() -> DistributedTransfer:
    return DistributedTransfer(lambda tensor: tensor.dtype, 1, session=True, device=torch.device("cpu"))


async def load(way: DistributedTransfer, server: Server) -> None:
    await way.load(server, way.stage(WEIGHTS.items()), "1:1")  # type: ignore[arg-type]  # in the place of a client


async def test_a_broadcast_that_breaks_off_is_made_again_with_the_next_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, way = Server(), transfer()
    await load(way, server)
    first = list(server.groups)
    server.takes, server.loaded = 1, {}
    monkeypatch.setattr(distributed, "STEP_S", 0.5)
    with pytest.raises(WeightsError, match=r"no progress for 0\.5 s|500ms") as caught:
        await load(way, server)
    assert "the former weights stay in service" in caught.value.hint
    assert not server.loaded
    assert server.asked[-2:] == ["/end_weight_update", "/destroy_weights_update_group"]
    monkeypatch.undo()
    server.takes = None
    await load(way, server)
    assert list(server.groups) != first
    assert {name: tensor.tolist() for name, tensor in server.loaded.items()} == {
        name: tensor.tolist() for name, tensor in WEIGHTS.items()
    }
    await way.close()


async def test_a_server_that_fails_at_loading_is_of_no_more_use() -> None:
    server, way = Server(), transfer()
    server.refuses = "Failed to update parameter online: it has half of them"
    with pytest.raises(EngineError, match="it has half of them"):
        await load(way, server)
    await way.close()


async def test_a_server_that_joins_no_group_keeps_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    server, way = Server(), transfer()

    def refuse(body: dict[str, Any]) -> None:
        raise RefusedError("/init", 400, "no such backend")

    monkeypatch.setattr(distributed, "STEP_S", 0.5)
    monkeypatch.setattr(server, "init_weights_update_group", refuse)
    with pytest.raises(WeightsError, match=r"joins no broadcast: .*no such backend"):
        await load(way, server)
    assert server.asked == ["/init_weights_update_group"]
