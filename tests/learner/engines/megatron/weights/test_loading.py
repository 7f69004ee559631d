"""Megatron's tensors come from the files, box by box: the values that transformers loads, and no others are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rollmesh.learner.engines.megatron.families.registry import family_of
from rollmesh.learner.engines.megatron.parallel import ParallelSizes
from rollmesh.learner.engines.megatron.weights.loading import load_weights, read_pieces
from rollmesh.learner.engines.megatron.weights.weight_map import ParameterKey, WeightMap
from rollmesh.learner.model_files import reading
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.weight_files import WeightFiles
from rollmesh.mesh.errors import DataError
from rollmesh.testing.engine_cases import save_random
from tests.learner.engines.megatron.weights.map_cases import KINDS, LAYERS, expected_local, make_config, megatron_names

FILE = "model.safetensors"
PADDED = 60
SIZES = [
    ParallelSizes(4, tp=2, pp=2, ep=2, layers=(3, 2)),
    ParallelSizes(4, tp=4, etp=2, ep=2, layers=(LAYERS,)),
    ParallelSizes(3, pp=3, layers=(1, 3, 1)),
]


def load(folder: Path, sizes: ParallelSizes, *, value_model: bool = False) -> Iterator[dict[ParameterKey, Tensor]]:
    """The loaded tensors of each process; they were arbitrary before."""
    with StoredModel(folder, backbone_only=value_model) as stored:
        config = stored.model.config
        weights = WeightMap(family_of(config), config, sizes, stored.describe(), PADDED, value_model=value_model)
        for process in range(sizes.processes):
            place = sizes.place_of(process)
            names = megatron_names(config, sizes, place, value_model=value_model)
            wanted = {key: weights.pieces(place, *key) for key in names}
            own = {key: torch.full(found.local_shape, torch.nan) for key, found in wanted.items()}
            load_weights(own, wanted, stored)
            yield own


def check(folder: Path, sizes: ParallelSizes, model: nn.Module | None = None) -> None:
    """The loaded tensors are those of transformers, cut by other means; or those of a model."""
    model = model or AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    full = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for process, own in enumerate(load(folder, sizes)):
        place = sizes.place_of(process)
        for key, tensor in own.items():
            assert torch.equal(tensor, expected_local(model.config, sizes, place, key, full, PADDED)), key


# Each kind and each division in the first tier; `test_weight_map` has the pairs.
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        pytest.param(kind, sizes, marks=() if at % len(SIZES) == number else pytest.mark.exhaustive)
        for at, kind in enumerate(KINDS)
        for number, sizes in enumerate(SIZES)
    ],
)
def test_tensors_are_the_stored_ones(tmp_path, monkeypatch, kind, sizes):
    # A few rows or experts at a time.
    monkeypatch.setattr(reading, "PIECE_BYTES", 300)
    check(save_random(make_config(kind, tied=kind == "qwen2"), tmp_path), sizes)


# Only the second one has experts.
@pytest.mark.parametrize("kind", [pytest.param("qwen3", marks=pytest.mark.exhaustive), "mixtral"])
def test_any_dtype_is_read(tmp_path, kind):
    save_random(make_config(kind), tmp_path / "wide")
    AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.bfloat16).save_pretrained(tmp_path / "narrow")
    check(tmp_path / "narrow", SIZES[0])


def test_experts_that_are_stored_as_one_tensor_are_read(tmp_path):
    folder = save_random(make_config("qwen3_moe"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / FILE)
    check(folder, SIZES[1])


@pytest.fixture
def read(monkeypatch) -> list[tuple[str, tuple[slice, ...]]]:
    """The names and parts that are read, as they are."""
    found: list[tuple[str, tuple[slice, ...]]] = []
    plain = WeightFiles.read

    def watched(files, name, part):
        found.append((name, part))
        return plain(files, name, part)

    monkeypatch.setattr(WeightFiles, "read", watched)
    return found


def test_a_process_reads_its_own_experts_and_rows_alone(tmp_path, read):
    folder = save_random(make_config("qwen3_moe"), tmp_path)
    sizes = ParallelSizes(4, tp=2, pp=2, ep=2, layers=(2, 3))
    loaded = load(folder, sizes)
    next(loaded)
    read.clear()
    next(loaded)
    # The second process of the first stage: layer 0 alone of its two has experts, and the second half is its own.
    experts = {name for name, _ in read if ".experts." in name}
    assert experts == {
        f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight"
        for expert in range(4, 8)
        for kind in ("gate", "up", "down")
    }
    assert not any(name.startswith(f"model.layers.{layer}.") for name, _ in read for layer in (2, 3, 4))
    embedding = [part[0] for name, part in read if name == "model.embed_tokens.weight"]
    assert embedding == [slice(30, 45)]


def test_pieces_have_at_most_the_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "PIECE_BYTES", 64 * 4)
    folder = save_random(make_config("llama"), tmp_path)
    sizes = ParallelSizes(2, tp=2, layers=(LAYERS,))
    with StoredModel(folder) as stored:
        weights = WeightMap(family_of(stored.model.config), stored.model.config, sizes, stored.describe(), PADDED)
        place, key = sizes.place_of(1), (0, "decoder.layers.0.mlp.linear_fc2.weight")
        found = list(read_pieces(stored, {key: weights.pieces(place, *key)}))
    # Rows have 24 columns, of which 12 are wanted; two whole rows are read at a time.
    assert [piece.hf_box[0] for _, piece, _ in found] == [slice(row, row + 2) for row in range(0, 16, 2)]
    assert all(values.shape == (2, 12) and piece.local_box[1] == slice(0, 12) for _, piece, values in found)


@pytest.mark.parametrize(("held", "at_once"), [(1, 1), (2, 2), (3, 3), (100, 8)])
def test_experts_are_read_a_few_at_a_time(tmp_path, monkeypatch, read, held, at_once):
    folder = save_random(make_config("qwen3_moe"), tmp_path)
    sizes = ParallelSizes(1, layers=(LAYERS,))
    # An expert's second matrix has 16 rows of 8 float32.
    monkeypatch.setattr(reading, "PIECE_BYTES", held * 16 * 8 * 4)
    with StoredModel(folder) as stored:
        weights = WeightMap(family_of(stored.model.config), stored.model.config, sizes, stored.describe(), PADDED)
        names = [f"decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc2.weight" for expert in range(8)]
        wanted = {name: weights.pieces(sizes.place_of(0), 0, name) for name in names}
        counts = [len(read) for _ in read_pieces(stored, wanted)]
    assert counts == [min((index // at_once + 1) * at_once, 8) for index in range(8)]


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_a_tied_tensor_is_read_wherever_it_is_stored(tmp_path, stages):
    folder = save_random(make_config("qwen3", tied=True), tmp_path)
    sizes = ParallelSizes(stages, pp=stages, layers=(LAYERS, *[0] * (stages - 1)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    check(folder, sizes, model)
    tensors = load_file(folder / FILE)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, folder / FILE)
    check(folder, sizes, model)
    save_file(tensors | {"lm_head.weight": embedding + 1}, folder / FILE)
    with pytest.raises(DataError, match=r"different values for model\.embed_tokens\.weight and lm_head\.weight"):
        list(load(folder, sizes))
    # The critic has no output layer.
    first = next(load(folder, sizes, value_model=True))
    assert torch.equal(first[0, "embedding.word_embeddings.weight"][:45], embedding)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding}, folder / FILE)
    check(folder, sizes, model)


@pytest.mark.parametrize("head", [None, "value_head", "score"])
def test_a_critic_has_the_head_of_its_folder_or_zeros(tmp_path, head):
    folder = save_random(make_config("llama"), tmp_path)
    tensors = load_file(folder / FILE)
    stored = {"weight": torch.randn(1, 16), "bias": torch.randn(1)}
    own = {f"{head}.{name}": tensor for name, tensor in stored.items()} if head else {}
    save_file(tensors | own, folder / FILE)
    for last in load(folder, ParallelSizes(2, tp=2, layers=(LAYERS,)), value_model=True):
        for name, tensor in stored.items():
            assert torch.equal(last[0, f"output_layer.{name}"], tensor if head else torch.zeros_like(tensor))


def test_a_head_of_several_numbers_is_refused(tmp_path):
    folder = save_random(make_config("llama"), tmp_path)
    save_file(load_file(folder / FILE) | {"score.weight": torch.zeros(2, 16)}, folder / FILE)
    with pytest.raises(DataError, match=r"a head of shape \[2, 16\]; a value has one number, \[1, 16\]"):
        list(load(folder, ParallelSizes(1, layers=(LAYERS,)), value_model=True))
