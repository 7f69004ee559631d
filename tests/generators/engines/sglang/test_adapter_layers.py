"""The layers that a server computes with adapters, and the factors that it gets."""

from __future__ import annotations

import pytest
import torch

from rollmesh.generators.engines.adapters import AdapterShape
from rollmesh.generators.engines.sglang.adapters import adapted_layers, adapter_arguments, completed
from rollmesh.generators.engines.sglang.server_args import check
from rollmesh.mesh.config.rollout import SglangSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.weights.adapter import factor_names

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
LINEAR = (*ATTENTION, "o_proj", *MLP, "down_proj")
BLOCK = "model.layers.1.self_attn."


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ((), LINEAR),
        (("q_proj",), ATTENTION),
        (("up_proj", "down_proj"), (*MLP, "down_proj")),
        (("o_proj",), ("o_proj",)),
    ],
)
def test_layers_that_the_server_computes_together_are_adapted_together(
    targets: tuple[str, ...], layers: tuple[str, ...]
) -> None:
    assert adapted_layers(AdapterShape(4, targets), LINEAR, experts=False) == set(layers)


def test_what_the_server_cannot_adapt_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="no layer 'c_attn'"):
        adapted_layers(AdapterShape(4), ("c_attn", "c_proj"), experts=False)
    with pytest.raises(ConfigError, match="mixture of experts"):
        adapted_layers(AdapterShape(4, ("q_proj",)), LINEAR, experts=True)
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.data_parallel 1 only"):
        check(SglangSection(data_parallel=2), allow_insecure=True, adapters=True)
    with pytest.raises(ConfigError, match="an adapter is shared memory of this host"):
        check(SglangSection(address="http://there:30000"), allow_insecure=True, adapters=True)
    check(SglangSection(address="http://127.0.0.1:30000"), allow_insecure=False, adapters=True)


def test_missing_factors_of_layers_computed_together_are_zeros() -> None:
    shapes = {f"{BLOCK}{name}.weight": (6 if name == "q_proj" else 3, 5) for name in ATTENTION}
    q = factor_names(f"{BLOCK}q_proj.weight")
    factors = {q[0]: torch.ones(2, 5), q[1]: torch.ones(6, 2)}
    complete = completed(factors, shapes)
    assert complete.keys() == {name for weight in shapes for name in factor_names(weight)}
    for name in ("k_proj", "v_proj"):
        a, b = factor_names(f"{BLOCK}{name}.weight")
        assert (complete[a].shape, complete[b].shape) == ((2, 5), (3, 2))
        assert not complete[a].any()
        assert not complete[b].any()
    assert completed(complete, shapes).keys() == complete.keys()


def test_a_server_has_room_for_all_live_adapters_and_the_base() -> None:
    arguments = adapter_arguments(AdapterShape(8), {"o_proj", "down_proj"})
    assert arguments["max-loras-per-batch"] == 5
    assert (arguments["max-lora-rank"], arguments["lora-target-modules"]) == (8, ["down_proj", "o_proj"])
