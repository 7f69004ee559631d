"""Layouts of Megatron-Core train as FSDP2 does: some rows of docs/megatron-equivalence.md again, and the page has all.

These mistakes make rows differ, so they have no tests of their own:

- batched exchanges of interleaved stages, which mix up their tensors ("balance, PP2, interleaved");
- divided parameters without a mark, which each process counts in the norm of the gradient ("TP2 x PP2");
- gradients of a tied embedding that the first and the last stage do not add up ("TP2 x PP2");
- a value model that is tied because its base is: its last stage has a head and no copy of the embedding ("TP2 x PP2");
- predictors that look for the next token in their own chunk alone ("CP2, packed, a prompt each").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learner.equivalence import REFUSED
from benchmarks.learner.megatron_equivalence import (
    FIELDS,
    MODELS,
    REFERENCE,
    ROWS,
    Case,
    Row,
    Training,
    make_model,
    train,
)
from rollmesh.mesh.config.parallel import RouterSection
from rollmesh.testing.fixtures import GetWorld
from tests.repository import REPOSITORY

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("megatron")

PAGE = REPOSITORY / "docs" / "megatron-equivalence.md"
# Upper bound of every difference.
BOUND = 1e-5
BY_NAME = {row.name: row for row in ROWS}
TIED, BIASES, EXPERTS = MODELS


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """A model by its name and layers, written when it is first asked for."""

    @cache
    def make(name: str, layers: int) -> Path:
        return make_model(tmp_path_factory.mktemp("megatron-equivalence") / "model", name, layers)

    return make


@pytest.fixture(scope="module")
def reference(model_of: Callable[[str, int], Path], engine_worlds: GetWorld) -> Callable[[str, Case], Training]:
    """The numbers of one rank of FSDP2, once for all rows that have them in common."""

    @cache
    def of(model: str, case: Case) -> Training:
        (found,) = engine_worlds(REFERENCE).run(train, model_of(model, case.layers), case)
        assert found is not None
        return found

    return of


def short(row: Row) -> Case:
    """Fewer tokens than on the page: two micro-batches, of which the last step has none for the second rank. As many
    layers as stages have parts, where the row names none.
    """
    parts = row.parallel.pp * row.parallel.vpp
    return replace(row.case, groups=(2, 1), layers=4 if row.parallel.layers is not None or parts > 2 else parts)


def _cells() -> Iterator[Any]:
    """A model and the name of a row; of layouts that divide alike, one is in the first tier."""
    for model, first, others in (
        (TIED, ("TP2 x PP2",), ("TP2", "PP3", "PP2, interleaved")),
        (BIASES, ("PP2, layers 1 and 3",), ("CP2", "DP2, gradients and parameters overlap")),
        (BIASES, ("CP2, packed, a prompt each",), ()),
        (EXPERTS, ("ETP2 in TP2",), ("EP2", "TP2 x EP2")),
        (BIASES, ("LoRA, TP2 without sequence parallelism",), ("LoRA, CP2",)),
        (EXPERTS, (), ("LoRA, TP2 x EP2",)),
        (
            EXPERTS,
            ("balance, PP2, interleaved, activations computed again",),
            ("balance, DP2, gradients and parameters overlap",),
        ),
        (
            EXPERTS,
            ("replay and both losses, CP2 x EP2",),
            (
                "replay and both losses, PP2, activations computed again",
                "replay and both losses, TP2 x EP2 x PP2",
            ),
        ),
    ):
        yield from (pytest.param(model, row, id=row) for row in first)
        yield from (pytest.param(model, row, id=row, marks=pytest.mark.exhaustive) for row in others)


@pytest.mark.parametrize(("model", "row"), _cells())
def test_layouts_train_as_one_rank_of_fsdp2_does(
    model_of: Callable[[str, int], Path],
    engine_worlds: GetWorld,
    reference: Callable[[str, Case], Training],
    model: str,
    row: str,
) -> None:
    case = short(BY_NAME[row])
    expected = reference(model, case)
    found = engine_worlds(BY_NAME[row].layout).run(train, model_of(model, case.layers), case)[0]
    assert found is not None
    assert min(expected.grad_norms) > 0
    differences = found.differences(expected)
    assert max(differences.values()) < BOUND, differences


def test_the_page_has_every_layout_and_no_difference_above_the_bound() -> None:
    lines = re.findall(r"^\| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    (_, *columns), _, *rows = (line.split(" | ") for line in lines)
    assert columns == list(MODELS)
    assert [name for name, *_ in rows] == list(BY_NAME)
    for name, *cells in rows:
        refused = {model for model, cell in zip(columns, cells, strict=True) if cell == REFUSED}
        assert refused == _without(BY_NAME[name]), name
        differences = [float(each) for cell in cells if cell != REFUSED for each in cell.split(", ")]
        assert len(differences) == len(FIELDS) * (len(columns) - len(refused))
        assert max(differences) < BOUND, name


def _without(row: Row) -> set[str]:
    """The models that a layout refuses: those without what it divides, and experts with undivided tokens."""
    if row.parallel.ep > 1 or row.parallel.etp is not None or row.router != RouterSection():
        return {TIED, BIASES}
    return {EXPERTS} if row.parallel.tp > 1 and row.parallel.sp == 1 else set()
