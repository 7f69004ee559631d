"""Layouts train as plain transformers does: some rows of docs/equivalence.md again, and the page has all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch

from benchmarks.learner.equivalence import MODELS, REFUSED, ROWS, Case, Setting, make_case, train_in
from rollmesh.testing.fixtures import GetWorld
from tests.repository import REPOSITORY

torch.set_num_threads(1)

PAGE = REPOSITORY / "docs" / "equivalence.md"
# Upper bound of every difference.
BOUND = 1e-5
BY_NAME = {row.name: row for row in ROWS}


# Fewer tokens than on the page: some micro-batches for every rank, and a last step that has none for most.
GROUPS = (4, 1)

# Models with a part of the setting of a row.
OTHERS = {
    "hybrid with adapter": ("hybrid", "LoRA, FSDP2 x2"),
    "experts, replayed": ("experts", "replay, one rank"),
    "experts, balanced": ("experts", "balance, one rank"),
    "experts, all at once": ("experts", "replay and both losses, one rank"),
}


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """A model's case, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("equivalence")

    @cache
    def make(name: str) -> Case:
        model, row = OTHERS.get(name, (name, None))
        # Mixtures have one layer here; dense models have several.
        fewer = {"num_hidden_layers": 1} if model == "experts" else {}
        return make_case(folder / name, MODELS[model], BY_NAME[row].setting if row else Setting(), GROUPS, **fewer)

    return make


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("one rank, offloaded amid each step", "dense"),
        ("FSDP2 x2, output layer in tiles", "experts"),
        ("FSDP2 x2, log-probs amid each step", "dense"),
        ("LoRA, FSDP2 x2", "hybrid with adapter"),
        ("Ulysses x2", "images"),
        ("balance, one rank, padded", "experts, balanced"),
        ("replay and both losses, EP x2 and Ulysses x2 in FSDP2 x4", "experts, all at once"),
        # The layouts and features of these occur above too, in other pairs.
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in (
                ("one rank, padded", "hybrid"),
                ("EP x2 in HSDP 2x2", "experts"),
                ("HSDP 2x2", "hybrid"),
                ("EP x2", "experts"),
                ("Ulysses x4", "dense"),
                ("Ulysses x2 in HSDP 2x2", "images on grids"),
                ("replay, HSDP 2x2", "experts, replayed"),
                ("replay, Ulysses x2", "experts, replayed"),
                ("balance, EP x2", "experts, balanced"),
                ("FSDP2 x4", "images"),
                ("HSDP 2x2", "images on grids"),
            )
        ),
    ],
)
def test_a_layout_trains_as_plain_transformers_does(
    case_of: Callable[[str], Case], engine_worlds: GetWorld, name: str, model: str
) -> None:
    row, case = BY_NAME[name], case_of(model)
    found = engine_worlds(row.layout).run(train_in, case, row)[0]
    assert found is not None
    assert max(found.differences(case.reference)) < BOUND < 1e-2 * case.moved
    assert min(case.reference.grad_norms) > 0


def test_the_page_has_every_layout_and_no_difference_above_the_bound() -> None:
    lines = re.findall(r"^\| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    (_, *models), _, *rows = (line.split(" | ") for line in lines)
    assert models == list(MODELS)
    assert [name for name, *_ in rows] == list(BY_NAME)
    for name, *cells in rows:
        refused = {model for model, cell in zip(models, cells, strict=True) if cell == REFUSED}
        with_images = {"images", "images on grids"}
        expected = {"dense", "hybrid"} if "EP" in name else {"hybrid"} if "Ulysses" in name else set()
        if "EP" in name or "padded" in name:
            expected |= with_images
        if BY_NAME[name].router is not None:
            expected = set(MODELS) - {"experts"}
        assert refused == expected, name
        differences = [float(each) for cell in cells if cell != REFUSED for each in cell.split(", ")]
        assert len(differences) == 4 * (len(models) - len(refused))
        assert max(differences) < BOUND, name
