"""vLLM's own trainers, driven by us, up to what only CUDA can do: streams, memory handles and a communicator."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.generators.engines.vllm.engine_args import engine_arguments
from rollmesh.mesh.config.rollout import VllmSection
from rollmesh.mesh.errors import ConfigError, WeightsError
from tests.generators.engines.collector import DEADLINE_S
from tests.generators.engines.tiny import ContractModel

if TYPE_CHECKING:
    from rollmesh.generators.engines.vllm.native_transfer import NativeSender

pytestmark = [pytest.mark.engine("vllm")]

WEIGHTS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
    "c": torch.arange(8).view(2, 4).T,
    "d": torch.tensor(3.0),
}


class FakeEngine:
    """Stands for AsyncLLM: writes down what it is called with, and unpacks what it is sent.

    Attributes:
        silent: a call that is never answered.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()
        self.received: dict[str, torch.Tensor] = {}
        self.silent = ""

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> None:
            self.threads.add(threading.get_ident())
            self.calls.append((name, *[vars(item) if hasattr(item, "__dict__") else item for item in arguments]))
            if name == self.silent:
                await asyncio.get_running_loop().create_future()
            if name == "update_weights" and self._device.buffer is not None:
                self._unpack(arguments[0].update_info, self._device.buffer)

        return call

    def _unpack(self, info: Any, buffer: torch.Tensor) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

        assert sum(info["tensor_sizes"]) <= buffer.numel()
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        packed = buffer[: sum(info["tensor_sizes"])]
        for name, tensor in unpack_tensor(packed, info["names"], info["shapes"], dtypes, info["tensor_sizes"]):
            self.received[name] = tensor.clone()


class Device:
    """The part of CUDA that the trainers touch.

    Attributes:
        where: their buffers are.
        buffer: that ipc shares; None before.
        taken: bytes of all blocks asked for by us.
        emptied: how often torch's cache was.
        room: bytes that there are.
    """

    def __init__(self) -> None:
        self.where = "cpu"
        self.buffer: torch.Tensor | None = None
        self.taken: list[int] = []
        self.emptied = 0
        self.room = 2**62

    def packed(self, *size: Any, **options: Any) -> torch.Tensor:
        """For vLLM's `torch.empty`."""
        self.buffer = torch.empty(*size, **{**options, "device": self.where})
        return self.buffer

    def reserved(self, nbytes: int, **options: Any) -> torch.Tensor:
        """For ours."""
        self.taken.append(nbytes)
        if nbytes > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(nbytes, **{**options, "device": "meta"})


class Torch:
    """The torch module, but for what makes memory."""

    def __init__(self, empty: Callable[..., torch.Tensor]) -> None:
        self.empty = empty

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    from vllm.distributed.weight_transfer import packed_tensor

    from rollmesh.generators.engines.vllm import native_transfer

    device, stream = Device(), SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(packed_tensor, "torch", Torch(device.packed))
    monkeypatch.setattr(native_transfer, "torch", Torch(device.reserved))
    monkeypatch.setattr(packed_tensor, "reduce_tensor", lambda _: (None, ("handle",)))
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda _, count: (stream,) * count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: setattr(device, "emptied", device.emptied + 1))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    return device


class FakeGroup:
    """Stands for the communicator: keeps what is broadcast.

    Attributes:
        sent: packed buffers.
        stuck: set by a test: a broadcast never ends.
    """

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.stuck: threading.Event | None = None

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        if self.stuck is not None:
            self.stuck.set()
            threading.Event().wait()
        self.sent.append(tensor)

    def destroy(self) -> None:
        """Nothing to give back."""


@asynccontextmanager
async def connected(sender: NativeSender, engine: Any) -> AsyncIterator[NativeSender]:
    await sender.connect(engine)
    try:
        yield sender
    finally:
        sender.close()


def ipc_sender(where: str = "cpu") -> NativeSender:
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    from rollmesh.generators.engines.vllm.native_transfer import NativeSender

    return NativeSender(torch.device(where), IPCTrainerInitInfo(rank=0, packed=True), in_flight=1)


@pytest.fixture
def group(device: Device, monkeypatch: pytest.MonkeyPatch) -> FakeGroup:
    from vllm.distributed.weight_transfer import nccl_engine

    group = FakeGroup()
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda _: group)
    return group


def nccl_sender() -> NativeSender:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    from rollmesh.generators.engines.vllm.native_transfer import NativeSender

    return NativeSender(torch.device("cpu"), NCCLTrainerInitInfo("127.0.0.1", 1, 2, rank=0), in_flight=3)


def test_sets_arrive_whole_under_their_labels_and_leave_nothing_behind(device: Device) -> None:
    engine = FakeEngine(device)
    first, second = WEIGHTS, {name: tensor + 1 for name, tensor in WEIGHTS.items()}

    async def run() -> None:
        async with connected(ipc_sender(), engine) as sender:
            for label, weights in (("1.7", first), ("1.8", second)):
                staged = sender.stage(weights)
                assert all(staged[name] is tensor for name, tensor in weights.items()), "nothing is copied beforehand"
                await sender.send(staged, label)
                sender.discard(staged)
                assert staged == {}
                assert not sender._source.tensors
                assert engine.received.keys() == weights.keys()
                assert all(torch.equal(engine.received[name], tensor) for name, tensor in weights.items())

    asyncio.run(run())
    update = ["start_weight_update", "update_weights", "finish_weight_update"]
    assert [name for name, *_ in engine.calls] == ["init_weight_transfer_engine", *update, *update]
    assert [rest for name, *rest in engine.calls if name == "finish_weight_update"] == [["1.7"], ["1.8"]]
    assert engine.threads == {threading.get_ident()}, "calls of the engine are made in its event loop"
    assert device.emptied == 2


# Rows and width of the embedding: the largest tensor of these.
MODELS = {
    "SmolLM2-135M": (49152, 576),
    "Qwen2.5-0.5B": (151936, 896),
    "Qwen3-0.6B": (151936, 1024),
    "Llama-3.2-1B": (128256, 2048),
    "Qwen2.5-7B": (152064, 3584),
    "Llama-3.1-70B": (128256, 8192),
}


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_models_of_any_size_go_through_the_buffer(shape: tuple[int, int], device: Device) -> None:
    """By vLLM's own producer, with tensors that have no memory."""
    device.where = "meta"
    engine = FakeEngine(device)
    engine._unpack = lambda info, _: engine.received.update(dict.fromkeys(info["names"]))  # type: ignore[method-assign]
    layer = torch.empty(shape[1], 4 * shape[1], dtype=torch.bfloat16, device="meta")
    weights = {"embedding": torch.empty(shape, dtype=torch.bfloat16, device="meta"), "up": layer, "down": layer.T}

    async def run() -> None:
        async with connected(ipc_sender("meta"), engine) as sender:
            await sender.send(sender.stage(weights), "1.1")

    asyncio.run(run())
    assert list(engine.received) == list(weights)
    assert device.buffer is not None
    largest = max(tensor.nbytes for tensor in weights.values())
    assert device.buffer.nbytes == max(256 << 20, largest)
    assert device.taken == [device.buffer.nbytes + 2 * largest], "had before the first call"


def test_a_device_without_room_keeps_the_former_weights(device: Device) -> None:
    engine = FakeEngine(device)
    device.room = 256 << 20

    async def run() -> None:
        async with connected(ipc_sender(), engine) as sender:
            with pytest.raises(WeightsError, match=r"no 0\.3 GiB on cpu"):
                await sender.send(sender.stage(WEIGHTS), "1.1")
            device.room = 2**62
            await sender.send(sender.stage(WEIGHTS), "1.2")

    asyncio.run(run())
    assert [name for name, *_ in engine.calls].count("start_weight_update") == 1
    assert device.emptied == 2


def test_a_tensor_is_on_the_device_when_it_is_sent_and_no_longer() -> None:
    from rollmesh.generators.engines.vllm.native_transfer import StagedSource

    source = StagedSource(torch.device("meta"))
    source.tensors = WEIGHTS
    alive: list[weakref.ref[torch.Tensor]] = []
    for name, tensor in source:
        assert (tensor.device.type, tensor.shape) == ("meta", WEIGHTS[name].shape)
        alive.append(weakref.ref(tensor))
        del tensor
        assert [reference() for reference in alive] == [None] * len(alive)
    assert len(alive) == len(WEIGHTS)


def test_a_broadcast_is_what_the_workers_are_told(device: Device, group: FakeGroup) -> None:
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    engine = FakeEngine(device)

    async def run() -> None:
        async with connected(nccl_sender(), engine) as sender:
            await sender.send(sender.stage(WEIGHTS), "1.7")

    asyncio.run(run())
    [info] = [rest[0]["update_info"] for name, *rest in engine.calls if name == "update_weights"]
    told = zip(info["names"], info["shapes"], info["dtype_names"], strict=True)
    sent: Iterator[torch.Tensor] = iter(group.sent)
    arrived: dict[str, torch.Tensor] = {}
    packed_nccl_broadcast_consumer(
        iter([(name, (shape, getattr(torch, dtype))) for name, shape, dtype in told]),
        SimpleNamespace(broadcast=lambda tensor, src: tensor.copy_(next(sent))),
        0,
        lambda tensors: arrived.update({name: tensor.clone() for name, tensor in tensors}),
        device="cpu",
    )
    assert all(torch.equal(arrived[name], tensor) for name, tensor in WEIGHTS.items())


def test_a_transfer_that_hangs_holds_up_nothing(device: Device, group: FakeGroup) -> None:
    """Workers that are gone answer neither the call nor the broadcast: no thread of these outlives the process."""
    engine = FakeEngine(device)
    before = set(threading.enumerate())

    def started() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    async def run() -> None:
        async with connected(nccl_sender(), engine) as sender:
            group.stuck, engine.silent = threading.Event(), "update_weights"
            sending = asyncio.create_task(sender.send(sender.stage(WEIGHTS), "1.1"))
            assert await asyncio.to_thread(group.stuck.wait, DEADLINE_S)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            # The end of the interpreter waits for all threads of executors that have something to do.
            client = sender._client
            assert client is not None
            async with asyncio.timeout(DEADLINE_S):
                while client._calls:
                    await asyncio.sleep(0.01)

    asyncio.run(run())
    [stuck] = [thread for thread in started() if thread.name == "rollmesh-vllm-weights" and thread.is_alive()]
    assert stuck.daemon


def test_what_a_transfer_needs_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmesh.generators.engines.vllm.native_transfer import native_sender

    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    sender = native_sender("nccl", torch.device("cuda:1"), 1)
    assert (sender._device, sender._info.world_size) == (torch.device("cuda", 2), 2)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="in addition to the 2 of vLLM"):
        native_sender("nccl", torch.device("cuda:1"), 2)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
    assert native_sender("ipc", torch.device("cuda:1"), 1)._device == torch.device("cuda", 1)


def test_experts_of_each_step_become_those_of_the_response() -> None:
    """As vLLM tells them: the prompt's with the first token, then one row per step; none of the last token."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    from rollmesh.generators.engines.external.backend import DecodeChunk
    from rollmesh.generators.engines.vllm.jobs.output_stream import JobStream

    experts = np.arange(5 * 2 * 2, dtype=np.int16).reshape(5, 2, 2)
    steps = [([7], experts[:3], None), ([8], experts[3:4], None), ([9], experts[4:], FinishReason.LENGTH)]

    async def run() -> list[DecodeChunk]:
        chunks: list[DecodeChunk] = []
        stream = JobStream(chunks.append)
        for tokens, rows, finish in steps:
            stream.push(EngineCoreOutput("a", tokens, finish_reason=finish, routed_experts=rows), "1.1")
        return chunks

    chunks = asyncio.run(run())
    assert [chunk.routed_experts is None for chunk in chunks] == [True, True, False]
    np.testing.assert_array_equal(chunks[-1].routed_experts, experts)


def test_what_a_worker_holds_is_what_sleep_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own books of its memory, as they are while the weights alone have been taken again."""
    import vllm.device_allocator as allocator

    from rollmesh.generators.engines.vllm.worker import HELD_BYTES, WorkerExtension

    areas = [allocator.AllocationData((0, 10, 1, 2), "weights"), allocator.AllocationData((0, 5, 3, 4), "kv_cache")]
    areas[1].is_asleep = True
    books = SimpleNamespace(pointer_to_data=dict(enumerate(areas)))
    monkeypatch.setattr(allocator, "get_mem_allocator_instance", lambda: books)
    worker = WorkerExtension()
    worker.device = torch.device("cuda:0")
    assert getattr(worker, HELD_BYTES)() == 10


def test_another_vllm_is_refused_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor

    from rollmesh.generators.engines.vllm import private_names

    private_names.check_package()
    with monkeypatch.context() as other:
        other.delattr(AsyncLLM, "_run_output_handler")
        with pytest.raises(ConfigError, match=f"vLLM {vllm.__version__} .*AsyncLLM._run_output_handler"):
            private_names.check_package()
    with monkeypatch.context() as other:
        other.setattr(OutputProcessor, "process_outputs", lambda self, engine_core_outputs: None)
        with pytest.raises(ConfigError, match=r"process_outputs takes no weight_version"):
            private_names.check_package()
    with pytest.raises(ConfigError, match=r"no AsyncLLM.output_processor.stream_interval"):
        private_names.check_engine(SimpleNamespace())


def test_a_start_has_a_deadline() -> None:
    from rollmesh.generators.engines.vllm.launcher import EngineProcess
    from rollmesh.generators.engines.vllm.load_metrics import LoadMetricsCollector
    from rollmesh.generators.engines.vllm.logs import EngineLog

    launch, over = EngineProcess({}, LoadMetricsCollector(), 0.01, EngineLog()), threading.Event()
    launch._build = over.wait  # type: ignore[assignment,method-assign]

    async def run() -> None:
        try:
            with pytest.raises(EngineError, match=r"not up after 0\.01 s") as caught:
                await launch.start()
            assert "rollout.vllm.start_timeout_s" in str(caught.value.hint)
        finally:
            over.set()

    asyncio.run(run())
    launch._log.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_cache_dtype": "foo"}, "cache_dtype"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens"),
        ({"attention_backend": "zz"}, "Unknown attention backend"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_arguments_that_vllm_refuses_are_a_wrong_configuration(
    options: dict[str, Any], said: str, contract_model: ContractModel
) -> None:
    """A restart would end the same way; told before any process is started."""
    from rollmesh.generators.engines.vllm.launcher import EngineProcess
    from rollmesh.generators.engines.vllm.load_metrics import LoadMetricsCollector
    from rollmesh.generators.engines.vllm.logs import EngineLog

    settings = EngineSettings(vllm=VllmSection(options=options))
    launch = EngineProcess(
        engine_arguments(contract_model.folder, settings, context=64, tokenizer=True),
        LoadMetricsCollector(),
        60.0,
        EngineLog(),
    )

    async def run() -> None:
        try:
            with pytest.raises(ConfigError, match=f"(?s)vLLM refuses its arguments: .*{said}"):
                await launch.start()
            assert launch._cores() == []
        finally:
            await launch.stop()

    asyncio.run(run())
