"""Whole runs under which Redis loses everything, and runs whose byte budget is small."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner

from rollmesh.cli.app import app
from rollmesh.learner.checkpoint.names import version_of
from rollmesh.mesh.config import Config
from tests.learner.live.test_runs import assert_nothing_twice, ledger, summary, uses, wait_for_line
from tests.learner.live.tiny import Mesh, make_config, meanwhile, mesh_of, open_mesh, run_learner

# Nothing is over the bound whatever is lost, and nothing comes twice because the data begins again.
CALM = {"data.eval": None, "checkpoint.every_s": None, "checkpoint.every_steps": 3, "buffer.lease_s": 4.0}


def redis_of(mesh: Mesh) -> Redis:
    server = mesh._service.redis
    assert server is not None
    return Redis.from_url(server.admin_url)


def assert_each_prompt_once(config: Config) -> None:
    """Within an epoch no prompt is used twice."""
    counted = Counter(group.ordinal for use in uses(config) for group in use.groups)
    assert max(counted.values()) == 1


def test_a_running_learner_tells_an_emptied_redis_what_it_has_used(tmp_path: Path) -> None:
    config = make_config(tmp_path, {**CALM, "learner.steps": 9})

    with open_mesh(config) as mesh:

        def empty_it() -> None:
            wait_for_line(config.run.folder / "consumption.jsonl", lambda line: line["train_version"] == 3)
            with redis_of(mesh) as client:
                client.flushall()

        with meanwhile(empty_it):
            assert run_learner(config, mesh.address) == 0
        assert ledger(mesh.address).recounted.trained == 9 * 4
    assert summary(config)["incarnation"] == 1
    assert_nothing_twice(config)
    assert_each_prompt_once(config)


def test_a_learner_that_starts_on_an_empty_redis_goes_on_from_its_disk(tmp_path: Path) -> None:
    """Also where that disk was lost, and the checkpoint on it is a copy that was kept elsewhere."""
    copies = tmp_path / "copies"
    settings = {**CALM, "learner.steps": 4, "buffer.max_staleness": 40, "checkpoint.copy_to": copies.as_uri()}
    config = make_config(tmp_path, settings)
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == 0
    shutil.rmtree(config.run.folder)
    fetched = CliRunner().invoke(app, ["fetch", f"{copies.as_uri()}/{config.run.name}", str(config.run.folder)])
    left = version_of(Path(fetched.output.strip()).name)
    assert left is not None, fetched.output
    config = make_config(tmp_path, {**settings, "learner.steps": left.version + 2})
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == 0
        ledger(mesh)
    after = [use.train_version for use in uses(config) if use.incarnation == 2]
    assert after == [left.version, left.version + 1], "it goes on at what is on its disk"
    assert_nothing_twice(config)


@pytest.mark.parametrize(
    ("steps", "overrides", "groups"),
    # In reserves of groups. The first budget asks for a checkpoint with a claim, when what was used fills half of it.
    # In the second what was used is less, but no further batch fits in addition.
    [(8, {}, 12), (4, {"rollout.max_response_tokens": 40, "learner.batch.groups": 1}, 1.1)],
    ids=["asked for with a claim", "admission has stopped"],
)
def test_a_small_byte_budget_brings_checkpoints_forward(
    tmp_path: Path, steps: int, overrides: dict[str, Any], groups: float
) -> None:
    settings = {**CALM, "checkpoint.every_steps": None, "learner.steps": steps, **overrides}
    config = make_config(tmp_path, settings)
    reserve = config.rollout.n * (512 + 8 * config.rollout.max_response_tokens)
    config = make_config(tmp_path, {**settings, "buffer.max_bytes": int(groups * reserve)})
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == 0
        assert ledger(mesh).recounted.trained == steps * config.learner.batch.groups
    written = sorted((config.run.folder / "checkpoints").iterdir())
    assert len(written) >= 2, "not only the last one"
