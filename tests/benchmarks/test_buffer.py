"""The buffer's benchmark measures what it says: each trajectory claimed once, the ledger balanced, costs counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.buffer.arrays import make_arrays
from benchmarks.buffer.load_processes import trajectories
from benchmarks.buffer.mesh import quantile, started
from benchmarks.buffer.plan import Plan
from benchmarks.buffer.reverb import Reverb
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.trajectory.payload_codec import decode, encode


@pytest.mark.usefixtures("forked")
def test_a_cell_runs_the_whole_way_and_accounts_for_it(tmp_path: Path) -> None:
    plan = Plan(tokens=64, writers=2, group=2, seconds=0.4, warmup=0.2, batch=16)
    with started(plan, tmp_path) as mesh:
        cell = mesh.measure()
    assert cell.balanced
    assert cell.items_s > 0
    assert 0 < cell.p50_ms <= cell.p99_ms
    assert cell.payload_bytes == len(encode(trajectories(64, 1)[0]))
    assert cell.cpu_us.keys() == {"front", "redis", "writers", "learner"}
    assert cell.redis_us["evalsha"] > 0


def test_all_contenders_store_the_same_arrays() -> None:
    arrays, stored = make_arrays(100, 3), decode(encode(trajectories(100, 1)[3]))
    np.testing.assert_array_equal(stored.response_ids, arrays["ids"])
    np.testing.assert_array_equal(stored.log_probs, arrays["log_probs"])
    np.testing.assert_array_equal(stored.response_mask, arrays["mask"])
    assert [v.version for v in stored.versions] == arrays["versions"].tolist()


def test_a_peer_that_cannot_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot run"):
        Reverb(tmp_path / "absent")


def test_quantiles_are_values_that_were_seen() -> None:
    samples = [float(value) for value in range(100)]
    assert [quantile(samples, share) for share in (0.0, 0.5, 0.99, 1.0)] == [0.0, 50.0, 99.0, 99.0]
    assert quantile([], 0.5) == 0.0


@pytest.mark.usefixtures("forked")
def test_a_full_table_stays_full(tmp_path: Path) -> None:
    plan = Plan(tokens=16, group=4, seconds=0.4, warmup=0.1, batch=16, ahead=10, fill=True)
    with started(plan, tmp_path) as mesh:
        filled = mesh.filled()
        assert filled["payload_bytes"] == 40 * 4 * len(encode(trajectories(16, 1)[0]))
        assert mesh.used_bytes() - mesh.empty_bytes > filled["payload_bytes"]
        cell = mesh.measure()
    assert cell.balanced
    assert cell.items_s > 0
