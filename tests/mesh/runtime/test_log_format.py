"""Log lines: their two forms, their fields, and how a process hands its settings on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from rollmesh.launcher.logs import explain_exit, readable
from rollmesh.mesh.runtime.log_format import LogForm, LogSettings, present_settings, setup_logging
from rollmesh.mesh.telemetry.trace_ids import trajectory_trace

log = logging.getLogger("tests.here")


@pytest.fixture(autouse=True)
def _same_log_afterwards() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def _line(capsys: pytest.CaptureFixture[str], form: LogForm, **extra: object) -> str:
    setup_logging("generator", LogSettings("info", form, "demo"))
    log.warning("member %d has no reward", 3, extra=extra)
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("form", ["json", "auto"])
def test_a_member_is_found_again_in_the_traces(capsys: pytest.CaptureFixture[str], form: LogForm) -> None:
    entry = json.loads(_line(capsys, form, group="g-1-7", member=3))
    assert entry.pop("time") > 0
    assert entry == {
        "level": "warning",
        "service": "generator",
        "run": "demo",
        "message": "member 3 has no reward",
        "group": "g-1-7",
        "member": 3,
        "trace_id": f"{trajectory_trace('demo', 'g-1-7', 3):032x}",
    }


def test_a_group_alone_has_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert "trace_id" not in json.loads(_line(capsys, "json", group="g-1-7"))


def test_text_is_for_people_and_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    line = _line(capsys, "text", group="g-1-7")
    assert line.endswith(" W generator: member 3 has no reward group=g-1-7")
    assert readable(line) == "warning: member 3 has no reward group=g-1-7"
    log.error("the port is taken")
    assert explain_exit(3, capsys.readouterr().err.splitlines()) == ("the port is taken", True)


def test_a_process_knows_its_settings() -> None:
    settings = LogSettings("debug", "text", "demo")
    setup_logging("reward", settings)
    assert present_settings() == settings
