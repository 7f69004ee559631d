"""A dry run says what a start would do with the folder, and refuses what a start would refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.launcher.preflight.dry_run import dry_run
from rollmesh.launcher.run_secrets import with_own_secrets
from rollmesh.learner.recovery.consumption_log import LOG_NAME
from rollmesh.learner.recovery.run_identity import RunRecord
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError, DataError
from tests import fork_server
from tests.learner.live.tiny import make_config, make_data

SaidOf = Callable[..., list[str]]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path, {})


@pytest.fixture
def said_of(monkeypatch: pytest.MonkeyPatch) -> SaidOf:
    """A dry run, whose trials are forked."""

    def say(config: Config, *, fresh: bool = False) -> list[str]:
        fork_server.take_environment(monkeypatch)
        return dry_run(config, fresh=fresh, fork_server=fork_server.server())

    return say


def begin(config: Config) -> None:
    """Leaves the folder of a run that a learner has taken over."""
    RunRecord(with_own_secrets(config), Path(config.model.path)).write()


def test_a_run_starts_continues_or_starts_over(said_of: SaidOf, config: Config, tmp_path: Path) -> None:
    folder = config.run.folder
    first = said_of(config)
    assert first[0] == f"run tiny would start in {folder}"
    assert "1 generator(s) sample with hf" in "\n".join(first)
    assert "not checked" not in "\n".join(first)
    assert not folder.exists()
    elsewhere = config.model_copy(update={"model": config.model.model_copy(update={"path": "org/model"})})
    assert said_of(elsewhere)[-2].startswith("not checked: model.path org/model is no folder here")
    begin(config)
    before = sorted(folder.rglob("*"))
    assert said_of(config)[:2] == [
        f"run tiny would continue in {folder}",
        "continues from step 0: it has no checkpoint",
    ]
    assert said_of(config, fresh=True)[0] == f"run tiny would start over in {folder}"
    make_data(tmp_path / "train.jsonl", 12)
    assert said_of(config)[0].startswith(f"run tiny would start over in {folder}, of which nothing was trained")
    assert sorted(folder.rglob("*")) == before


def test_rewards_are_named_and_services_not_called(said_of: SaidOf, tmp_path: Path) -> None:
    endpoint = "grpc://127.0.0.1:1"
    reward = {"functions": ["exact_match"], "by_data_source": {"far": [endpoint]}}
    said = said_of(make_config(tmp_path, {"reward": reward}))
    assert f"rewards: exact_match; far: {endpoint}" in said
    assert f"not checked: the reward service {endpoint}, which was not called" in said


def test_the_folder_of_a_training_is_another_ones(said_of: SaidOf, config: Config) -> None:
    begin(config)
    (config.run.folder / "command").write_text("sft\n")
    with pytest.raises(ConfigError, match="is the folder of a `rollmesh sft`"):
        said_of(config)


def test_what_a_start_refuses_is_refused(said_of: SaidOf, config: Config, tmp_path: Path) -> None:
    begin(config)
    (config.run.folder / LOG_NAME).write_text("{}\n")
    make_data(tmp_path / "train.jsonl", 12)
    with pytest.raises(ConfigError, match=r"was begun with something else: data\.train"):
        said_of(config)
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(DataError, match=r"data\.train: dataset .* does not exist"):
        said_of(config)
