"""Contract of engines: memory that rests on the host, and several models in one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.engines.registry import ModelType
from rollmesh.learner.engines.resting_parts import PARTS
from rollmesh.mesh.config.learner import MemorySection
from rollmesh.testing.contract_inference import infer
from rollmesh.testing.contract_state import Weights, save
from rollmesh.testing.engine_cases import (
    assert_same,
    critic_loss,
    make_batches,
    make_sequences,
    make_spec,
    policy_loss,
    train,
    weights,
)
from rollmesh.testing.suite import Suite
from rollmesh.testing.worlds import EngineWorld, Harness

_MIB = 1 << 20


class MemoryContract(Suite):
    """Memory that is moved to the host is given back, comes back as it was, and is not used meanwhile.

    Attributes:
        larger_model: transformers' name of the architecture whose memory is measured, and settings.
    """

    larger_model: ClassVar[tuple[str, Mapping[str, Any]]] = ("llama", {})

    @pytest.mark.parametrize("parts", [PARTS, *((part,) for part in PARTS)], ids=lambda parts: " ".join(parts))
    def test_a_step_continues_after_a_rest(
        self, world: EngineWorld, engine_models: Mapping[str, Path], parts: tuple[str, ...]
    ) -> None:
        expected, found = world.run(_rested, engine_models["tied"], parts)[0]
        assert_same(found, expected, 0.0)

    @pytest.mark.parametrize("model_type", ["language_model", "value_model"])
    def test_a_turn_of_others_changes_nothing(
        self, world: EngineWorld, engine_models: Mapping[str, Path], model_type: ModelType, tmp_path: Path
    ) -> None:
        """The model is away meanwhile, on a CPU in files without a name. Later some of it rests between calls."""
        expected, found = world.run(_turns, engine_models["tied"], model_type, tmp_path)[0]
        assert_same(found, expected, 0.0)
        assert not list(tmp_path.iterdir())

    def test_what_rests_between_calls_changes_nothing(
        self, world: EngineWorld, engine_models: Mapping[str, Path], tmp_path: Path
    ) -> None:
        present, resting = world.run(_resting_between_calls, engine_models["tied"], tmp_path)[0]
        for found, expected in zip(resting, present, strict=True):
            assert_same(found, expected, 0.0)

    def test_a_call_that_needs_what_rests_is_refused(
        self, world: EngineWorld, engine_models: Mapping[str, Path], tmp_path: Path
    ) -> None:
        world.run(_used_at_rest, engine_models["tied"], tmp_path)

    def test_memory_is_given_back(self, world: EngineWorld, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Tensors give their memory back; on a CPU no byte is held twice, at rest or afterwards.

        There the host has as much more as the device has less.
        """
        kind, settings = self.larger_model
        folder = tmp_path_factory.getbasetemp() / f"larger-{kind}"
        if not folder.exists():
            _make_larger_model(folder, kind, settings)
        for size, given_back, (before, resting, after) in world.run(_resident, folder):
            assert size > 60 * _MIB / world.layout.processes
            assert given_back > 0.9 * size
            assert abs(resting - before) < 0.2 * size
            assert abs(after - before) < 0.2 * size

    def test_a_model_trains_the_same_beside_others(self, world: EngineWorld, engine_models: Mapping[str, Path]) -> None:
        alone, among_others = world.run(_among_others, engine_models["tied"])[0]
        assert_same(among_others, alone, 0.0)

    def test_engines_close_in_any_order(self, world: EngineWorld, engine_models: Mapping[str, Path]) -> None:
        world.run(_closed_in_any_order, engine_models["tied"])


def _rested(harness: Harness, model: Path, parts: tuple[str, ...]) -> tuple[Weights, Weights]:
    untouched, engine = (harness.make(make_spec(model)) for _ in range(2))
    moved = {part: part in parts for part in PARTS}
    for each in (untouched, engine):
        train(each, make_sequences(1))
        batches = make_batches(each, make_sequences(2))
        each.accumulate(batches, policy_loss, each.global_counts(batches))
        if each is engine:
            for _ in range(2):
                each.offload(**moved)
                each.offload(**moved)
                each.onload(**moved)
                each.onload()
        each.apply()
        if each is engine:
            each.offload()
            each.onload()
        train(each, make_sequences(3))
    return weights(untouched), weights(engine)


def _turns(harness: Harness, model: Path, model_type: ModelType, folder: Path) -> tuple[Weights, Weights]:
    loss = policy_loss if model_type == "language_model" else critic_loss
    untouched = harness.make(make_spec(model), model_type)
    engine = harness.make(make_spec(model, rest_folder=folder), model_type)
    for each in (untouched, engine):
        train(each, make_sequences(1), loss)
    away = _away(engine)
    for each in (untouched, engine):
        train(each, make_sequences(2), loss)
    engine.rest_between_calls(params=True, optimizer=True)
    assert _away(engine) == away
    assert engine.resting_bytes == away, "an onload leaves what rests between calls"
    for each in (untouched, engine):
        train(each, make_sequences(3), loss)
    assert engine.resting_bytes == away
    engine.rest_between_calls()
    engine.onload()
    assert not any(engine.resting_bytes.values())
    for each in (untouched, engine):
        train(each, make_sequences(4), loss)
    return weights(untouched), weights(engine)


def _away(engine: Engine) -> dict[str, int]:
    """Moves the engine away and back; gives the bytes of its parts."""
    engine.offload()
    away = dict(engine.resting_bytes)
    assert away["params"] > 0
    assert away["optimizer"] > 0
    engine.onload()
    return away


def _resting_between_calls(harness: Harness, model: Path, folder: Path) -> list[list[Weights]]:
    rest = MemorySection(offload_params=True, offload_gradients=True, offload_optimizer=True)
    return [
        _stepped(harness.make(make_spec(model, memory=how)), folder / str(number))
        for number, how in enumerate((MemorySection(), rest))
    ]


def _stepped(engine: Engine, folder: Path) -> list[Weights]:
    """Weights and outputs after a step, one that was given up, a checkpoint, another step, and the checkpoint again."""
    folder.mkdir(exist_ok=True)
    train(engine, make_sequences(1))
    first, second = (make_batches(engine, make_sequences(seed)) for seed in (2, 3))
    engine.accumulate(first, policy_loss, engine.global_counts(first))
    engine.discard()
    save(engine, folder)
    counts = engine.global_counts([*first, *second])
    for batches in (first, second):
        engine.accumulate(batches, policy_loss, counts)
    engine.apply()
    found = [weights(engine), infer(engine, make_sequences(4))]
    engine.load_checkpoint(folder)
    train(engine, make_sequences(5))
    return [*found, weights(engine)]


def _used_at_rest(harness: Harness, model: Path, folder: Path) -> None:
    engine = harness.make(make_spec(model))
    train(engine, make_sequences(1))
    batches = make_batches(engine, make_sequences(2))
    counts = engine.global_counts(batches)
    engine.accumulate(batches, policy_loss, counts)
    engine.offload(params=False, gradients=False)
    with pytest.raises(RuntimeError):
        engine.apply()
    engine.onload()
    engine.offload(params=False, optimizer=False)
    with pytest.raises(RuntimeError):
        engine.accumulate(batches, policy_loss, counts)
    engine.discard()
    engine.offload()
    for call in (
        lambda: engine.infer(batches),
        lambda: list(engine.export_weights()),
        lambda: list(engine.exported_shards()),
        lambda: engine.accumulate(batches, policy_loss, counts),
        lambda: engine.begin_checkpoint(folder, {}),
    ):
        with pytest.raises(RuntimeError):
            call()


def _make_larger_model(folder: Path, kind: str, settings: Mapping[str, Any]) -> None:
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = AutoConfig.for_model(kind, vocab_size=4096, **sizes, **settings, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder)


def _resident(harness: Harness, model: Path) -> tuple[int, int, list[int]]:
    """Bytes of the model's states, those that rest gives back, and resident ones before, during and after it."""
    engine = harness.make(make_spec(model))
    for seed in (1, 2):
        train(engine, make_sequences(seed, 1))
    size = sum(tensor.nbytes for tensor in weights(engine).values())
    # Parameters and the moments of AdamW.
    size = 3 * engine.world.max_int(size) // engine.layout.processes
    # The first rest also gives back what was freed before, and what is a part of a mapped file becomes memory.
    present = _storages(engine.device)
    engine.offload()
    given_back = sum(nbytes for *_, nbytes in present - _storages(engine.device))
    engine.onload()
    return size, given_back, [_resident_bytes() for _ in _rest_and_return(engine)]


def _rest_and_return(engine: Engine) -> Iterator[None]:
    yield
    engine.offload()
    yield
    engine.onload()
    yield


def _storages(device: torch.device) -> set[tuple[int, int, int]]:
    """Storage, address and bytes of the memory of all tensors on a device.

    An address alone says nothing: what was given back may be the next one's, with as many bytes.
    """
    gc.collect()
    # The local part of a distributed tensor is a plain one.
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    return {(storage._cdata, storage.data_ptr(), storage.nbytes()) for storage in storages}


def _resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def _among_others(harness: Harness, model: Path) -> tuple[Weights, Weights]:
    alone = harness.make(make_spec(model))
    for seed in (1, 2):
        train(alone, make_sequences(seed))
    roles = _roles(harness, model)
    state = torch.get_rng_state()
    roles |= {"later": harness.make(make_spec(model, seed=7), "value_model")}
    assert torch.equal(torch.get_rng_state(), state), "a later model leaves the random numbers of the others alone"
    for seed in (1, 2):
        train(roles["critic"], make_sequences(seed), critic_loss)
        infer(roles["reference"], make_sequences(seed))
        train(roles["actor"], make_sequences(seed))
    return weights(alone), weights(roles["actor"])


def _roles(harness: Harness, model: Path) -> dict[str, Engine]:
    return {
        "reference": harness.make(make_spec(model, optimizer=None)),
        "actor": harness.make(make_spec(model)),
        "critic": harness.make(make_spec(model), "value_model"),
    }


def _closed_in_any_order(harness: Harness, model: Path) -> None:
    sequences: Any = make_sequences(1, 2)
    for order in ((0, 1, 2), (2, 0, 1)):
        engines = list(_roles(harness, model).values())
        for index in order:
            last = engines[order[-1]]
            assert infer(last, sequences)
            engines[index].close()
            engines[index].close()
