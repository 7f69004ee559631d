"""One real run of the mesh, started as a user starts it, and the values that its metrics file holds.

Invariant: nothing is measured from inside. `rollmesh run` starts every service as its own process. Read afterwards are
`metrics.jsonl` and `summary.json` of the run folder, as any user could.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml

from benchmarks.common import REPOSITORY
from rollmesh.mesh.runtime.die_with_parent import die_with_parent


class RunFailedError(RuntimeError):
    """`rollmesh run` did not end in order; the message holds the end of its output."""


@dataclass(frozen=True, slots=True)
class MeshRun:
    """A finished run: one record per trained batch, and the summary."""

    folder: Path
    steps: list[dict[str, Any]]
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Window:
    """The batches of a run after its warm-up.

    Attributes:
        seconds: wall time from the end of the last warm-up batch to the end of the last batch.
        batches: batches that ended within it.
        mean_length: mean response length of those batches, in tokens.
        wait_s, train_s: seconds in which the learner waited for groups, and in which it trained.
    """

    seconds: float
    batches: int
    mean_length: float
    wait_s: float
    train_s: float


def run_mesh(config: dict[str, Any], overrides: Sequence[str] = (), *, timeout_s: float = 900.0) -> MeshRun:
    """Runs a configuration to its end.

    Raises:
        RunFailedError: exit code other than 0, or no end within `timeout_s`.
    """
    folder = Path(config["run"]["dir"]) / config["run"]["name"]
    folder.mkdir(parents=True)
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    log = folder.parent / f"{folder.name}.log"
    try:
        status = wait_for([sys.executable, "-m", "rollmesh.cli", "run", str(path), *overrides], log, timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RunFailedError(f"{folder.name}: no end within {timeout_s:.0f} s, see {log}") from error
    if status != 0:
        raise RunFailedError(f"{folder.name}: exit code {status}: {log.read_text(encoding='utf-8')[-2000:]}")
    return read_run(folder)


def wait_for(command: Sequence[str], log: Path, timeout_s: float) -> int:
    """The exit status of a command, which does not outlive this program, whatever ends it. In the main thread.

    Args:
        command: as for `subprocess`. Its end takes at most a minute after SIGTERM.
        log: file for its output.
        timeout_s: deadline.

    Raises:
        subprocess.TimeoutExpired: it has not ended by itself.
    """
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        with log.open("w", encoding="utf-8") as output:
            # Where this program is killed, the kernel asks the command to end.
            process = subprocess.Popen(
                die_with_parent(command, signal.SIGTERM), cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                return process.wait(timeout_s)
            finally:
                _end(process)
    finally:
        signal.signal(signal.SIGTERM, before)


def read_run(folder: Path) -> MeshRun:
    """Reads what a finished run left in its folder."""
    with (folder / "metrics.jsonl").open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    steps = [record for record in records if "timing_s/step" in record]
    return MeshRun(folder, steps, json.loads((folder / "summary.json").read_text(encoding="utf-8")))


def window(run: MeshRun, warmup: int) -> Window:
    """The part of a run after the first `warmup` batches.

    Raises:
        ValueError: fewer than two batches are left.
    """
    rest = run.steps[warmup:]
    if warmup < 1 or len(rest) < 2:
        raise ValueError(f"{len(run.steps)} batches are too few for a warm-up of {warmup}")
    lengths = [step["response_length/mean"] for step in rest]
    return Window(
        seconds=rest[-1]["wall_s"] - run.steps[warmup - 1]["wall_s"],
        batches=len(rest),
        mean_length=sum(lengths) / len(lengths),
        wait_s=sum(step["timing_s/gen"] for step in rest),
        train_s=sum(step["timing_s/update_actor"] for step in rest),
    )


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    """Ends this program as an exception, so that what it has started ends too."""
    raise SystemExit(128 + number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks a launcher that still runs to drain, and then insists."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
