"""The work of an engine in a run, on rank 0 of many: a step, log-probs, an export, a swap to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from rollmesh.generators.engines.hf.weights import ModelWeights
from rollmesh.learner.algorithms.advantages.normalization import normalize
from rollmesh.learner.algorithms.dataflows.policy_gradient import PolicyGradient
from rollmesh.learner.algorithms.dataflows.resampling import pf_ppo_weights, resample
from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.types import UpdatePlan
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import PackedBatch, TrainSequence
from rollmesh.learner.engines.fsdp2.create import create_engine
from rollmesh.learner.engines.fsdp2.loading import load_weights
from rollmesh.learner.engines.fsdp2.optimizers.piecewise import pieces_of
from rollmesh.learner.engines.fsdp2.preparation.blocks import transformer_blocks
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.output.logit_form import LogitForm
from rollmesh.learner.engines.tensors import export
from rollmesh.learner.engines.world import World
from rollmesh.learner.model_files import stored_model
from rollmesh.learner.model_files.conversion import LoadingPlan
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import MemorySection, OptimizerSection
from rollmesh.mesh.config.parallel import ParallelSection
from tests.learner.engines.fake_cuda.watch import Watch

# Wide enough for several tiles, pieces and messages; whatever is larger costs time, and shows nothing.
_DENSE = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_EXPERTS = {
    "vocab_size": 65536,
    "hidden_size": 1024,
    "moe_intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 8,
}


@dataclass(frozen=True)
class Case:
    """An engine, one micro-batch after the other.

    Attributes:
        world: ranks.
        dtype: `EngineSpec.param_dtype`.
        experts: the model is a mixture.
        layers: of the model.
        micro_batches: of a step.
        misplaced: one tensor of the batch stays on the host.
        rows: a row for every sequence.
        logits_mib: `learner.memory.logits_mib`.
        swap: also export, offload, onload, and a step afterwards.
        sp: ranks that share a micro-batch.
        shards: ranks that hold a model together; 0: all.
        optimizer: settings of it.
        resting: all that can rests in host memory between calls.
    """

    world: int = 8
    dtype: str = "bfloat16"
    experts: bool = False
    layers: int = 1
    micro_batches: int = 1
    misplaced: bool = False
    rows: bool = False
    logits_mib: int = 1024
    swap: bool = False
    sp: int = 1
    shards: int = 0
    optimizer: dict[str, Any] = field(default_factory=dict)
    resting: bool = False


@dataclass
class Seen:
    """Events; waits by place, see `Watch`, for each part.

    Attributes:
        waits: part -> `reads`, `to_host`, `to_device` -> place -> how often.
        facts: further numbers.
        error: type of what ended it; empty where nothing did.
    """

    waits: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def run(case: Case) -> Seen:
    """Runs a case on rank 0."""
    seen = Seen()
    # It tries itself out, on values.
    algorithm = load_algorithm("grpo", {}, UpdatePlan())
    assert isinstance(algorithm, PolicyGradient)
    with _ranks(case.world, case.shards or case.world) as mesh:
        replaced = {"open_model": partial(_open, case), "load_weights": _give_memory, "shard_mesh": lambda *_: mesh}
        loader = patch.multiple("rollmesh.learner.engines.fsdp2.runner", **replaced)
        # Fake tensors have no values to read it from.
        form = patch("rollmesh.learner.engines.fsdp2.language_model.read_logit_form", lambda _: LogitForm(cap=30.0))
        # Nothing is drawn, so a generator of the host does.
        generator = torch.Generator()
        draws = patch("rollmesh.learner.engines.fsdp2.optimizers.compact_adamw.torch.Generator", lambda _: generator)
        # All ranks have micro-batches, which is counted there.
        with FakeTensorMode(), Watch({"metric_reduction.py": case.world}) as watch, loader, form, draws:
            try:
                _use(case, algorithm.loss, watch, seen)
            except RuntimeError as error:
                seen.error = f"{type(error).__name__}: {error}"
    return seen


def sleep() -> Seen:
    """The weights of a generator's own engine, to the host and back."""
    seen = Seen()
    with FakeTensorMode(), Watch({}) as watch:
        weights = ModelWeights(torch.nn.Sequential(*(torch.nn.Linear(8, 8, device="cuda") for _ in range(3))))
        for part, move in (("to_host", weights.to_host), ("to_device", weights.to_device)):
            watch.clear()
            move()
            seen.waits[part] = {"to_host": dict(watch.to_host), "to_device": dict(watch.to_device)}
    return seen


def batch_stage() -> Seen:
    """Sums per group, and policy filtration (PF-PPO), whose draws are the host's."""
    seen = Seen()
    with FakeTensorMode(), Watch({}) as watch:
        rewards, groups = torch.ones(6, device="cuda"), torch.zeros(6, dtype=torch.int64, device="cuda")
        stages: dict[str, Callable[[], torch.Tensor]] = {
            "groups": lambda: normalize(rewards, groups, 2),
            "resampling": lambda: resample(pf_ppo_weights(rewards, "pow"), torch.Generator()),
        }
        for part, stage in stages.items():
            watch.clear()
            seen.facts[part] = str(stage().device)
            seen.waits[part] = {kind: dict(getattr(watch, kind)) for kind in ("reads", "to_host", "to_device")}
    return seen


def _use(case: Case, loss: Loss, watch: Watch, seen: Seen) -> None:
    def during(part: str, action: Callable[[], Any]) -> Any:
        watch.clear()
        result = action()
        seen.waits[part] = {kind: dict(getattr(watch, kind)) for kind in ("reads", "to_host", "to_device")}
        return result

    spec = EngineSpec(
        ModelSection(path="none", dtype="bfloat16"),
        OptimizerSection(**case.optimizer),
        total_steps=10,
        parallel=ParallelSection(sp=case.sp),
        device="cuda",
        param_dtype=case.dtype,
        activation_checkpointing=True,
        memory=MemorySection(
            logits_mib=case.logits_mib,
            offload_params=case.resting,
            offload_optimizer=case.resting,
            offload_gradients=case.resting,
        ),
    )
    engine = create_engine(spec, "language_model")
    if case.rows:
        engine._runner.repack("asked for")

    def batches() -> list[PackedBatch]:
        return [pack(list(_sequences()), device=engine.device) for _ in range(case.micro_batches)]

    def step(few: int | None = None) -> None:
        counts = engine.global_counts(packed)
        engine.accumulate(packed[:few], loss, counts)
        seen.facts["skipped"] = engine.apply().skipped

    optimizer, resident = engine._optimizer, []
    optimizer.register_step_post_hook(lambda *_: resident.append(_bytes_on_device(optimizer)))
    packed = during("pack", batches)
    if case.misplaced:
        packed[0].row = replace(packed[0].row, labels=packed[0].row.labels.cpu())
    # The first step makes the optimizer's state, of whatever gradient.
    step(1)
    during("step", step)
    (output, *_) = during("infer", lambda: engine.infer(packed))
    log_probs = output.policy()[0]
    seen.facts["log_probs"] = [str(log_probs.device), str(log_probs.dtype)]
    pieces = pieces_of(engine._runner.module, transformer_blocks(engine._runner.module))
    sizes = [sum(value.nbytes for value in _moments(optimizer, piece)) for piece in pieces]
    seen.facts["state"] = {
        "most": max(resident),
        "between steps": _bytes_on_device(optimizer),
        "two pieces": sum(sorted(sizes)[-2:]),
        "all": sum(sizes),
        "dtypes": sorted({str(value.dtype) for value in _moments(optimizer)}),
    }
    if not case.swap:
        return
    parameters = engine._runner.parameters
    seen.facts["parameters"] = len(parameters)
    with _counted_rounds() as rounds:
        exported = during("export", lambda: [(str(t.device), str(t.dtype)) for _, t in engine.export_weights()])
    seen.facts["exported"], seen.facts["rounds"] = sorted(set(exported)), len(rounds)
    seen.facts["exported_tensors"] = len(exported)
    during("offload", engine.offload)
    seen.facts["offloaded"] = sorted({p._local_tensor.untyped_storage().nbytes() for p in parameters})
    during("onload", engine.onload)
    during("step after", step)


def _bytes_on_device(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.untyped_storage().nbytes() for value in _moments(optimizer))


def _moments(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor] | None = None
) -> Iterator[torch.Tensor]:
    """This rank's part of the moments, of all parameters or of some."""
    for state in optimizer.state.values() if parameters is None else map(optimizer.state.__getitem__, parameters):
        for value in state.values():
            if value.dim():
                assert value.device.type == "cuda"
                # As `to_local` gives it, but for a view whose memory is none of FakeTensors.
                yield value._local_tensor if isinstance(value, DTensor) else value


def _sequences() -> Iterator[TrainSequence]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 1000, 50).astype(np.int32)
    for length in (40, 200, 7):
        ids = rng.integers(0, 1000, length).astype(np.int32)
        yield TrainSequence(prompt, ids, np.ones(length, np.uint8), np.full(length, -1, np.float32), 0.5)


def _open(case: Case, _: ModelSection, device: torch.device, **__: Any) -> Any:
    """A model as it is opened, but of no folder."""
    kind, sizes = ("qwen3_moe", _EXPERTS) if case.experts else ("qwen2", _DENSE)
    config = AutoConfig.for_model(kind, **sizes, num_hidden_layers=case.layers, tie_word_embeddings=False)
    model = stored_model._without_weights(config, Path("none"), device)
    model.config.use_cache = False
    return nullcontext(SimpleNamespace(model=model, plan=LoadingPlan([], [], [], [], []), files=None))


def _give_memory(*arguments: Any) -> list[str]:
    """Weights that have no values."""
    load_weights(*arguments)
    return []


@contextmanager
def _ranks(world: int, shards: int) -> Iterator[Any]:
    """Rank 0 of a group whose other ranks exist in number only; its mesh is made of real tensors.

    It writes no checkpoints: gloo would look for the others.
    """
    alone = patch.object(World, "lend_group", lambda _: None)
    with alone, patch.dict("os.environ", WORLD_SIZE=str(world), RANK="0", LOCAL_RANK="0"):
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        try:
            sizes, names = (
                ((world,), ("shards",)) if shards == world else ((world // shards, shards), ("copies", "shards"))
            )
            yield init_device_mesh("cuda", sizes, mesh_dim_names=names)
        finally:
            dist.destroy_process_group()
            World._neighbours.clear()


@contextmanager
def _counted_rounds() -> Iterator[list[int]]:
    """The bytes that rank 0 receives in each exchange of messages for an export."""
    rounds: list[int] = []
    exchange = dist.all_to_all_single

    def counted(output: torch.Tensor, *others: Any) -> Any:
        rounds.append(len(output))
        return exchange(output, *others)

    with patch.object(export.dist, "all_to_all_single", counted):
        yield rounds
