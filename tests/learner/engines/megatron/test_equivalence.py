"""Layouts of Megatron-Core train as FSDP2 does: some rows of docs/megatron-equivalence.md again, and the page has all.

These mistakes make rows differ, so they have no tests of their own:

- batched exchanges of interleaved stages, which mix up their tensors ("PP2, interleaved");
- divided parameters without a mark, which each process counts in the norm of the gradient ("TP2");
- gradients of a tied embedding that the first and the last stage do not add up ("PP3");
- a value model that is tied because its base is: its last stage has a head and no copy of the embedding ("PP3");
- predictors that look for the next token in their own chunk alone ("CP2").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.learner.equivalence import REFUSED
from benchmarks.learner.megatron_equivalence import FIELDS, MODELS, REFERENCE, ROWS, Row, make_model, train
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
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("megatron-equivalence")
    return {name: make_model(folder / str(number), name) for number, name in enumerate(MODELS)}


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        (TIED, ("TP2", "PP3", "PP2, interleaved", "TP2 x PP2")),
        (BIASES, ("PP2, layers 1 and 3", "CP2", "DP2, gradients and parameters overlap")),
        (BIASES, ("CP2, packed, a prompt each",)),
        (EXPERTS, ("EP2", "ETP2 in TP2", "TP2 x EP2")),
        (BIASES, ("LoRA, TP2 without sequence parallelism", "LoRA, CP2")),
        (EXPERTS, ("LoRA, TP2 x EP2",)),
        (
            EXPERTS,
            ("balance, PP2, interleaved, activations computed again", "balance, DP2, gradients and parameters overlap"),
        ),
        (
            EXPERTS,
            (
                "replay and both losses, PP2, activations computed again",
                "replay and both losses, CP2 x EP2",
                "replay and both losses, TP2 x EP2 x PP2",
            ),
        ),
    ],
    ids=["tied", "biases", "packed", "experts", "adapter", "adapter of experts", "balance", "replay"],
)
def test_layouts_train_as_one_rank_of_fsdp2_does(
    models: Mapping[str, Path], engine_worlds: GetWorld, model: str, rows: tuple[str, ...]
) -> None:
    chosen = [BY_NAME[name] for name in rows]
    (reference,) = engine_worlds(REFERENCE).run(train, models[model], chosen[0].case)
    assert reference is not None
    assert min(reference.grad_norms) > 0
    for row in chosen:
        found = engine_worlds(row.layout).run(train, models[model], row.case)[0]
        assert found is not None
        differences = found.differences(reference)
        assert max(differences.values()) < BOUND, f"{row.name}: {differences}"


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
