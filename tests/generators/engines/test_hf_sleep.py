"""The memory that the `hf` engine releases when it sleeps, by its own reckoning and by the tensors that are left."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.hf.weight_swap import WeightSwapper
from rollmesh.generators.engines.hf.weights import ModelWeights
from rollmesh.generators.engines.process_memory import read_process_memory
from rollmesh.generators.engines.types import EngineSettings, SleepLevel, WakeStep
from rollmesh.mesh.runtime.memory_tuning import return_freed_memory
from tests.generators.engines.collector import DEADLINE_S, Collector
from tests.generators.engines.harness import PROMPT, V1, V2, request
from tests.generators.engines.hf_harness import HfHarness
from tests.generators.engines.tiny import BLOCKS, ContractModel, build_model, save_folder

# Two layers of two heads of 32 numbers, keys and values, for one sequence and the columns of the first allocation.
_KV_BYTES = 2 * 2 * 2 * 32 * 4 * 64


@pytest.fixture
def harness(contract_model: ContractModel) -> Iterator[HfHarness]:
    harness = HfHarness(contract_model, "keep")
    yield harness
    harness.close()


def test_on_a_cpu_weights_that_are_kept_stay_where_they_are(harness: HfHarness) -> None:
    harness.update(V1, harness.random_weights(0))
    assert harness.engine.sleep().result(harness.deadline_s).freed_bytes == 0, "nothing has run"
    harness.wake()
    harness.freeze([request("a", max_tokens=50)])
    assert harness.engine.sleep().result(harness.deadline_s).freed_bytes == _KV_BYTES


def test_dropped_weights_are_let_go_of(harness: HfHarness) -> None:
    weights = {name: tensor.clone() for name, tensor in harness.random_weights(0).items()}
    size = sum(tensor.nbytes for tensor in weights.values())
    harness.update(V1, weights)
    harness.run([request("a", max_tokens=5)])
    report = harness.engine.sleep(SleepLevel.WITHOUT_WEIGHTS).result(harness.deadline_s)
    assert report.freed_bytes == _KV_BYTES + size
    model = harness.engine._weights  # type: ignore[attr-defined]  # a look inside
    assert all(tensor.numel() == 0 for tensor in model.tensors().values())
    bad = {name: torch.zeros(1) for name in weights}
    error = harness.engine.update_weights(V2, bad.items(), "").exception(harness.deadline_s)
    assert "shape" in str(error), "it is still known what fits"
    harness.update(V2, harness.constant_weights(10))
    harness.wake()
    assert harness.run([request("b", max_tokens=3)])[0].sampled.response_ids.tolist() == [10] * 3


def test_the_learners_file_is_served_in_place_and_given_back(tmp_path: Path) -> None:
    """A model of 35 MiB in a mapped file: its pages are the file's, and the engine has no copy of them."""
    config = Qwen3Config(**{**BLOCKS, "vocab_size": 1 << 13, "hidden_size": 512, "tie_word_embeddings": False})
    model = build_model(config)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    file = tmp_path / "weights"
    file.write_bytes(b"".join(tensor.tobytes() for tensor in tensors.values()))
    collector = Collector()
    engine = create_engine("hf", save_folder(tmp_path / "model", model, None), EngineSettings(slots=4), collector)
    del model, tensors
    engine.start()
    try:
        engine.sleep(SleepLevel.WITHOUT_WEIGHTS).result(DEADLINE_S)
        before = read_process_memory()
        engine.update_weights(V1, _mapped(file, shapes), "").result(DEADLINE_S)
        engine.wake().result(DEADLINE_S)
        engine.resume().result(DEADLINE_S)
        engine.submit([request("a", [3, 4, 5], max_tokens=20)])
        collector.wait(["a"])
        return_freed_memory()
        awake = read_process_memory()
        assert awake.shared - before.shared > size // 2
        assert awake.anonymous - before.anonymous < size // 2
        engine.sleep(SleepLevel.WITHOUT_WEIGHTS).result(DEADLINE_S)
        asleep = read_process_memory()
        assert awake.shared - asleep.shared > size // 2
        assert asleep.anonymous - before.anonymous < size // 2
    finally:
        engine.stop()


@pytest.mark.gpu
def test_a_device_has_one_set_of_weights_at_most(contract_model: ContractModel) -> None:
    """None while it sleeps; kept ones wait in pinned memory of the host, and new ones come without a second set."""
    harness = HfHarness(contract_model, "keep", device="cuda")
    engine, deadline_s = harness.engine, harness.deadline_s
    try:
        harness.update(V1, harness.random_weights(0))
        harness.run([request("a", max_tokens=5)])
        engine.sleep().result(deadline_s)
        kept = engine.weights().result(deadline_s).tensors
        assert kept is not None
        assert all(tensor.is_pinned() for tensor in kept.values())
        del kept
        engine.sleep(SleepLevel.WITHOUT_WEIGHTS).result(deadline_s)
        asleep = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.wake(WakeStep.WEIGHTS).result(deadline_s)
        weights = harness.random_weights(1)
        harness.update(V2, weights)
        size = sum(tensor.nbytes for tensor in weights.values())
        assert torch.cuda.max_memory_allocated() - asleep < 1.5 * size
        harness.wake()
        harness.check_log_probs(harness.run([request("b", max_tokens=5)])[0], weights, PROMPT)
    finally:
        harness.close()


def _mapped(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a private mapping of a file, as they come over shared memory."""
    with file.open("rb") as opened:
        area, offset = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY), 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        yield name, torch.frombuffer(area, dtype=torch.float32, count=count, offset=offset).view(shape)
        offset += 4 * count


@pytest.mark.parametrize("amid", ["sleep", "swap"])
def test_what_ends_the_engine_refuses_the_order_that_it_was_at(
    harness: HfHarness, amid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its waiter would wait for ever."""

    def fail(*_: object) -> None:
        raise ValueError("gone wrong")

    harness.update(V1, harness.random_weights(0))
    if amid == "sleep":
        monkeypatch.setattr(ModelWeights, "to_host", fail)
        order = harness.engine.sleep()
    else:
        monkeypatch.setattr(WeightSwapper, "swap", fail)
        order = harness.engine.update_weights(V2, harness.random_weights(1).items(), "")
    assert "gone wrong" in str(harness.collector.wait_failure())
    with pytest.raises(EngineError, match="gone wrong"):
        order.result(harness.deadline_s)
