"""Model FLOPs: those that torch counts where nothing is shared, and the real lengths where something is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

from benchmarks.learner.tiny_models import ARCHITECTURES
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import Segments, TrainSequence
from rollmesh.learner.engines.device_peaks import peak_tflops
from rollmesh.learner.engines.model_cost import ModelCost, attended_pairs, cost_of

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def shapes(config: Any) -> list[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def segments(*runs: tuple[int, int]) -> Segments:
    """Runs of tokens after a prefix: (length, length of the prefix)."""
    lengths, prefixes = (np.array(column, dtype=np.int64) for column in zip(*runs, strict=True))
    starts = np.zeros(len(runs), dtype=np.int64)
    return Segments(starts, lengths, starts, prefixes)


@pytest.mark.parametrize("window", [None, 1, 3, 4, 7, 100])
def test_a_token_sees_those_before_it_and_itself_within_the_window(window: int | None) -> None:
    runs = [(5, 0), (1, 0), (4, 5), (9, 2), (1, 3)]
    expected = sum(
        min(prefix + token, window or prefix + token) for length, prefix in runs for token in range(1, length + 1)
    )
    assert attended_pairs(segments(*runs), window) == expected


def test_the_costs_of_sequences_are_those_of_the_micro_batch_that_holds_them() -> None:
    rng = np.random.default_rng(0)
    sequences = [
        TrainSequence(prompt, np.zeros(count, np.int32), np.ones(count, np.uint8), np.zeros(count, np.float32))
        for prompt in (np.arange(7, dtype=np.int32), np.arange(20, dtype=np.int32))
        for count in rng.integers(2, 30, 3).tolist()
    ]
    cost = ModelCost(weights=1000, head=0, pair=8, windows=(None, 5, 5))
    row = pack(sequences).row
    alone = cost.sequence_flops(row.segments.lengths, row.segments.prefix_lengths)
    assert alone.sum() == pytest.approx(cost.forward_flops(row))


def test_a_prompt_that_is_computed_again_costs_what_layers_with_a_state_take() -> None:
    config = AutoConfig.for_model("qwen3_next", **ARCHITECTURES["qwen3_next"].settings)
    layers = [f"model.layers.{number}.linear_attn" for number in range(config.num_hidden_layers)]
    cost = cost_of(config, shapes(config), tied=False, stateful=layers)
    named = dict(shapes(config))
    own = [name for name in named if "linear_attn" in name and len(named[name]) > 1]
    assert cost.stateful == sum(int(np.prod(named[name])) for name in own) > 0
    none, again = np.zeros(2, dtype=np.int64), np.array([3, 5])
    assert cost.sequence_flops(none, none, again).tolist() == [2.0 * 3 * cost.stateful, 2.0 * 5 * cost.stateful]


@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_model_costs_what_torch_counts(tied: bool) -> None:
    config = Qwen3Config(**TINY, tie_word_embeddings=tied)
    cost = cost_of(config, shapes(config), tied=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        tokens = torch.zeros((1, 11), dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            model(tokens)
    # Torch counts every pair, also those that the mask takes away.
    every_pair = 3 * 11 * 11 * cost.pair
    assert 2 * 11 * (cost.weights + cost.head) + every_pair == counter.get_total_flops()
    assert cost.pair == 4 * 4 * 16
    assert cost.windows == (None, None, None)


def test_a_packed_batch_counts_a_shared_prompt_once_and_predictors_alone_in_the_output_layer() -> None:
    config = Qwen3Config(**TINY)
    cost = cost_of(config, shapes(config), tied=False)
    prompt = np.arange(6, dtype=np.int32)
    sequences = [
        TrainSequence(prompt, np.ones(n, dtype=np.int32), np.ones(n, dtype=np.uint8), np.zeros(n, dtype=np.float32))
        for n in (3, 2)
    ]
    row = pack(sequences, device=torch.device("cpu")).row
    # The last token of a response predicts nothing, so it is not computed.
    pairs = 6 * 7 // 2 + (2 * 6 + 3) + (6 + 1)
    assert cost.forward_flops(row) == 2 * (cost.weights * 9 + cost.head * 5) + 3 * cost.pair * pairs


def test_experts_count_in_the_share_that_a_token_visits() -> None:
    config = Qwen3MoeConfig(**TINY, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2)
    attention = 32 * 4 * 16 + 2 * 32 * 2 * 16 + 4 * 16 * 32
    active = 2 * 3 * 32 * 24 + 32 * 8
    assert cost_of(config, shapes(config), tied=False).weights == 3 * (attention + active)


def test_windows_and_latent_attention() -> None:
    kinds = ["sliding_attention", "full_attention", "linear_attention"]
    config = Qwen3Config(**TINY, use_sliding_window=True, sliding_window=8)
    config.layer_types = kinds
    assert cost_of(config, [], tied=False).windows == (8, None)
    latent = DeepseekV3Config(num_attention_heads=4, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
    assert cost_of(latent, [], tied=False).pair == 2 * 4 * (12 + 6)


@pytest.mark.parametrize(
    ("architecture", "settings", "windows"),
    [
        ("falcon_h1", {}, (None, None)),
        ("zamba2", {}, (None,)),
        ("recurrent_gemma", {}, (4,)),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "moe", "attention"], "num_hidden_layers": 4}, (None,)),
    ],
)
def test_hybrids_count_each_layer_that_attends(
    architecture: str, settings: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture].settings | settings)
    assert cost_of(config, [], tied=False).windows == windows


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.0),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA H200", "bfloat16", 989.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA L40S", "bfloat16", 362.0),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA A100-SXM4-80GB", "float32", None),
        ("Some other device", "bfloat16", None),
    ],
)
def test_peaks_are_known_or_absent(name: str, dtype: str, peak: float | None) -> None:
    assert peak_tflops(name, dtype) == peak
