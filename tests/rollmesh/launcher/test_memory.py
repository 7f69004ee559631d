"""Memory of services: by process tree, over time in a bounded file, and by phase of turns."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.launcher.memory import MemoryWatch, WatchRules, families
from rollmesh.launcher.memory_log import MemoryLog
from rollmesh.launcher.placement.nvidia_smi import device_names, read_processes
from rollmesh.learner.placement.turn_log import TurnLog
from rollmesh.report.memory import MemorySample, MemoryUse, read_memory


def test_a_service_is_its_process_and_all_that_it_has_started(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE);"
        "print(child.pid, flush=True); input(); child.communicate()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert dict(families({"one": parent.pid})) == {"one": [parent.pid, child]}
        watch = MemoryWatch(lambda: {"one": parent.pid, "gone": 2**22 + 1}, WatchRules(tmp_path))
        use = asyncio.run(watch.sample(lambda: {parent.pid: 5, child: 7, 1: 100})).uses["one"]
        assert use.device == 12
        assert watch.peaks["one"] >= use.anon > 1 << 20
        assert watch.peaks["gone"] == 0
        parent.communicate("\n", timeout=120)


def test_a_sample_counts_for_the_phase_in_which_it_was_taken(tmp_path: Path) -> None:
    turns = TurnLog(tmp_path)
    turns.write(turn=1, phase="training")
    watch = MemoryWatch(lambda: {"me": os.getpid()}, WatchRules(tmp_path, in_turns=True))
    asyncio.run(watch.sample())
    assert watch.by_phase.to_mib() == {}, "what an earlier launch has written is over"
    for phase in ("offloading", "generating", "training"):
        turns.write(turn=1, phase=phase)
        asyncio.run(watch.sample())
    peaks = watch.by_phase.to_mib()
    assert list(peaks) == ["generating", "training", "offloading"], "in the order of a turn"
    assert peaks["training"]["me"]["anon"] > 1

    def in_between() -> dict[str, int]:
        turns.write(turn=1, phase="waking")
        return {"me": os.getpid()}

    def slow_driver() -> dict[int, int]:
        turns.write(turn=2, phase="loading")
        return {os.getpid(): 1 << 20}

    changing = MemoryWatch(in_between, WatchRules(tmp_path, in_turns=True))
    for one, devices in ((changing, None), (watch, slow_driver)):
        before = one.by_phase.to_mib()
        asyncio.run(one.sample(devices))
        assert one.by_phase.to_mib() == before, "no one knows to which of the phases it belongs"


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=120), st.integers(2, 9))
def test_the_file_is_bounded_spans_the_run_and_keeps_the_highest(values: list[int], most: int) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as name:
        folder = Path(name)
        log = MemoryLog(folder, most)
        for second, value in enumerate(values):
            log.add(MemorySample(float(second), {"a": MemoryUse(value, 2 * value)}))
        found = read_memory(folder)
        assert len(found) <= most
        told = values[: int(found[-1].unix_s) + 1] if found else []
        assert max(told, default=0) == max((sample.uses["a"].anon for sample in found), default=0)
        assert all(sample.uses["a"].shared == 2 * sample.uses["a"].anon for sample in found)
        # A later launch continues it.
        MemoryLog(folder, most).add(MemorySample(1e6, {"a": MemoryUse(1)}))
        assert len(read_memory(folder)) <= most


def test_lines_are_what_other_tools_read(tmp_path: Path) -> None:
    MemoryLog(tmp_path).add(MemorySample(5.0, {"learner": MemoryUse(1, 2, 3)}))
    (line,) = (tmp_path / "memory.jsonl").read_text().splitlines()
    expected = {"unix_s": 5.0, "service": "learner", "anon_bytes": 1, "shared_bytes": 2, "device_bytes": 3}
    assert json.loads(line) == expected


def test_a_driver_that_fails_names_no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    for status, named in ((0, ["GPU 0: H200"]), (9, [])):
        driver.write_text(f"#!/bin/sh\necho GPU 0: H200\nexit {status}\n")
        driver.chmod(0o755)
        assert device_names() == named


def test_the_drivers_table_is_summed_over_devices() -> None:
    assert read_processes("12, 100\n12, 50\n13, 7\n99, [N/A]\nNo running processes\n") == {12: 150 << 20, 13: 7 << 20}
