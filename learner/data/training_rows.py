"""The rows of all training sources, and the order in which they are used: for runs and for trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rollmesh.learner.data.curriculum import CurriculumTurns, load_curriculum
from rollmesh.learner.data.dataset import JoinedRows, open_rows
from rollmesh.learner.data.mixture import order_of
from rollmesh.learner.data.order import Order
from rollmesh.learner.data.records import RowForm, RowSource
from rollmesh.mesh.config.inputs import DataSource, SourcesSection

T = TypeVar("T")


def open_training_rows(
    data: SourcesSection, form_of: Callable[[DataSource], RowForm[T]], *, seed: int
) -> tuple[RowSource[T], Order]:
    """Opens the rows of `data.train`, which `RowCheck` looks at.

    Args:
        data: names the sources, their weights, and the order of their rows.
        form_of: gives the form of a source's rows.
        seed: of the order.

    Raises:
        DataError: see `open_rows` and `load_curriculum`.
    """
    parts = [open_rows(source, form_of(source), checked=False) for source in data.train]
    weights = [source.weight for source in data.train if source.weight is not None]
    turns = None
    if data.curriculum is not None:
        rows = {source.label: len(part) for source, part in zip(data.train, parts, strict=True)}
        turns = CurriculumTurns(load_curriculum(data.curriculum), rows, seed=seed)
    order = order_of(parts, seed=seed, shuffle=data.shuffle, epochs=data.epochs, weights=weights or None, turns=turns)
    return JoinedRows(parts), order
