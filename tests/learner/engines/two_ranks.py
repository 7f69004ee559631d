"""One of two gloo ranks: trains from a checkpoint and from scratch, and writes what it saw for the tests to compare.

Started by `conftest.two_rank_results`; arguments: model folder, one-rank checkpoint, output folder
(with a folder `critic` of a model with a value head).
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import torch

from rollmesh.learner.algorithms.types import LossOutput
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.engines.fsdp2.export import full_tensors
from rollmesh.learner.engines.interface import Engine
from rollmesh.mesh.config.learner import MemorySection, OptimizerSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.learner.engines.models import EXPORT_GATHER_BYTES, make_critic, make_engine, make_frozen
from tests.learner.engines.training import critic_loss, gradients, make_batches, policy_loss, train_step, weights

torch.set_num_threads(1)


def main(model: Path, checkpoint: Path, out: Path) -> None:
    # One rank, which it is compared with, keeps its logits.
    engine = make_engine(model, memory=MemorySection(logits_mib=0))
    engine.probe()
    # Without masters: what is gathered in float32 comes from shards in bfloat16.
    frozen = make_frozen(model, param_dtype="bfloat16")
    evidence = frozen.probe()
    assert evidence.truth.outputs < 1e-5 < evidence.rounded.outputs
    frozen.close()
    once = make_engine(model, sync_once=True)
    fail_amid_a_step(once)
    train_step(once, seed=1, token_budget=16)
    seen_once = gradients(once)
    once.close()
    result = train_step(engine, seed=1)
    seen = {"gradients": gradients(engine), "synchronized_once": seen_once, "weights": weights(engine)}
    # Fewer groups than ranks could share evenly: one rank has fewer micro-batches than the other.
    train_step(engine, seed=2, groups=3, token_budget=16)
    seen["uneven"] = gradients(engine)
    train_step(engine, seed=3, groups=1, token_budget=1 << 20)
    seen["idle_rank"] = gradients(engine)
    # With embedding and output layer in groups of their own.
    untied = make_engine(
        out / "llama",
        optimizer=OptimizerSection(name="muon", lr=1e-2, max_grad_norm=1e9),
        activation_checkpointing=True,
        memory=MemorySection(logits_mib=0, offload_activations=True, reshard_after_forward=False),
    )
    train_step(untied, seed=1)
    seen["untied"] = {"gradients": gradients(untied), "weights": weights(untied)}
    untied.close()
    critic = make_critic(out / "critic")
    values = train_step(critic, seed=1, loss=critic_loss)
    seen["critic"] = {"gradients": gradients(critic)}
    # Gradients of ranks without any micro-batch, and metrics whose names only the other rank knows.
    idle = train_step(critic, seed=3, loss=critic_loss, groups=1, token_budget=1 << 20)
    seen["critic"] |= {"idle_rank": gradients(critic), "weights": weights(critic)}
    engines = {"actor": engine, "critic": critic}
    CheckpointStore(out / "checkpoints").save(engines, PolicyVersion(1, 3), {"cursor": 7})
    engine.export_hf(out / "exported")
    seen["gathered"] = gather(engine)
    train_step(engine, seed=4)
    seen["after_checkpoint"] = weights(engine)
    extra = engine.load_checkpoint(checkpoint)
    train_step(engine, seed=5)
    seen["resumed"] = weights(engine)
    # Full tensors are on the first rank alone, however many fit into a batch.
    assert bool(seen["resumed"]) == (engine.layout.leads)
    tensors = full_tensors(engine._named_tensors(), engine.world, torch.float32, gather_bytes=EXPORT_GATHER_BYTES)
    seen["in_small_batches"], held = {}, 0
    for name, tensor in tensors:
        seen["in_small_batches"][name] = tensor.clone()
        held = max(held, tensor.untyped_storage().nbytes())
    seen["loaded"] = {}
    for folder in sorted((out / "models").iterdir()):
        loaded = make_engine(folder)
        seen["loaded"][folder.name] = weights(loaded)
        loaded.close()
    engine._transformer.base_model.norm.weight.data.fill_(torch.nan)
    refused = engine.world.gather_bytes(refusal(engine).encode())
    figures = {
        "refused": [told.decode() for told in refused],
        "held_bytes": held,
        "critic_metrics": values.metrics,
        "idle_critic_metrics": idle.metrics,
    }
    if engine.layout.leads:
        torch.save(seen, out / "seen.pt")
        (out / "seen.json").write_text(json.dumps({"metrics": result.metrics, "extra": extra} | figures))
    engine.close()
    critic.close()


def fail_amid_a_step(engine: Engine) -> None:
    """Accumulates a part of a gradient, and gives it up."""
    batches = make_batches(engine, seed=4, token_budget=16)

    def broken(*_: object) -> LossOutput:
        raise ValueError

    engine.accumulate(batches, policy_loss(), engine.global_counts(batches))
    counts = engine.global_counts(batches)
    with contextlib.suppress(ValueError):
        engine.accumulate(batches, broken, counts)
    engine.discard()


def gather(engine: Engine) -> dict[str, list[torch.Tensor]]:
    """Values of different lengths and types from both ranks."""
    return {
        "uneven": engine.gather(torch.tensor([1.0, 1.5] if engine.layout.process else [])),
        "nothing": engine.gather(torch.zeros(0)),
        "flags": engine.gather(torch.tensor([False, True] if engine.layout.process else [True])),
    }


def refusal(engine: Engine) -> str:
    """The probe's refusal, on this rank."""
    try:
        engine.probe()
    except DataError as error:
        return error.message
    return "not refused"
