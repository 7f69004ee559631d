"""What vLLM's own ways of the weights are given by us, up to its trainers; what these do with it needs CUDA."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch

from mesh.errors import ConfigError, WeightsError

pytestmark = [pytest.mark.engine("vllm"), pytest.mark.timeout(300)]


class FakeEngine:
    """Stands for AsyncLLM: writes down what it is called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> None:
            self.threads.add(threading.get_ident())
            self.calls.append((name, *[vars(item) if hasattr(item, "__dict__") else item for item in arguments]))

        return call


class FakeTrainer:
    """Stands for vLLM's trainers: reads the source as nccl and ipc do, or takes patches as sparse does."""

    def __init__(self, client: Any, source: Any) -> None:
        self.client, self.source = client, source
        self.sent: list[dict[str, Any]] = []
        client.init_weight_transfer_engine({"port": 1})

    def send_weights(self, patches: Any = None) -> None:
        self.client.start_weight_update()
        if patches is None:
            names = [meta.name for meta in self.source.metadata()]
            self.sent.append({name: tensor.clone() for name, tensor in self.source})
            assert names == list(self.sent[-1])
        else:
            self.sent.append({patch.name: patch for patch in patches})
        self.client.update_weights({"names": list(self.sent[-1])})
        self.client.finish_weight_update()


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[FakeTrainer]:
    """Made in the place of vLLM's; devices are those of a CPU."""
    from generators.engines.vllm import native

    made: list[FakeTrainer] = []

    def trainer_init(_: Any, *, client: Any, source: Any = None) -> FakeTrainer:
        made.append(FakeTrainer(client, source))
        return made[-1]

    monkeypatch.setattr(native.WeightTransferTrainerFactory, "trainer_init", trainer_init)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    return made


WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def test_whole_sets_are_streamed_under_their_label(trainers: list[FakeTrainer]) -> None:
    from generators.engines.vllm.native import FullSender

    engine = FakeEngine()

    async def run() -> None:
        sender = FullSender(torch.device("cpu"), None)
        await sender.connect(engine)
        staged = sender.stage(WEIGHTS)
        await sender.send(staged, "1.7")
        sender.discard(staged)
        assert staged == {}
        assert trainers[0].source.metadata() == [], "nothing is held on to"

    asyncio.run(run())
    assert [name for name, *_ in engine.calls] == [
        "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
    ]  # fmt: skip
    assert engine.calls[-1] == ("finish_weight_update", "1.7")
    assert engine.threads == {threading.get_ident()}, "calls of the engine are made in its event loop"
    [sent] = trainers[0].sent
    assert all(torch.equal(sent[name], tensor) for name, tensor in WEIGHTS.items())


def test_sparse_sends_what_has_changed_since(trainers: list[FakeTrainer]) -> None:
    """All at first and when the workers have dropped theirs; an equal set is a version all the same."""
    from generators.engines.vllm.native import SparseSender

    engine = FakeEngine()
    changed = {"a": WEIGHTS["a"].clone(), "b": WEIGHTS["b"]}
    changed["a"][1, 1] = -0.5

    async def run() -> None:
        sender = SparseSender(torch.device("cpu"), None)
        await sender.connect(engine)
        for label, weights in (("1.1", WEIGHTS), ("1.2", changed), ("1.3", changed)):
            staged = sender.stage(weights)
            await sender.send(staged, label)
            sender.discard(staged)
        sender.forget()
        await sender.send(sender.stage(changed), "1.4")

    asyncio.run(run())
    first, second, again = trainers[0].sent
    for sent, weights in ((first, WEIGHTS), (again, changed)):
        for name, tensor in weights.items():
            assert sent[name].indices.tolist() == list(range(tensor.numel()))
            assert torch.equal(sent[name].values.view(tensor.shape), tensor)
            assert sent[name].full_shape == tuple(tensor.shape)
    [patch] = second.values()
    assert (patch.name, patch.indices.tolist(), patch.values.tolist()) == ("a", [4], [-0.5])
    assert patch.indices.dtype == torch.int32
    labels = [rest[0] for name, *rest in engine.calls if name == "finish_weight_update"]
    assert labels == ["1.1", "1.2", "1.3", "1.4"]


def test_changes_are_told_by_bits() -> None:
    from generators.engines.vllm.native import changed

    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        former = torch.tensor([[0.0, 1.0], [float("nan"), 2.0]]).to(dtype)
        new = torch.tensor([[-0.0, 1.0], [float("nan"), 3.0]]).to(dtype)
        assert changed(new, former).tolist() == [0, 3]
        assert changed(new, None).tolist() == [0, 1, 2, 3]


def test_what_a_transfer_needs_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from generators.engines.vllm.native import FullSender, SparseSender, native_sender

    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    for transfer, kind in (("nccl", FullSender), ("sparse", SparseSender)):
        sender = native_sender(transfer, torch.device("cuda:1"), 1)
        assert isinstance(sender, kind)
        assert (sender._device, sender._info.world_size) == (torch.device("cuda", 2), 2)
        with pytest.raises(ConfigError, match="beside the 2 of vLLM"):
            native_sender(transfer, torch.device("cuda:1"), 2)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
    assert native_sender("ipc", torch.device("cuda:1"), 1)._device == torch.device("cuda", 1)
    huge = torch.empty(2**31, dtype=torch.int8, device="meta")
    with pytest.raises(WeightsError, match="too large"):
        SparseSender(torch.device("cpu"), None).stage({"huge": huge})


def test_experts_of_each_step_become_those_of_the_response() -> None:
    """As vLLM tells them: the prompt's with the first token, then one row per step; none of the last token."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    from generators.engines.driven.backend import Chunk
    from generators.engines.vllm.decoding import Stream

    experts = np.arange(5 * 2 * 2, dtype=np.int16).reshape(5, 2, 2)
    steps = [([7], experts[:3], None), ([8], experts[3:4], None), ([9], experts[4:], FinishReason.LENGTH)]

    async def run() -> list[Chunk]:
        chunks: list[Chunk] = []
        stream = Stream(chunks.append)
        for tokens, rows, finish in steps:
            stream.push(EngineCoreOutput("a", tokens, finish_reason=finish, routed_experts=rows), "1.1")
        return chunks

    chunks = asyncio.run(run())
    assert [chunk.routed_experts is None for chunk in chunks] == [True, True, False]
    np.testing.assert_array_equal(chunks[-1].routed_experts, experts)
