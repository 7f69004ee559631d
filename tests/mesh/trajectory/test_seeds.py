"""Seeds: every sample has a stream of its own, wherever and whenever it is drawn, and the same run has the same."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.trajectory.seeds import SEEDS, derived_seed, member_seed


@given(parts=st.lists(st.integers(0, 2**64) | st.text(max_size=5), max_size=4))
def test_a_seed_is_what_engines_can_keep(parts: list[int | str]) -> None:
    """vLLM and torch keep signed 64-bit numbers; 0 would leave the choice to them."""
    seed = derived_seed(*parts)
    assert 0 < seed < SEEDS
    assert np.int64(seed) == seed
    assert derived_seed(*parts) == seed


def test_no_two_samples_share_a_stream() -> None:
    """Over seeds of runs, tables, versions, epochs, rows, groups that replace others, holders and members."""
    tasks = [
        derived_seed(derived_seed(run, "train"), f"{epoch}-{row}")
        for run, epoch, row in product(range(3), range(3), range(40))
    ]
    tasks += [
        derived_seed(derived_seed(derived_seed(run, "eval"), str(row)), version)
        for run, row, version in product(range(3), range(40), range(3))
    ]
    seeds = [
        member_seed(task, parent, attempt, member)
        for task, parent, attempt, member in product(tasks, ("", "train-7"), (1, 2, 1_000_001), range(4))
    ]
    seeds += [derived_seed(seed, turn) for seed in seeds[:2000] for turn in range(3)]
    assert len(set(seeds)) == len(seeds)


def test_without_a_seed_the_engine_chooses() -> None:
    assert member_seed(0, "", 1, 3) == 0
