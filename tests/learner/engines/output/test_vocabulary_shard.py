"""Log-probs where processes divide the vocabulary: those of one process, and no trace of padding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.engines.output.layer import VocabularyShard
from rollmesh.learner.engines.output.logit_form import LogitForm
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.output.shard_case import (
    ALL,
    NOTHING,
    REAL,
    Case,
    compute,
    compute_shard,
    compute_without_gradient,
)
from tests.suite.tiers import covering

torch.set_num_threads(1)

# Rows of each process's shard: the last is padded by some, or the last is padding alone.
SHARDS = ((2, 48), (2, 90), (3, 32), (3, 42))
FORMS = (LogitForm(), LogitForm(scale=1.7, cap=1.5), LogitForm(columns=70))


def check(case: Case, processes: int, rows: int, engine_worlds, rounding: float = 2e-6) -> None:
    world = engine_worlds(EngineLayout(f"vocabulary-{processes}", processes))
    parts = world.run(compute_shard, case, rows)
    whole = compute(case, REAL, 0, None)
    for part in parts:
        for value, first, wanted in zip(part.values, parts[0].values, whole.values, strict=True):
            assert value.dtype == torch.float32
            assert torch.equal(value, first)
            torch.testing.assert_close(value, wanted, atol=2e-6, rtol=2e-6)
    near = {"atol": rounding, "rtol": rounding}
    real = case.form.columns or REAL
    torch.testing.assert_close(sum(part.hidden for part in parts), whole.hidden, **near)
    for name in ("weight", "bias") if case.bias else ("weight",):
        gradient = torch.cat([getattr(part, name) for part in parts])
        torch.testing.assert_close(gradient[:REAL], getattr(whole, name), **near)
        assert torch.count_nonzero(gradient[:real].float())
        assert not torch.count_nonzero(gradient[real:])


@covering(shard=SHARDS, form=FORMS, kept=(ALL, NOTHING))
def test_values_and_gradients_are_those_of_one_process(engine_worlds, shard, form, kept):
    processes, rows = shard
    check(Case(form, kept), processes, rows, engine_worlds)


@pytest.mark.parametrize("case", [Case(bias=False), Case(entropy_gradient=False), Case(tokens=1)])
def test_parts_of_the_gradient_may_be_absent(engine_worlds, case):
    check(case, 2, 48, engine_worlds)


@pytest.mark.parametrize("kept", [ALL, NOTHING])
@pytest.mark.parametrize("rounded", [False, True])
def test_shards_of_a_bfloat16_model_differ_from_the_whole_only_by_the_rounding_of_gradients(
    engine_worlds, kept, rounded
):
    case = Case(kept=kept, dtype=torch.bfloat16, rounded=rounded)
    check(case, 3, 32, engine_worlds, rounding=2e-2)


def test_no_tokens_and_no_gradient(engine_worlds):
    world = engine_worlds(EngineLayout("vocabulary-2", 2))
    for part in world.run(compute_shard, Case(tokens=0), 48):
        assert [value.shape for value in part.values] == [(0,)] * 3
        assert not torch.count_nonzero(part.weight)
    uniform = torch.tensor([1 / REAL])
    for values in world.run(compute_without_gradient, 48):
        wanted = torch.stack([uniform.log(), -uniform.log(), uniform]).expand(3, 2)
        torch.testing.assert_close(values, wanted)


def test_a_process_alone_in_its_group_exchanges_nothing():
    # There is no process group here: a collective would fail.
    alone, none = compute(Case(), REAL, 0, SimpleNamespace(size=lambda: 1)), compute(Case(), REAL, 0, None)
    assert all(map(torch.equal, alone.values, none.values))
    assert torch.equal(alone.hidden, none.hidden)


@given(
    rows=st.integers(1, 40),
    processes=st.integers(1, 5),
    real=st.integers(1, 120),
    columns=st.none() | st.integers(1, 9),
)
def test_shards_have_every_real_column_once(rows, processes, real, columns):
    form = LogitForm(columns=columns)
    held = [VocabularyShard(rank * rows, real).columns(rows, form) for rank in range(processes)]
    assert all(0 <= count <= rows for count in held)
    assert sum(held) == min(rows * processes, real, columns or real)
