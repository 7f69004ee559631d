"""The consumption log."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.learner.recovery.consumption_log import ConsumptionLog, StepUse, UsedGroup, read_log, surviving_uses
from rollmesh.mesh.errors import DataError


def use(incarnation: int, version: int, resumed_at: int, group: str) -> StepUse:
    return StepUse(incarnation, version, resumed_at, 8, [UsedGroup(group, [0, 1], 7, 1)])


def test_lines_survive_and_a_torn_one_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "run" / "consumption.jsonl"
    log = ConsumptionLog(path)
    log.append(use(1, 0, 0, "a"))
    log.close()
    with path.open("ab") as file:
        file.write(b'{"incarnation":1,"train')
    assert list(read_log(path)) == [use(1, 0, 0, "a")]
    again = ConsumptionLog(path)
    again.append(use(1, 1, 0, "b"))
    again.close()
    assert list(read_log(path)) == [use(1, 0, 0, "a"), use(1, 1, 0, "b")]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "consumption.jsonl"
    path.write_text('{"incarnation": 1}\n')
    with pytest.raises(DataError, match="line 1 is damaged"):
        list(read_log(path))


def test_only_what_is_in_the_newest_weights_survives() -> None:
    uses = [use(1, 0, 0, "a"), use(1, 1, 0, "b"), use(1, 2, 0, "c"), use(2, 1, 1, "b"), use(2, 2, 1, "d")]
    assert [u.groups[0].group_id for u in surviving_uses(uses)] == ["a", "b", "d"]
    assert [u.groups[0].group_id for u in surviving_uses([*uses, use(3, 2, 2, "e")])] == ["a", "b", "e"]
    # An incarnation that has not used anything yet has no line, but a resume point.
    assert [u.groups[0].group_id for u in surviving_uses(uses, {3: 1})] == ["a"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_the_log_s_one_error(tmp_path: Path) -> None:
    path = tmp_path / "consumption.jsonl"
    path.symlink_to("/dev/full")
    with pytest.MonkeyPatch.context() as patch:
        # The device has no end to read up to.
        patch.setattr(Path, "read_bytes", lambda _: b"")
        log = ConsumptionLog(path)
    with pytest.raises(DataError, match="free space"):
        log.append(use(1, 0, 0, "a"))
    log.close()
