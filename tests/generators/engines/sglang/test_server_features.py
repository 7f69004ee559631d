"""Servers that cannot do what is needed are refused when they are met, and told what they lack."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from aiohttp.test_utils import TestServer
from safetensors.torch import load_file

from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.sglang import server_args
from rollmesh.generators.engines.sglang.http_client import HttpClient, RefusedError
from rollmesh.generators.engines.sglang.server_features import ServerFeatures, detect_features
from rollmesh.generators.engines.sglang.transfers import disk
from rollmesh.generators.engines.sglang.transfers.disk import DiskTransfer
from rollmesh.generators.engines.sglang.transfers.tensor import StagedBuckets, TensorTransfer
from rollmesh.generators.engines.types import EngineSettings, KvPolicy
from rollmesh.mesh.config.rollout import SglangSection
from rollmesh.mesh.errors import WeightsError
from tests.generators.engines.collector import Collector
from tests.generators.engines.sglang.stand_in import StandIn
from tests.generators.engines.tiny import ContractModel


async def _unknown() -> str:
    return ""


def _ask(server: StandIn, transfer: str = "tensor") -> ServerFeatures:
    async def run() -> ServerFeatures:
        async with TestServer(server.application()) as address:
            client = HttpClient(str(address.make_url("/")), _unknown)
            try:
                return await detect_features(client, transfer)
            finally:
                await client.close()

    return asyncio.run(run())


def _without(path: str) -> Callable[[StandIn], None]:
    return lambda server: server.paths.remove(path)


def _says(**info: object) -> Callable[[StandIn], None]:
    return lambda server: server.info.update(info)


def _samples_without(name: str) -> Callable[[StandIn], None]:
    def change(server: StandIn) -> None:
        (server.sampled if name in server.sampled else server.sampled["meta_info"]).pop(name)

    return change


def test_what_a_server_says_of_itself_is_believed() -> None:
    server = StandIn()
    can = _ask(server)
    assert (can.version, can.context, can.ranks) == ("9.9", 264, 1)
    assert can.one_front
    assert can.drains
    assert can.adapter_rank == 0
    assert can.session
    assert not can.sleeps
    assert server.asked == ["/end_weight_update", "/continue_generation", "/generate"], "it may stand still, amid one"
    server.info |= {"tokenizer_worker_num": 2, "disable_overlap_schedule": False, "enable_memory_saver": True}
    server.paths.append("/release_memory_occupation")
    server.paths.remove("/begin_weight_update")
    can = _ask(server)
    assert not can.one_front
    assert not can.drains
    assert not can.session
    assert can.sleeps


def test_a_server_says_which_grammars_it_follows() -> None:
    server = StandIn()
    assert not _ask(server).grammars
    server.info["grammar_backend"] = "xgrammar"
    assert not _ask(server).grammars
    server.info["grammar_backend"] = server_args.GRAMMARS
    assert _ask(server).grammars


def test_a_server_says_the_rank_of_adapters_that_it_takes() -> None:
    server = StandIn()
    server.info |= {"enable_lora": True, "max_lora_rank": 16}
    assert _ask(server).adapter_rank == 16


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        (_without("/pause_generation"), "/pause_generation"),
        (_without("/update_weights_from_tensor"), "/update_weights_from_tensor"),
        (_without("/server_info"), "/server_info"),
        (lambda server: server.fields.clear(), "extra_key"),
        (_says(dp_size=2), "dp_size 1"),
        (_says(nnodes=2), "several hosts"),
        (_says(context_length=None), "how long its sequences may be"),
        (lambda server: setattr(server, "is_generation", False), "generates nothing"),
        (_samples_without("output_ids"), "output_ids"),
        (_samples_without("output_token_logprobs"), "output_token_logprobs"),
        (_samples_without("weight_versions"), "tokens carry no versions"),
        (lambda server: server.refused.add("/generate"), "does not generate from token ids"),
    ],
)
def test_a_server_that_lacks_something_is_refused_by_its_name(change: Callable[[StandIn], None], lacks: str) -> None:
    server = StandIn()
    change(server)
    with pytest.raises(EngineError, match=lacks):
        _ask(server)


def test_a_server_without_prefix_cache_needs_no_keys_for_it() -> None:
    server = StandIn()
    server.fields.clear()
    server.info["disable_radix_cache"] = True
    assert _ask(server).context == 264


def test_replicas_take_weights_from_disk() -> None:
    server = StandIn()
    server.info["dp_size"] = 2
    assert _ask(server, "disk").ranks == 1


def test_weights_in_several_files_are_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FILE_BYTES", 8)
    weights = {name: torch.full((count,), float(count)) for name, count in (("a", 1), ("b", 1), ("c", 2), ("d", 1))}
    staged = DiskTransfer(lambda tensor: tensor.dtype, tmp_path).stage(weights.items())
    assert isinstance(staged, disk.StagedFolder)
    files = [load_file(file) for file in sorted(staged.folder.iterdir())]
    assert [list(file) for file in files] == [["a", "b"], ["c"], ["d"]]
    for file in files:
        for name, tensor in file.items():
            assert torch.equal(tensor, weights[name])
    staged.discard()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("refused", "error"), [("/begin_weight_update", WeightsError), ("/end_weight_update", RefusedError)]
)
def test_an_update_that_does_not_begin_leaves_the_former_weights(refused: str, error: type[Exception]) -> None:
    """One that goes wrong later leaves an unknown state."""
    server = StandIn()
    server.refused.add(refused)

    async def run() -> None:
        async with TestServer(server.application()) as address:
            client = HttpClient(str(address.make_url("/")), _unknown)
            transfer = TensorTransfer(lambda tensor: tensor.dtype, 1, session=True)
            try:
                with pytest.raises(error):
                    await transfer.load(client, StagedBuckets([]), "v1")
            finally:
                await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_weights_never_overtake_a_step(kv: KvPolicy, contract_model: ContractModel) -> None:
    """A server that plans one step while it computes another is refused where a pause leaves that one under way."""
    server = StandIn()
    server.info["disable_overlap_schedule"] = False

    async def run() -> str:
        async with TestServer(server.application()) as address:
            collector = Collector()
            section = SglangSection(address=str(address.make_url("/")), transfer="disk")
            settings = EngineSettings(kv=kv, sglang=section)
            engine = create_engine("sglang", contract_model.folder, settings, collector)
            engine.start()
            try:
                await asyncio.to_thread(engine._inflight.wait_until_up)  # type: ignore[attr-defined]  # of a driven engine
            except EngineError as error:
                return str(error)
            finally:
                await asyncio.to_thread(engine.stop)
            return ""

    assert ("a step of the running sequences is under way" in asyncio.run(run())) == (kv == "keep")
