"""Pieces lie where Megatron has them: each form by itself, with numbers that can be checked by eye."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmesh.learner.engines.megatron.parallel import ParallelPlace, ParallelSizes
from rollmesh.learner.engines.megatron.weight_rules import Form, Geometry, Piece, Pieces, Rule, pieces_of
from rollmesh.mesh.errors import ConfigError

EXPERTS = Rule(("experts.{expert}.fc1.weight", "experts.fc1.weight{expert}"), ("gate_up",), Form.EXPERT_GATE_UP)
DOWN = Rule(("experts.{expert}.fc2.weight",), ("down",), Form.EXPERT_DOWN)


def assemble(pieces: Pieces, full: dict[str, Tensor]) -> Tensor:
    """The local tensor; -1 where no piece is."""
    local = torch.full(pieces.local_shape, -1.0)
    for piece in pieces.pieces:
        piece.view(local).copy_(full[piece.hf_name][piece.hf_box])
    return local


def make(rule: Rule, full: dict[str, Tensor], name: str = "", *, padded: int = 0, groups: int = 1, **where) -> Pieces:
    """The pieces of a rule, for sizes and ranks given as `tp=(size, rank)`."""
    sizes = ParallelSizes(1, **{key: size for key, (size, _) in where.items()})
    place = ParallelPlace(**{key: rank for key, (_, rank) in where.items()})
    geometry = Geometry({key: tuple(tensor.shape) for key, tensor in full.items()}, groups, padded)
    return pieces_of(rule, name or rule.names[0], sizes, place, geometry)


def rows(*numbers: float) -> Tensor:
    """A matrix of two columns, whose rows are known by their first number."""
    return torch.tensor(numbers)[:, None] + torch.tensor([0.0, 0.5])


def test_the_gate_comes_before_the_other_matrix_in_every_process():
    rule = Rule(("fc1",), ("gate", "up"), Form.GATE_UP)
    full = {"gate": rows(0, 1, 2, 3), "up": rows(10, 11, 12, 13)}
    assert assemble(make(rule, full, tp=(2, 0)), full)[:, 0].tolist() == [0, 1, 10, 11]
    assert assemble(make(rule, full, tp=(2, 1)), full)[:, 0].tolist() == [2, 3, 12, 13]


def test_queries_keys_and_values_lie_group_by_group():
    rule = Rule(("qkv",), ("q", "k", "v"), Form.QKV)
    full = {"q": rows(*range(8)), "k": rows(20, 21, 22, 23), "v": rows(30, 31, 32, 33)}
    # Two heads of one row per group.
    whole = [0, 1, 20, 30, 2, 3, 21, 31, 4, 5, 22, 32, 6, 7, 23, 33]
    assert assemble(make(rule, full, groups=4), full)[:, 0].tolist() == whole
    assert assemble(make(rule, full, groups=4, tp=(2, 1)), full)[:, 0].tolist() == whole[8:]
    biases = {name: tensor[:, 0] for name, tensor in full.items()}
    assert assemble(make(rule, biases, groups=4, tp=(4, 2)), biases).tolist() == whole[8:12]


def test_padding_belongs_to_no_token():
    rule = Rule(("embedding",), ("tokens",), Form.VOCABULARY)
    full = {"tokens": rows(0, 1, 2, 3, 4)}
    found = [make(rule, full, padded=12, tp=(4, rank)) for rank in range(4)]
    assert [assemble(pieces, full)[:, 0].tolist() for pieces in found] == [[0, 1, 2], [3, 4, -1], [-1] * 3, [-1] * 3]
    assert [pieces.padded for pieces in found] == [False, True, True, True]
    assert found[3].pieces == ()


def test_an_expert_is_the_right_one_in_every_process():
    full = {"gate_up": torch.arange(4.0)[:, None, None] * 100 + rows(0, 1, 2, 3, 10, 11, 12, 13)}
    second = make(EXPERTS, full, "experts.1.fc1.weight", ep=(2, 1), etp=(2, 1))
    assert assemble(second, full)[:, 0].tolist() == [302, 303, 312, 313]
    grouped = make(EXPERTS, full, "experts.fc1.weight0", ep=(2, 1), tp=(2, 1))
    assert assemble(grouped, full)[:, 0].tolist() == [200, 201, 202, 203, 210, 211, 212, 213]
    # Both halves are one box where a process has them whole.
    assert len(grouped.pieces) == 1


def test_the_second_matrix_of_an_expert_is_divided_by_columns():
    full = {"down": torch.arange(2 * 3 * 4.0).view(2, 3, 4)}
    pieces = make(DOWN, full, "experts.0.fc2.weight", ep=(2, 1), etp=(2, 1), tp=(4, 0))
    assert assemble(pieces, full).tolist() == [[14, 15], [18, 19], [22, 23]]


def test_columns_are_divided_and_norms_are_not():
    full = {"o": torch.arange(8.0).view(2, 4), "norm": torch.arange(3.0)}
    columns = make(Rule(("proj",), ("o",), Form.COLUMNS), full, tp=(2, 1))
    assert assemble(columns, full).tolist() == [[2, 3], [6, 7]]
    assert assemble(make(Rule(("norm",), ("norm",)), full, tp=(2, 1)), full).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("rule", "where", "message"),
    [
        (Rule(("p",), ("o",), Form.COLUMNS), {"tp": (4, 0)}, r"tp: 4 does not divide 6 columns of o \(tp: 3 does\)"),
        (EXPERTS, {"ep": (2, 0)}, r"ep: 2 does not divide 3 experts \(ep: 1 does\)"),
        (EXPERTS, {"etp": (4, 0)}, r"etp: 4 does not divide 2 rows of gate_up \(etp: 2 does\)"),
    ],
)
def test_a_size_that_does_not_divide_is_named(rule, where, message):
    full = {"o": torch.zeros(2, 6), "gate_up": torch.zeros(3, 4, 2)}
    name = "experts.0.fc1.weight" if rule is EXPERTS else ""
    with pytest.raises(ConfigError, match=message):
        make(rule, full, name, **where)


def test_names_have_an_experts_number_in_its_place():
    assert EXPERTS.matches("experts.12.fc1.weight")
    assert EXPERTS.matches("experts.fc1.weight3")
    assert not EXPERTS.matches("experts.x.fc1.weight")
    assert not Rule(("mlp.fc1",), ("a",)).matches("mlpxfc1")
    assert (EXPERTS.expert_of("experts.12.fc1.weight"), EXPERTS.expert_of("experts.fc1.weight3")) == (12, 3)
    assert EXPERTS.names_of(5) == ("experts.5.fc1.weight", "experts.fc1.weight5")


def test_rows_of_a_piece_are_found_in_both_tensors():
    piece = Piece("a", (slice(4, 9), slice(2, 4)), (slice(1, 6), slice(0, 2)))
    part = piece.rows((slice(6, 8), slice(2, 4)))
    assert (part.hf_box, part.local_box) == ((slice(6, 8), slice(2, 4)), (slice(3, 5), slice(0, 2)))
    assert piece.rows(piece.hf_box) is piece


@given(st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 3)), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_processes_have_all_of_the_sources_once(tp, per_process, heads, width, columns):
    groups = tp * per_process
    full = {
        name: torch.arange(groups * count * width * columns, dtype=torch.float32).view(-1, columns) + place * 1e4
        for place, (name, count) in enumerate((("q", heads), ("k", 1), ("v", 1)))
    }
    rule = Rule(("qkv",), ("q", "k", "v"), Form.QKV)
    found = torch.cat([assemble(make(rule, full, groups=groups, tp=(tp, rank)), full) for rank in range(tp)])
    assert found.flatten().sort().values.tolist() == torch.cat([t.flatten() for t in full.values()]).tolist()
