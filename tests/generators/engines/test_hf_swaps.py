"""Swaps of the `hf` engine: what is copied, what fails halfway, and what an interruption leaves in the queue."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.hf import weight_swap
from rollmesh.generators.engines.hf import weights as weights_module
from rollmesh.generators.engines.hf.decoder import Decoder
from rollmesh.generators.engines.hf.engine import HfEngine
from rollmesh.generators.engines.hf.model.loading import load_model
from rollmesh.generators.engines.hf.waiting_queue import WaitingQueue, WaitingRequest, interrupted
from rollmesh.generators.engines.hf.weight_swap import DeferredFree
from rollmesh.generators.engines.hf.weights import ModelWeights, StagedWeights
from rollmesh.generators.engines.types import EngineSettings, GenerationRequest, SamplingParams
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from tests.generators.engines import tiny
from tests.generators.engines.collector import DEADLINE_S, Collector
from tests.generators.engines.harness import PROMPT, V1, V2, V3, request
from tests.generators.engines.hf_harness import HfHarness


@pytest.fixture
def harness(request: pytest.FixtureRequest, contract_model: tiny.ContractModel) -> Iterator[HfHarness]:
    harness = HfHarness(contract_model, getattr(request, "param", "keep"))
    yield harness
    harness.close()


def _out_of_memory(*_: object) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def _crossing(harness: HfHarness, bad: dict[str, torch.Tensor]) -> tuple[WeightsError, list[int]]:
    """Asks for V2 in the middle of two responses; the error, and the tokens of the longer one."""
    errors: list[BaseException | None] = []

    def swap(_: object) -> None:
        harness.collector.hook = None
        future = harness.engine.update_weights(V2, bad.items(), "bad")
        future.add_done_callback(lambda done: errors.append(done.exception()))

    harness.collector.hook = swap
    _, result = harness.run([request("short", max_tokens=4), request("long", max_tokens=60)])
    [error] = errors
    assert isinstance(error, WeightsError)
    assert result.sampled.versions.runs == ((60, V1),)
    return error, result.sampled.response_ids.tolist()


@pytest.mark.gpu
def test_swaps_take_no_more_of_a_device_than_two_sets_of_weights(contract_model: tiny.ContractModel) -> None:
    """The next version is staged in the memory that the former one leaves."""
    harness = HfHarness(contract_model, "keep", device="cuda")
    reserved = []
    for number in range(1, 9):
        harness.update(PolicyVersion(1, number), harness.random_weights(number))
        harness.run([request(f"{number}", max_tokens=4)])
        reserved.append(torch.cuda.memory_reserved())
    harness.close()
    assert len(set(reserved[2:])) == 1, reserved


@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("harness", ["keep", "recompute", "interrupt"], indirect=True)
def test_a_swap_that_fails_halfway_leaves_the_old_version_whole(
    harness: HfHarness, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.update(V1, harness.constant_weights(10))
    point, done = weights_module._point, []

    def fail_after(target: torch.Tensor, tensor: torch.Tensor) -> None:
        if len(done) == after:
            raise RuntimeError("CUDA error: out of memory")
        done.append(target)
        point(target, tensor)

    monkeypatch.setattr(weights_module, "_point", fail_after)
    error, tokens = _crossing(harness, harness.constant_weights(11))
    assert "out of memory" in error.message
    assert tokens == [10] * 60
    status = harness.engine.status()
    assert (status.serving, status.digest, status.swaps) == (V1, str(V1), 1)
    monkeypatch.undo()
    harness.update(V3, harness.constant_weights(12))
    [result] = harness.run([request("later", max_tokens=3)])
    assert result.sampled.response_ids.tolist() == [12] * 3


@pytest.mark.parametrize("harness", ["recompute"], indirect=True)
def test_keys_that_cannot_be_recomputed_take_the_swap_back(harness: HfHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows may hold keys of the new weights by then: all continue from their tokens under the old ones."""
    old = harness.random_weights(0)
    harness.update(V1, old)
    store, calls = Decoder._store, []

    def fail_late(self: Decoder, *arguments: object) -> object:
        calls.append(arguments)
        store(self, *arguments)  # type: ignore[arg-type]  # handed through
        raise RuntimeError("CUDA error: out of memory")

    def recompute(self: Decoder) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "_store", fail_late)
            original(self)

    original = Decoder.recompute
    monkeypatch.setattr(Decoder, "recompute", recompute)
    error, tokens = _crossing(harness, harness.random_weights(1))
    assert calls
    assert "could not be recomputed" in error.message
    assert len(tokens) == 60
    harness.check_log_probs(harness.collector.results["long"], old, PROMPT)


def test_without_memory_for_a_second_set_the_old_version_serves(
    harness: HfHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.update(V1, harness.constant_weights(10))
    monkeypatch.setattr(weights_module, "_usable", _out_of_memory)
    error, tokens = _crossing(harness, harness.constant_weights(11))
    assert "can't allocate memory" in error.message
    assert tokens == [10] * 60


def test_a_probe_for_which_there_is_no_memory_ends_nothing_else(
    harness: HfHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.update(V1, harness.constant_weights(10))
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "log_probs", _out_of_memory)
        with pytest.raises(EngineError, match=r"the probe failed: .*can't allocate memory"):
            harness.engine.probe([1, 2, 3]).result(DEADLINE_S)
    [result] = harness.run([request("later", max_tokens=3)])
    assert result.sampled.response_ids.tolist() == [10] * 3


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_tensors_that_fit_are_served_from_where_they_lie(wire: torch.dtype) -> None:
    """Others, of another dtype here, are copied; either way the former ones stay whole for their holder."""
    model = tiny.build_model(tiny.configs()["qwen3"])
    first = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    weights = ModelWeights(model)
    halves = {name: (tensor * 2).to(wire) for name, tensor in first.items()}
    weights.swap(weights.stage(first.items()))
    held = weights.tensors()
    assert all(held[name].data_ptr() == tensor.data_ptr() for name, tensor in first.items())
    weights.swap(weights.stage(halves.items()))
    for name, tensor in weights.tensors().items():
        source = "model.embed_tokens.weight" if name == "lm_head.weight" else name
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, halves[source].float())
        assert torch.equal(held[name], first[source])


# --- the queue ---


def _stopped(name: str, tokens: int, started: float) -> WaitingRequest:
    sampled = Trajectory.sampled(np.ones(tokens, np.int32), np.zeros(tokens, np.float32), VersionRuns(((tokens, V1),)))
    asked = GenerationRequest(name, [1, 2], SamplingParams(max_tokens=tokens + 5), prefix=sampled)
    return interrupted(asked, started)


def _names(line: WaitingQueue, count: int) -> list[str]:
    return [waiting.request.request_id for waiting in line.pop_waiting(count, pinned_only=False, fits=lambda *_: True)]


def test_what_was_interrupted_starts_first_and_in_order() -> None:
    line = WaitingQueue()
    line.add([request("new-1"), request("new-2")])
    line.put_back([_stopped("old-1", 9, 1.0), _stopped("old-2", 3, 2.0)])
    assert _names(line, 3) == ["old-1", "old-2", "new-1"]
    assert _names(line, 3) == ["new-2"]


def test_long_interrupted_sequences_come_back_over_several_steps() -> None:
    """At least one per step, however long; a later interruption finds those that still wait where they were."""
    line = WaitingQueue()
    line.put_back([_stopped(str(index), tokens, 1.0) for index, tokens in enumerate((5000, 600, 400, 300, 10))])
    assert _names(line, 9) == ["0"]
    assert _names(line, 9) == ["1", "2"]
    line.put_back([_stopped("1", 601, 1.0)])
    assert _names(line, 9) == ["1", "3", "4"]


def test_interrupted_responses_can_be_drafted_and_withdrawn_while_they_wait() -> None:
    line = WaitingQueue()
    brought = replace(request("brought"), prefix=_stopped("", 4, 1.0).request.prefix)
    line.add([request("new"), brought])
    line.put_back([_stopped("old", 9, 1.0), _stopped("short", 2, 1.0)])
    [part] = line.progress({"old": 9, "short": 3, "new": 0, "brought": 1})
    assert (part.request_id, len(part.sampled)) == ("old", 9)
    assert part.running_s > 0
    assert [waiting.request.request_id for waiting in line.remove({"old"})] == ["old"]
    assert line.progress({"old": 9}) == []


def test_an_engine_takes_mapped_memory_of_a_version_that_is_gone(tmp_path: Path) -> None:
    """The publisher may release a version while it is served."""
    torch.set_num_threads(1)
    model = tiny.build_model(tiny.configs()["qwen3"])
    folder = tiny.save_folder(tmp_path / "model", model, None)
    collector = Collector()
    engine = HfEngine(load_model(folder, dtype="float32", device="cpu"), EngineSettings(slots=2), collector)
    engine.start()
    path = tmp_path / "weights"
    path.write_bytes(bytes(sum(tensor.nbytes for tensor in model.state_dict().values())))
    mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size // 4)
    tensors, offset = {}, 0
    for name, tensor in model.state_dict().items():
        tensors[name] = mapped[offset : offset + tensor.numel()].view(tensor.shape)
        offset += tensor.numel()
    timings = engine.update_weights(V1, tensors.items(), "").result(DEADLINE_S)
    assert timings.version == V1
    path.unlink()
    del mapped, tensors
    engine.submit([request("a", max_tokens=3)])
    assert engine.drain(DEADLINE_S)
    engine.stop()
    assert collector.results.keys() == {"a"}


def test_former_weights_are_let_go_of_beside_decoding(harness: HfHarness) -> None:
    """Giving a large set back takes long: not the thread that decodes does it."""
    engine_threads, freed = set(), threading.Event()
    # No one else has it.
    first = {name: tensor.clone() for name, tensor in harness.random_weights(0).items()}
    watched = first["lm_head.weight"]

    def note() -> None:
        engine_threads.add(threading.current_thread().name)
        freed.set()

    memory = watched.untyped_storage()
    harness.update(V1, first)
    del first, watched
    weakref.finalize(memory, note)
    del memory
    harness.update(V2, harness.random_weights(1))
    assert freed.wait(DEADLINE_S)
    assert engine_threads == {"hf-engine-disposal"}


def test_weights_that_are_never_freed_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_swap, "_FREE_S", 0.05)
    free, done = DeferredFree(), threading.Event()

    class Stuck(list[tuple[torch.Tensor, torch.Tensor]]):
        """Waits where memory is given back."""

        def clear(self) -> None:
            done.wait(DEADLINE_S)

    free.start()
    free.add(StagedWeights(Stuck()))
    with pytest.raises(EngineError, match="thread hf-engine-disposal has not freed"):
        free.flush()
    free.stop()
    done.set()
