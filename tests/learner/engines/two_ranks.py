"""The work of two FSDP2 ranks in `test_contract`, beyond the contract of all engines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.distributed.weight_export import WeightExport
from rollmesh.learner.engines.fsdp2 import attention_calls
from rollmesh.learner.engines.resting_parts import chosen_parts
from rollmesh.learner.engines.tensors.export import full_tensors
from rollmesh.learner.weights import PublishRules, WeightPublisher
from rollmesh.learner.weights.version_storage import VersionFile
from rollmesh.mesh.config.learner import DistributedSection, MemorySection, OptimizerSection
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import DataError, WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import BucketSet, check_manifest
from rollmesh.mesh.weights.merging import effective_tensors
from rollmesh.mesh.weights.tensors import named_tensors
from rollmesh.testing.contract_state import Weights, save
from rollmesh.testing.engine_cases import critic_loss, make_sequences, make_spec, policy_loss, train, weights
from rollmesh.testing.worlds import Harness

GATHER_BYTES = 9000
"""Less than any tiny model has, and more than most of its tensors."""


def probe(harness: Harness, model: Path) -> tuple[bool, str]:
    """Probes; says whether that leaves no trace, and how a wrong model is refused."""
    untouched, engine = (harness.make(make_spec(model)) for _ in range(2))
    engine.probe()
    # Without masters: what is gathered in float32 comes from shards in bfloat16.
    frozen = harness.make(make_spec(model, optimizer=None, param_dtype="bfloat16"))
    evidence = frozen.probe()
    assert evidence.rounded is not None
    assert evidence.truth.outputs < 1e-5 < evidence.rounded.outputs
    for each in (untouched, engine):
        train(each, make_sequences(1))
    traceless = all(
        torch.equal(*pair) for pair in zip(*(weights(e).values() for e in (untouched, engine)), strict=True)
    )
    engine._runner.transformer.base_model.norm.weight.data.fill_(torch.nan)  # type: ignore[attr-defined]  # of FSDP2
    try:
        engine.probe()
    except DataError as error:
        return traceless, error.message
    return traceless, "not refused"


def draw_and_save(harness: Harness, model: Path, folder: Path) -> torch.Tensor:
    """Numbers that a process draws after a checkpoint, from a generator that was seeded apart from the others'."""
    engine = harness.make(make_spec(model))
    torch.manual_seed(7 + engine.layout.process)
    torch.rand(1)
    save(engine, folder)
    return torch.rand(3)


def load_and_draw(harness: Harness, model: Path, folder: Path) -> torch.Tensor:
    """Numbers that a process draws after it has loaded a checkpoint."""
    engine = harness.make(make_spec(model))
    engine.load_checkpoint(folder)
    return torch.rand(3)


def export(harness: Harness, model: Path) -> tuple[Weights, Weights, int]:
    """Weights gathered at once and in small batches, and the most bytes of full tensors that were held."""
    engine = harness.make(make_spec(model))
    tensors = engine._divided_tensors()  # type: ignore[attr-defined]  # of FSDP2
    small, held = {}, 0
    for name, tensor in full_tensors(tensors, engine.world, torch.float32, gather_bytes=GATHER_BYTES):
        small[name] = tensor.clone()
        held = max(held, tensor.untyped_storage().nbytes())
    return weights(engine), small, held


def writers_group(harness: Harness, model: Path) -> tuple[float, bool]:
    """The deadline of the group in which checkpoints are written, in seconds, and whether the next engine gets it."""
    first: Any = harness.make(make_spec(model))
    group = first._writer._group
    first.close()
    second: Any = harness.make(make_spec(model))
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds(), second._writer._group is group


def load(harness: Harness, model: Path) -> Weights:
    """A model's weights, as they are loaded."""
    return weights(harness.make(make_spec(model)))


def step_with_muon(harness: Harness, model: Path) -> tuple[Weights, Weights]:
    """The weights before and after a step of Muon."""
    muon = OptimizerSection(name="muon", lr=1e-2, max_grad_norm=1e9)
    memory = MemorySection(logits_mib=0, offload_activations=True, reshard_after_forward=False)
    engine = harness.make(make_spec(model, optimizer=muon, activation_checkpointing=True, memory=memory))
    before = weights(engine)
    train(engine, make_sequences(1))
    return before, weights(engine)


def critic_in_8_bits(harness: Harness, model: Path, folder: Path) -> tuple[Weights, Weights, Weights]:
    """A value model after a step, after one more, and after that of an engine that continues from the first one."""
    optimizer = OptimizerSection(lr=1e-2, eps=1e-2, state_dtype="8bit")
    engine, resumed = (harness.make(make_spec(model, optimizer=optimizer), "value_model") for _ in range(2))
    train(engine, make_sequences(1), critic_loss)
    first = weights(engine)
    save(engine, folder)
    resumed.load_checkpoint(folder)
    for each in (engine, resumed):
        train(each, make_sequences(2), critic_loss)
    return first, weights(engine), weights(resumed)


def save_and_export(harness: Harness, model: Path, out: Path) -> None:
    """The same weights as a checkpoint and as a folder."""
    engine = harness.make(make_spec(model))
    train(engine, make_sequences(1))
    save(engine, out / "checkpoint")
    engine.export_hf(out / "exported")


def publish(harness: Harness, model: Path, folder: Path) -> tuple[list[int], list[bytes], list[Weights], list[Weights]]:
    """Publishes two versions, each while another step is trained.

    Gives the bytes of this rank's tensors, the manifests, the tensors that can be fetched, and the model's then. The
    parameters rest in host memory between calls.
    """
    engine = harness.make(make_spec(model, memory=MemorySection(offload_params=True)))
    channel = RankChannel(DistributedSection()) if engine.layout.processes > 1 else None
    export = WeightExport(engine, channel, GATHER_BYTES)
    own = [place.nbytes for place in export.layout.part(engine.layout.process)]
    publisher = WeightPublisher("run", {}, directory=folder) if engine.layout.leads else None
    manifests, fetched, expected = [], [], []
    for version in range(2):
        train(engine, make_sequences(version))
        expected.append(weights(engine))
        published = export.export(publisher, PolicyVersion(1, version))
        train(engine, make_sequences(9))
        manifest = published.result(240)
        if publisher is not None:
            assert manifest is not None
            check_manifest(manifest)
            manifests.append(manifest.SerializeToString())
            data = memoryview(Path(manifest.offers[0].address).read_bytes())
            full = BucketSet.full(manifest)
            for index in range(len(full.buckets)):
                full.verify(index, full.part(data, index))
            fetched.append({name: tensor.clone() for name, tensor in named_tensors(manifest, bytearray(data))})
    export.close()
    if publisher is not None:
        publisher.close()
    return own, manifests, fetched, expected


def publish_adapter(harness: Harness, model: Path, folder: Path) -> tuple[list[str], Weights, Weights]:
    """Publishes the base and then an adapter; gives the names of the version's tensors, what it amounts to, and the
    model's own weights.
    """
    engine = harness.make(make_spec(model, lora=LoraSection(rank=4, alpha=8.0)))
    channel = RankChannel(DistributedSection()) if engine.layout.processes > 1 else None
    export = WeightExport(engine, channel, GATHER_BYTES, part="adapter")
    leads, names, found = engine.layout.leads, [], {}
    publisher = WeightPublisher("run", {}, PublishRules(adapter_scale=2.0), directory=folder) if leads else None
    export.export_base(publisher).result(240)
    train(engine, make_sequences(1))
    expected = weights(engine)
    manifest = export.export(publisher, PolicyVersion(1, 0)).result(240)
    export.close()
    if publisher is not None:
        assert manifest is not None
        check_manifest(manifest)
        data, base = (bytearray(Path(part.offers[0].address).read_bytes()) for part in (manifest, manifest.base))
        names = [entry.name for entry in manifest.tensors]
        found = {name: tensor.clone() for name, tensor in effective_tensors(manifest, data, base)}
        assert len(data) < len(base)
        publisher.close()
    return names, found, expected


def publish_without_memory(harness: Harness, model: Path) -> str:
    """Publishes where rank 0 has no memory for a version; gives this rank's refusal."""
    engine = harness.make(make_spec(model))
    export = WeightExport(engine, RankChannel(DistributedSection(timeout_s=240, order_timeout_s=240)), GATHER_BYTES)
    with pytest.raises(WeightsError) as refused:
        export.export(_Full() if engine.layout.leads else None, PolicyVersion(1, 0))
    export.close()
    return refused.value.message


class _Full(WeightPublisher):
    def __init__(self) -> None:
        """A publisher without a service."""

    def allocate(self, nbytes: int) -> VersionFile:
        raise WeightsError(f"no memory for {nbytes} bytes")


def refuse_long_sequence(harness: Harness, model: Path) -> tuple[list[str], bool]:
    """A rank's errors about a sequence that only the second one has, and whether the next step is skipped."""
    engine = harness.make(make_spec(model, timeout_s=240.0))
    batches = [pack(make_sequences(1, longest=30 if engine.layout.dp_rank else 2))]
    counts = engine.global_counts(batches)
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_calls, "LONGEST_MASKED", 20)
        for use in (lambda: engine.accumulate(batches, policy_loss, counts), lambda: engine.infer(batches)):
            with pytest.raises(DataError) as refused:
                use()
            told.append(f"{refused.value.message}; {refused.value.hint}")
    engine.discard()
    return told, train(engine, make_sequences(1)).skipped


# Optimizers that keep their state in ways of their own.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "bfloat16": {"state_dtype": "bfloat16"},
    "8bit": {"state_dtype": "8bit"},
    "muon": {"name": "muon"},
}


@dataclass(frozen=True)
class StatesSeen:
    """The results of steps on this rank, and bytes of the optimizer's state.

    Attributes:
        tensors: shards of parameters, and of their state.
        most: on the device at a time, while the optimizer computes.
        after: on the device, between the steps.
        state: in all.
        two_pieces: of the two largest pieces.
    """

    tensors: Weights
    most: int
    after: int
    state: int
    two_pieces: int


def step_by_pieces(harness: Harness, model: Path, kind: str) -> tuple[StatesSeen, StatesSeen]:
    """Steps with the state on the device all the time, and with all that can rest in host memory."""
    resting = MemorySection(offload_params=True, offload_optimizer=True, offload_gradients=True)
    whole, by_pieces = (_steps(harness, model, kind, memory) for memory in (MemorySection(), resting))
    return whole, by_pieces


def _steps(harness: Harness, model: Path, kind: str, memory: MemorySection) -> StatesSeen:
    section = OptimizerSection(lr=1e-2, eps=1e-4, max_grad_norm=1e9, **OPTIMIZERS[kind])
    engine: Any = harness.make(make_spec(model, optimizer=section, memory=memory))
    optimizer, seen = engine._optimizer, []
    optimizer.register_step_post_hook(lambda *_: seen.append(_state_bytes(optimizer)))
    # The first one makes the state, and the second one has it come from the host.
    for seed in range(2):
        train(engine, make_sequences(seed))
    after = _state_bytes(optimizer)
    # All of it, also what rests between calls.
    engine._memory.onload(chosen_parts(params=True, optimizer=True, gradients=True))
    blocks = engine._runner.transformer.base_model.layers
    sizes = [_state_bytes(optimizer, block.parameters()) for block in blocks]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = [p for p in engine._runner.parameters if id(p) not in inside]
    sizes += [_state_bytes(optimizer, [parameter]) for parameter in outside]
    tensors = {
        f"{name}.{kept}": _local(value).clone()
        for name, parameter in engine._runner.module.named_parameters()
        for kept, value in [("weight", parameter), *optimizer.state[parameter].items()]
    }
    return StatesSeen(tensors, max(seen), after, _state_bytes(optimizer), sum(sorted(sizes)[-2:]))


def _state_bytes(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor] | None = None) -> int:
    """Bytes of the state that has memory at present."""
    states = list(optimizer.state.values()) if parameters is None else [optimizer.state.get(p, {}) for p in parameters]
    tensors = [_local(value) for state in states for value in state.values() if value.dim()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
