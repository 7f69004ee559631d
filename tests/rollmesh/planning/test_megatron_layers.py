"""Megatron's own layers keep for the backward pass as much as the plan says, and its schedules as many passes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig

from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.engines.megatron.local.cpu import import_on_cpu
from rollmesh.learner.engines.megatron.parallel import ParallelSizes
from rollmesh.learner.engines.megatron.requirements import resolve_sizes
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.planning.architecture import build_on_meta
from rollmesh.planning.megatron.activations import PLAIN, Share, kept
from rollmesh.planning.megatron.model_sizes import read_sizes
from rollmesh.planning.megatron.schedule import most_in_flight, parts_in_flight, scheduled
from rollmesh.testing.engine_cases import make_batches, make_spec, policy_loss, save_random
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout, Harness

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)

TOKENS = 256
SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 160, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
}
DIVISIONS: dict[str, dict[str, int]] = {"whole": {}, "tp2": {"tp": 2}, "tp2_tokens_whole": {"tp": 2, "sp": 1}}
PROCESSES = {"whole": 1, "tp2": 2, "tp2_tokens_whole": 2}


def config_of(kind: str, layers: int) -> Any:
    return AutoConfig.for_model(kind, **SIZES, **KINDS[kind], num_hidden_layers=layers)


def kept_by_engine(harness: Harness, folder: Path, recompute: Any) -> int:
    """Bytes that autograd keeps when the forward pass of a micro-batch ends, parameters left out."""
    engine = harness.make(make_spec(folder, activation_checkpointing=recompute))
    rng = np.random.default_rng(0)
    # The last token predicts nothing, so that it is not computed.
    prompt, response = (rng.integers(3, 64, count).astype(np.int32) for count in (100, TOKENS + 1 - 100))
    ones, log_probs = np.ones(len(response), np.uint8), np.full(len(response), -3.0, np.float32)
    (batch,) = make_batches(engine, [TrainSequence(prompt, response, ones, log_probs, 1.0, 0, 1.0)], TOKENS + 1)
    weights = {value.untyped_storage()._cdata for value in engine._runner.parameters.values()}
    found: dict[int, tuple[int, torch.UntypedStorage]] = {}
    at_the_end: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and not at_the_end:
            found[storage._cdata] = (storage.nbytes(), storage)
        return tensor

    def loss(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        at_the_end.append(sum(nbytes for nbytes, _ in found.values()))
        return policy_loss(output, tokens, counts)

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        engine.accumulate([batch], loss, engine.global_counts([batch]))
    engine.discard()
    return at_the_end[0] if at_the_end else 0


@pytest.mark.parametrize(
    ("kind", "division", "recompute"),
    [
        pytest.param("llama", "whole", False, marks=pytest.mark.exhaustive),
        ("llama", "whole", "selective"),
        pytest.param("llama", "whole", True, marks=pytest.mark.exhaustive),
        ("qwen3", "whole", False),
        pytest.param("qwen3_moe", "whole", False, marks=pytest.mark.exhaustive),
        ("qwen3_moe", "whole", True),
        pytest.param("llama", "tp2", False, marks=pytest.mark.exhaustive),
        ("llama", "tp2", True),
        ("llama", "tp2_tokens_whole", False),
        ("qwen3_moe", "tp2", False),
    ],
)
def test_a_layer_keeps_what_is_planned(
    kind: str, division: str, recompute: Any, engine_worlds: GetWorld, tmp_path: Path
) -> None:
    parallel = ParallelSection(**DIVISIONS[division])
    world = engine_worlds(EngineLayout(division, PROCESSES[division], "megatron", {"parallel": parallel}))
    found = []
    for layers in (1, 2):
        folder = save_random(config_of(kind, layers), tmp_path / str(layers))
        found.append(max(world.run(kept_by_engine, folder, recompute)))
    a_layer = found[1] - found[0]

    config = config_of(kind, 2)
    shapes = {name: tuple(value.shape) for name, value in build_on_meta(config).named_parameters()}
    model = read_sizes(kind, config, shapes)
    sizes = resolve_sizes(parallel, PROCESSES[division], model.facts)
    planned = kept(Share(TOKENS, sizes, 4, PLAIN), model.kinds[0].widths, recompute)
    # Sums, which keep a number of a token, are not counted.
    assert planned == pytest.approx(a_layer, rel=0.05)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20), st.data())
def test_passes_in_flight_are_those_of_megatrons_schedule(pp: int, vpp: int, wanted: int, data: st.DataObject) -> None:
    import_on_cpu()
    from megatron.core.pipeline_parallel import schedules

    sizes = ParallelSizes(pp, pp=pp, vpp=vpp if pp > 1 else 1)
    micro_batches = scheduled(sizes, wanted)
    parts = data.draw(st.lists(st.integers(1, 9), min_size=sizes.vpp, max_size=sizes.vpp))
    for stage in range(pp):
        group = SimpleNamespace(size=lambda: pp, rank=lambda stage=stage: stage)
        where = SimpleNamespace(
            pp_group=group, virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None
        )
        total, _, begun, _ = schedules.get_pp_rank_microbatches(micro_batches, sizes.vpp, pp, p2p_communicator=where)
        table = schedules.get_schedule_table(micro_batches, sizes.vpp, pp)
        passes = [parts[part] for _, part in table]
        back = [parts[sizes.vpp - 1 - part] for _, part in table]
        held, most = sum(passes[:begun]), 0
        for number in range(total - begun):
            most = max(most, held := held + passes[begun + number])
            held -= back[number]
        assert most_in_flight(sizes, stage, wanted, parts) == max(most, held)
        assert parts_in_flight(sizes, stage, wanted) == min(begun + 1, total)
