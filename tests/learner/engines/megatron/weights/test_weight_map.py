"""Full tensors become Megatron's tensors and these become full tensors again, for every family and every division."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollmesh.learner.engines.megatron.parallel import ParallelSizes
from rollmesh.learner.engines.megatron.weights.weight_map import ParameterKey, WeightMap
from tests.learner.engines.megatron.weights.map_cases import (
    KINDS,
    LAYERS,
    describe,
    divisions,
    expected_local,
    full_tensors,
    make_config,
    make_map,
    megatron_names,
)

NOBODY = -1.0


def fill(weights: WeightMap, config, sizes, full, **kind) -> list[dict[ParameterKey, Tensor]]:
    """The tensors of every process, by the map's pieces; padding is 0."""
    found = []
    for process in range(sizes.processes):
        place, own = sizes.place_of(process), {}
        for key in megatron_names(config, sizes, place, **kind):
            pieces = weights.pieces(place, *key)
            own[key] = torch.zeros(pieces.local_shape, dtype=torch.float64)
            for piece in pieces.pieces:
                piece.view(own[key]).copy_(full[piece.hf_name][piece.hf_box])
        found.append(own)
    return found


def join(weights: WeightMap, sizes, parameters) -> dict[str, list[Tensor]]:
    """All copies of every full tensor, from what the processes contribute; nothing is written twice."""
    found = {}
    for full in weights.full_tensors():
        copies = [torch.full(full.shape, NOBODY, dtype=torch.float64) for _ in range(weights.copies(full.name))]
        for process in range(sizes.processes):
            place = sizes.place_of(process)
            boxes = weights.boxes(full.name, place)
            views = weights.local_views(full.name, place, parameters[process])
            target = copies[weights.copy_of(full.name, place)]
            for box, view in zip(boxes, views, strict=True):
                assert view.numel()
                assert (target[box] == NOBODY).all(), f"{full.name} {box} comes twice"
                target[box] = view
        found[full.name] = copies
    return found


def check(config, sizes, padded=48, *, engine=False, value_model=False) -> None:
    """Every local tensor is the expected one, and every copy of a full tensor is whole."""
    weights = make_map(config, sizes, padded, value_model=value_model)
    full = full_tensors(weights)
    parameters = fill(weights, config, sizes, full, engine=engine, value_model=value_model)
    for process, own in enumerate(parameters):
        place = sizes.place_of(process)
        given = [(name.name, box) for name in weights.full_tensors() for box in weights.boxes(name.name, place)]
        for key, tensor in own.items():
            pieces = weights.pieces(place, *key).pieces
            # The copy of the embedding has the embedding's boxes; in one stage both can meet.
            if key[1] != "output_layer.weight" or not config.tie_word_embeddings:
                assert all(((p.hf_name, p.hf_box) in given) == weights.contributes(place, *key) for p in pieces), key
            expected = expected_local(config, sizes, place, key, full, padded)
            assert tensor.shape == expected.shape, key
            assert torch.equal(tensor, expected), key
    for name, copies in join(weights, sizes, parameters).items():
        assert all(torch.equal(copy, full[name]) for copy in copies), name


@settings(max_examples=4)
@given(st.sampled_from(list(KINDS)), divisions(), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2))
def test_any_division_of_any_family(kind, sizes, tied, engine, value_model, padding):
    padded = (-(-45 // sizes.tp) + padding * 20) * sizes.tp
    check(make_config(kind, tied=tied), sizes, padded, engine=engine, value_model=value_model)


SIZES = (
    ParallelSizes(4, tp=4, layers=(LAYERS,)),
    ParallelSizes(4, tp=2, cp=2, ep=2, etp=2, layers=(LAYERS,)),
    ParallelSizes(8, tp=2, pp=2, ep=2, layers=(4, 1)),
    ParallelSizes(6, pp=3, ep=2, layers=(1, 3, 1)),
    ParallelSizes(4, pp=2, vpp=2, etp=2, layers=(2, 1, 1, 1)),
    ParallelSizes(16, tp=2, pp=2, cp=2, ep=4, etp=1, layers=(3, 2)),
)


def _cells() -> Iterator[Any]:
    """All divisions of a family that has every kind of tensor, and one of the others in make test."""
    for at, kind in enumerate(KINDS):
        for number, sizes in enumerate(SIZES):
            for tied in (False, True):
                first = tied == (at + number) % 2 and (kind == "qwen3_moe" or number == 2)
                yield pytest.param(kind, tied, sizes, marks=() if first else pytest.mark.exhaustive)


@pytest.mark.parametrize(("kind", "tied", "sizes"), _cells())
def test_divisions_that_are_used(kind, tied, sizes):
    check(make_config(kind, tied=tied), sizes)


@pytest.mark.parametrize("stages", [2, 3])
def test_the_last_stages_copy_of_the_embedding_is_loaded_and_gives_nothing(stages):
    sizes = ParallelSizes(stages, pp=stages, layers=(LAYERS, *[0] * (stages - 1)))
    weights = make_map(make_config("llama", tied=True), sizes)
    last = sizes.place_of(stages - 1)
    (piece,) = weights.pieces(last, 0, "output_layer.weight").pieces
    assert piece.hf_name == "model.embed_tokens.weight"
    assert weights.boxes("model.embed_tokens.weight", last) == []
    assert not weights.contributes(last, 0, "output_layer.weight")
    assert weights.boxes("model.embed_tokens.weight", sizes.place_of(0)) == [(slice(0, 45), slice(0, 16))]
    assert "lm_head.weight" not in {full.name for full in weights.full_tensors()}


def test_layers_are_counted_over_the_whole_model():
    sizes = ParallelSizes(2, pp=2, vpp=2, layers=(1, 2, 0, 2))
    weights = make_map(make_config("llama"), sizes)

    def source(stage: int, part: int, index: int) -> str:
        name = f"decoder.layers.{index}.input_layernorm.weight"
        return weights.pieces(sizes.place_of(stage), part, name).pieces[0].hf_name

    assert source(1, 0, 1) == "model.layers.2.input_layernorm.weight"
    assert source(1, 1, 0) == "model.layers.3.input_layernorm.weight"


def test_full_tensors_are_in_the_models_order_and_of_their_kind():
    config = make_config("qwen3_moe")
    sizes = ParallelSizes(8, tp=2, cp=2, ep=2, layers=(LAYERS,))
    weights = make_map(config, sizes)
    found = weights.full_tensors()
    assert [(full.name, full.shape) for full in found] == [(n, tuple(t.shape)) for n, t in describe(config).items()]
    assert {full.name for full in found if full.kind == "expert"} == {
        f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 2) for name in ("gate_up_proj", "down_proj")
    }
    # Two data-parallel ranks, each with two processes that divide sequences; four copies of each expert.
    assert (weights.copies("model.norm.weight"), weights.copies("model.layers.0.mlp.experts.down_proj")) == (4, 4)


def test_a_critic_has_a_head_and_no_output_layer():
    config = make_config("qwen3", tied=True)
    weights = make_map(config, ParallelSizes(2, tp=2, layers=(LAYERS,)), value_model=True)
    shapes = {full.name: full.shape for full in weights.full_tensors()}
    assert "lm_head.weight" not in shapes
    assert list(shapes)[-2:] == ["value_head.weight", "value_head.bias"]
    assert (shapes["value_head.weight"], shapes["value_head.bias"]) == ((1, 16), (1,))


def test_a_name_that_no_rule_makes_is_an_error():
    sizes = ParallelSizes(1, layers=(LAYERS,))
    weights = make_map(make_config("llama"), sizes)
    for name in (
        "decoder.layers.0.mlp.linear_fc1.bias",
        "decoder.layers.0.output_layer.weight",
        "input_layernorm.weight",
    ):
        with pytest.raises(KeyError):
            weights.pieces(sizes.place_of(0), 0, name)
