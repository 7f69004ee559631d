"""Ranks that stay together where one of them fails, or comes to another result: both say so, and neither waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollmesh.learner.batching.types import Packing
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines import agreement

torch.set_num_threads(1)
ONE, TWO = EngineLayout("one_process"), EngineLayout("two_ranks", processes=2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("full", [True, False], ids=["full", "no folder"])
def test_an_export_that_cannot_be_written_fails_on_every_rank(engine_worlds, engine_models, tmp_path, full):
    folder = tmp_path / "out"
    if full:
        folder.mkdir()
        (folder / "model.safetensors").symlink_to("/dev/full")
    else:
        folder.touch()
    (leads, first), (follows, second) = engine_worlds(TWO).run(
        agreement.export_to_a_full_disk, engine_models["dense"], folder
    )
    assert leads.startswith(f"cannot write {folder}: ")
    assert follows.startswith(f"rank 0: {leads} (")
    assert first
    assert second


def test_ranks_compute_in_rows_where_one_of_them_has_to(engine_worlds, engine_models):
    found = engine_worlds(TWO).run(agreement.probe_with_a_failure, engine_models["tied"])
    assert found == [(Packing.ROWS, "RuntimeError: not on this rank")] * 2


@pytest.mark.parametrize(("layout", "where"), [(ONE, "micro-batch"), (TWO, "micro-batch"), (TWO, "rank")])
def test_a_loss_with_other_metrics_now_and_then_is_refused_by_their_names(engine_worlds, engine_models, layout, where):
    found = engine_worlds(layout).run(agreement.metrics_of_other_names, engine_models["tied"], where)
    told = (
        "the loss gives metrics that not all micro-batches have in this form: maxima all, sums odd",
        "give the same names and shapes for every micro-batch, zeros where there is nothing",
    )
    assert found == [told] * layout.processes
