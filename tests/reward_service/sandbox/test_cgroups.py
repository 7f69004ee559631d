"""Cgroups: which folder is divided and how much a sandbox gets, and sandboxes in real ones where some can be made."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.reward_service.sandbox.cgroups import decisions
from rollmesh.reward_service.sandbox.cgroups.cgroup import Cgroup
from rollmesh.reward_service.sandbox.cgroups.delegated import Delegated, MissingError
from rollmesh.reward_service.sandbox.interface import Job, Limits
from tests.repository import REPOSITORY
from tests.reward_service.sandbox.conftest import opened

MOUNT = "29 25 0:26 {root} {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw"
OTHERS = "25 1 8:1 / / rw - ext4 /dev/sda rw\n30 25 0:27 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
UNIT = Path("/sys/fs/cgroup/system.slice/rewards.service")


@pytest.mark.parametrize(
    ("membership", "root", "point", "expected"),
    [
        ("0::/system.slice/rewards.service\n", "/", "/sys/fs/cgroup", str(UNIT)),
        ("4:memory:/x\n0::/\n", "/", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/unified"),
        ("0::/docker/1/inner\n", "/docker/1", "/sys/fs/cgroup", "/sys/fs/cgroup/inner"),
        ("0::/docker/2\n", "/docker/1", "/sys/fs/cgroup", None),
        ("0::/../2\n", "/", "/sys/fs/cgroup", None),
        ("4:memory:/x\n", "/", "/sys/fs/cgroup", None),
    ],
)
def test_the_folder_of_this_process(membership: str, root: str, point: str, expected: str | None) -> None:
    found = decisions.own_folder(membership, OTHERS + MOUNT.format(root=root, point=point))
    assert found == (None if expected is None else (Path(expected), Path(point)))
    assert decisions.own_folder(membership, OTHERS) is None


@pytest.mark.parametrize(
    ("own", "marked", "expected"),
    [
        (UNIT, UNIT, UNIT),
        (UNIT / "rollmesh", UNIT, UNIT),
        (UNIT / "rollmesh", None, UNIT),
        (UNIT / "main", UNIT, UNIT),  # DelegateSubgroup=main
        (UNIT / "main", UNIT / "main", UNIT / "main"),
        (UNIT, None, UNIT),
        (Path("/sys/fs/cgroup"), None, Path("/sys/fs/cgroup")),
    ],
)
def test_the_folder_that_is_divided(own: Path, marked: Path | None, expected: Path) -> None:
    assert decisions.divisible(own, Path("/sys/fs/cgroup"), marked=lambda folder: folder == marked) == expected


@pytest.mark.parametrize(
    ("folder", "marked", "owner", "account", "expected"),
    [
        (UNIT, False, 0, 0, False),  # root may write to each folder, which leaves it none
        (UNIT, True, 0, 0, True),
        (UNIT, False, 1000, 1000, True),
        (UNIT, False, 0, 1000, False),
        (Path("/sys/fs/cgroup/user.slice/user@1000.service/app.slice/terminal.scope"), False, 1000, 1000, False),
        (Path("/sys/fs/cgroup"), False, 0, 0, True),
    ],
)
def test_whether_a_folder_was_left_to_this_account(
    folder: Path, marked: bool, owner: int, account: int, expected: bool
) -> None:
    highest = Path("/sys/fs/cgroup")
    assert decisions.is_delegated(folder, highest, marked=marked, owner=owner, account=account) == expected


def test_bounds_are_of_all_processes_together() -> None:
    limits = Limits(memory=1 << 30, disk=64 << 20, output=1 << 20, processes=16, threads=8)
    found = decisions.bounds(limits, 1 << 20, frozenset({"memory", "pids"}))
    assert found == {
        "memory.max": (1 << 30) + (64 << 20) + (8 << 20) + (128 << 20),
        "memory.swap.max": 0,
        "pids.max": 32,
    }
    assert decisions.bounds(limits, 0, frozenset({"pids"})) == {"pids.max": 32}


def _folder(path: Path, **contents: str) -> Path:
    path.mkdir()
    for name, content in contents.items():
        (path / name.replace("_", ".", 1)).write_text(content)
    return path


def test_values_are_written_when_they_change(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "group", memory_events="low 0\noom 1\noom_kill 0\n")
    group = Cgroup(folder, frozenset({"memory"}))
    group.bound(Limits(), 0)
    assert (folder / "memory.max").read_text() == str((512 << 20) + (64 << 20) + (4 << 20) + (128 << 20))
    assert not (folder / "memory.swap.max").exists()  # as where swap is not counted
    (folder / "memory.max").write_text("untouched")
    group.bound(Limits(), 0)
    assert (folder / "memory.max").read_text() == "untouched"
    assert not group.has_killed()
    (folder / "memory.events").write_text("low 0\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert [group.has_killed(), group.has_killed()] == [True, False]
    assert not Cgroup(folder, frozenset({"pids"})).has_killed()


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "none", cgroup_controllers="cpu io\n", cgroup_subtree_control="\n")
    with pytest.raises(MissingError, match="has no controller memory or pids"):
        Delegated.at(folder)
    folder = _folder(tmp_path / "old", cgroup_controllers="pids\n", cgroup_subtree_control="pids\n")
    with pytest.raises(OSError, match=r"needs Linux 5\.14"):
        Delegated.at(folder)
    assert Delegated(folder, frozenset({"pids"})).describe() == (
        "a cgroup bounds processes, but not memory (no controller memory)"
    )


class _Killing(Cgroup):
    """Says after each run that the kernel has killed a process over memory."""

    def has_killed(self) -> bool:
        return True


async def test_a_kill_over_memory_is_the_programs_end(tmp_path: Path) -> None:
    job = Job(
        "python", {"main.py": b"import time; input() and time.sleep(600)"}, ["main.py"], limits=Limits(wall_s=120.0)
    )
    sandbox = await opened(2, size=1)
    (zygote,) = sandbox._idle
    zygote._group = _Killing(tmp_path / "group", frozenset())
    ends = []
    assert await zygote.run_all(job, [b"\n"], lambda ran: bool(ends.append(ran))) is None
    assert [(each.end, each.code) for each in ends] == [("memory", 0)]
    running = asyncio.create_task(zygote.run_all(job, [b"x\n"], lambda ran: bool(ends.append(ran))))
    await asyncio.sleep(0)
    zygote._process.kill()
    lost = await running
    await sandbox.close()
    assert lost is not None
    assert (lost.end, lost.code) == ("memory", 9)


_SERVICE = """
import asyncio, json, os, sys
from pathlib import Path
from rollmesh.reward_service.sandbox.cgroups.delegated import Delegated, MissingError
from rollmesh.reward_service.sandbox.executor import Sandbox
from rollmesh.reward_service.sandbox.interface import Job, Limits
from rollmesh.reward_service.sandbox.zygote_process import Runtime
folder = Path(sys.argv[1])
(folder / "cgroup.procs").write_text("0")
missing = ""
try:
    delegated = Delegated.find()
except MissingError as error:
    missing, delegated = str(error), Delegated(folder, frozenset())
again = missing or Delegated.find() == delegated
def job(source, **limits):
    given = {"cpu_s": 60.0, "wall_s": 120.0, **limits}
    return Job("python", {"main.py": source.encode()}, ["main.py"], limits=Limits(**given))
async def main():
    sandbox = await Sandbox.open(size=1, runtime=Runtime(delegated=delegated))
    (group,) = folder.glob("rollmesh-sandbox-*")
    ran = await sandbox.run(job(THREADS, threads=2, memory=256 << 20))
    seen = {
        "folder": str(delegated.folder), "missing": missing, "again": again,
        "controllers": sorted(delegated.controllers), "outside": (folder / "cgroup.procs").read_text().split(),
        "inside": len((group / "cgroup.procs").read_text().split()), "told": sandbox.describe(),
        "stdout": ran.stdout.decode(), "pids": (group / "pids.max").read_text() if delegated.controllers else "",
    }
    await sandbox.close()
    print(json.dumps({**seen, "left": [str(each) for each in folder.glob("rollmesh-sandbox-*")]}))
THREADS = '''
import threading
stop, started = threading.Event(), 0
try:
    while started < 300:
        threading.Thread(target=stop.wait, daemon=True).start()
        started += 1
except RuntimeError:
    pass
stop.set()
print(started)
'''
asyncio.run(main())
"""


@pytest.fixture
def delegated_folder() -> Iterator[Path]:
    """A real folder of cgroup v2 with the mark of systemd."""
    found = decisions.own_folder(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    if found is None:
        pytest.skip("cgroup v2 is not mounted")
    folder = found[0] / f"rollmesh-test-{os.getpid()}"
    try:
        folder.mkdir()
        os.setxattr(folder, "user.delegate", b"1")
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup can be made and marked: {error}")
    yield folder
    for group in (*folder.iterdir(), folder):
        if group.is_dir():
            Cgroup(group, frozenset()).end()


def test_sandboxes_have_cgroups_of_their_own(delegated_folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _SERVICE, str(delegated_folder)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    if "UnavailableError" in ended.stderr:
        pytest.skip(ended.stderr.splitlines()[-1])
    assert not ended.returncode, ended.stderr
    seen = json.loads(ended.stdout)
    assert (seen["folder"], seen["again"], seen["left"]) == (str(delegated_folder), seen["missing"] or True, [])
    assert seen["inside"] == 3  # the stub, the keeper, the zygote
    if not seen["controllers"]:
        assert seen["missing"] == f"{delegated_folder} has no controller memory or pids"
        return
    assert not seen["outside"]
    assert "a cgroup bounds " in seen["told"]
    if "pids" in seen["controllers"]:
        assert int(seen["stdout"]) < int(seen["pids"]) == 11
