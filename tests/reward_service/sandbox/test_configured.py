"""The configuration of isolation, the executor that it asks for, and the command that lists languages."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from rollmesh.cli.app import app
from rollmesh.doctor.before.rewards import check_isolation
from rollmesh.doctor.findings import Severity
from rollmesh.launcher.preflight import trial
from rollmesh.mesh.config import load_as
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.scorers.isolation import IsolationSection
from rollmesh.reward_service.sandbox import executor
from rollmesh.reward_service.sandbox.configured import open_executor
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError


def test_auto_is_the_section_as_it_is() -> None:
    assert RewardSection.model_validate({"isolation": "auto"}) == RewardSection()
    assert RewardSection.model_validate({"isolation": {"require": 3}}).isolation.require == 3
    with pytest.raises(ValidationError, match=r"needs `auto` or keys of its own"):
        RewardSection.model_validate({"isolation": 9})


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"require": 1}, "greater than or equal to 2"),
        ({"require": 4}, "rung 4 needs reward.isolation.plugin"),
        ({"plugin": "sandbox_fusion"}, "they need one"),
        ({"url": "http://host:1"}, "a url belongs to"),
        ({"plugin": "sandbox_fusion", "url": "ftp://host"}, "needs https://HOST:PORT"),
        ({"plugin": "remote", "url": "https://host"}, "needs reward.isolation.key_file"),
        ({"key_file": "key"}, "there is none"),
        ({"program": "/usr/bin/bwrap"}, "belongs to the plug-ins bubblewrap and gvisor"),
    ],
)
def test_contradictions_are_refused(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        IsolationSection.model_validate(wrong)


async def test_the_rung_in_force_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    try:
        opened = await open_executor(IsolationSection(require=3, concurrency=1))
    except UnavailableError as error:
        pytest.skip(str(error))
    await opened.close()
    assert (opened.rung, opened.describe()) == (3, f"rung 3: {executor.WHAT[3]}; {opened._cgroups}")  # type: ignore[attr-defined]
    assert f"isolation of programs: {opened.describe()}" in caplog.text
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(UnavailableError, match=r"no bwrap \(install the package bubblewrap\)"):
        await open_executor(IsolationSection(plugin="bubblewrap"))
    with pytest.raises(UnavailableError, match=r"no runsc \(install the package runsc\)"):
        await open_executor(IsolationSection(plugin="gvisor"))


def _config(*names: str) -> Config:
    return load_as(Config, {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"functions": list(names)}})


def test_it_is_told_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trial._try_reward(_config("math")) == []
    try:
        (notice,) = trial._try_reward(_config("code"))
        assert notice.startswith("programs of the model run on rung ")
    except UnavailableError:
        pass  # this host has none, and says so
    monkeypatch.setattr(executor, "MACHINE", "riscv64")
    with pytest.raises(UnavailableError, match="programs cannot be confined on rung 2 or above"):
        trial._try_reward(_config("code"))


def test_the_doctor_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*names: str) -> list[tuple[Severity, str]]:
        return [(each.severity, each.what) for each in check_isolation(_config(*names))]

    assert not found("math")
    ((severity, what),) = found("code")
    assert severity in (Severity.OK, Severity.WARNING)
    assert "programs of the model run on rung " in what
    monkeypatch.setattr(executor, "MACHINE", "riscv64")
    ((severity, what),) = found("math", "code_fraction")
    assert (severity, "cannot be confined" in what) == (Severity.PROBLEM, True)


def test_languages_are_listed() -> None:
    done = CliRunner().invoke(app, ["reward", "languages"])
    if done.exit_code:
        pytest.skip(str(done.exception))
    first, *languages = done.stdout.splitlines()
    assert first.startswith("rung ")
    assert [line.split()[0] for line in languages] == [
        *("python", "c", "cpp", "javascript", "bash", "java", "go", "rust", "sql")
    ]
