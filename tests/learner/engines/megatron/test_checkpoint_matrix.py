"""A checkpoint of any layout is continued in any other, FSDP2's included, with its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch

from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.megatron import checkpoint_case
from tests.learner.engines.megatron.checkpoint_case import FRESH, Numbers
from tests.learner.engines.models import one_layer_models

torch.set_num_threads(1)

ONE, TWO = EngineLayout("FSDP2"), EngineLayout("two_processes", 2, "megatron")
# With "dp2" all experts are in both processes. The first matrix has layouts of all kinds but stages, which
# `test_contract` continues; the others have each kind alone.
MATRICES = {
    ("experts", "divided"): {"tp2, ep2": ParallelSection(tp=2, ep=2), "dp2": ParallelSection()},
    ("experts", "apart"): {"ep2": ParallelSection(ep=2), "dp2": ParallelSection()},
    ("tied", "divided"): {"tp2": ParallelSection(tp=2), "pp2": ParallelSection(pp=2)},
}
FIRST = next(iter(MATRICES))
Matrix = tuple[dict[str, Numbers], dict[tuple[str, str], Numbers]]


@pytest.fixture(scope="module")
def models(engine_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A mixture of one layer: none of its layouts has stages."""
    return {**engine_models} | one_layer_models(tmp_path_factory.mktemp("one-layer"), "experts")


@pytest.fixture(scope="module")
def matrix(
    engine_worlds: GetWorld, models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Matrix]:
    """The numbers of all continuations of a model: see `checkpoint_case.write`."""

    @cache
    def of(architecture: str, kind: str) -> Matrix:
        model, folder = models[architecture], tmp_path_factory.mktemp("checkpoints")
        alone, layouts = {ONE.name: ParallelSection()}, MATRICES[architecture, kind]
        one, two = engine_worlds(ONE), engine_worlds(TWO)
        ((written, _),) = one.run(checkpoint_case.write, model, alone, folder)
        (also_written, found), _ = two.run(checkpoint_case.write, model, layouts, folder, list(written))
        (found_alone,) = one.run(checkpoint_case.read, model, alone, folder, list(also_written))
        return written | also_written, found | found_alone

    return of


@pytest.mark.parametrize(
    ("architecture", "kind", "layout"),
    [
        pytest.param(*case, layout, marks=[pytest.mark.exhaustive] * (case != FIRST))
        for case, layouts in MATRICES.items()
        for layout in (*layouts, ONE.name)
    ],
)
def test_other_layouts_go_on_from_a_checkpoint(
    matrix: Callable[[str, str], Matrix], architecture: str, kind: str, layout: str
) -> None:
    written, found = matrix(architecture, kind)
    others = {*MATRICES[architecture, kind], ONE.name} - {layout}
    names = [name for name in written if name.removesuffix(FRESH) == layout]
    assert names
    for name in names:
        for other in others:
            assert found[name, other] == pytest.approx(written[name], rel=1e-5), f"{name} in {other}"
