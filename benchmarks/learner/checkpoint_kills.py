"""Learners that are killed while they write a checkpoint, each continued by the next; `checkpoints --kills` runs it.

A learner loads what it finds as at any start, trains a step, begins a checkpoint, and trains on. It is killed (SIGKILL)
at a random moment of the write. Before that, each learner writes a digest of the weights that it has copied. The next
learner compares the weights that it loads with that digest.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from benchmarks.common import REPOSITORY
from rollmesh.learner.checkpoint.names import checkpoint_name
from rollmesh.learner.checkpoint.retention import prune, sweep
from rollmesh.learner.checkpoint.store import CheckpointStore, load_checkpoint
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.engines.registry import create_engine
from rollmesh.mesh.runtime.memory_tuning import TENSOR_BYTES, keep_freed_memory
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.testing.engine_cases import make_sequences, make_spec, train

_SEED = 1


@dataclass(frozen=True, slots=True)
class Kill:
    """A learner that was killed, and what its successor found.

    Attributes:
        after_s: from the beginning of the checkpoint on.
        bytes_written: of its unfinished files; None: they had their name.
        new: the successor continued from that checkpoint, not from the one before.
        whole: all bytes were those that were written, the weights those of the step, and nothing unfinished was left.
    """

    after_s: float
    bytes_written: int | None
    new: bool
    whole: bool


def kill_learners(scratch: Path, kills: int) -> tuple[float, list[Kill]]:
    """Kills learners of a model in `scratch`; gives the seconds of an undisturbed write, and what became of each."""
    draw = random.Random(_SEED)
    with _Learner(scratch, 1) as first:
        first.read()
        began, version = time.perf_counter(), first.read()["began"]
        first.read()
        write_s = time.perf_counter() - began
    found: list[Kill] = []
    for number in range(kills + 1):
        with _Learner(scratch, number + 2) as learner:
            said = learner.read()
            if number:
                new = said["version"] == version
                found[-1] = Kill(found[-1].after_s, found[-1].bytes_written, new, said["whole"])
            if number < kills:
                version, began = learner.read()["began"], time.perf_counter()
                after_s = draw.uniform(0.0, write_s)
                time.sleep(after_s)
                learner.kill()
                found.append(Kill(time.perf_counter() - began, _unfinished_bytes(scratch), False, False))
    return write_s, found


class _Learner:
    """A learner in a process of its own, killed at the end."""

    def __init__(self, scratch: Path, incarnation: int) -> None:
        command = [sys.executable, "-m", "benchmarks.learner.checkpoint_kills", str(scratch), str(incarnation)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY
        )

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a learner has ended with {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> _Learner:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def _unfinished_bytes(scratch: Path) -> int | None:
    folders = list(_root(scratch).glob(".partial-*"))
    return sum(path.stat().st_size for folder in folders for path in folder.iterdir()) if folders else None


def _root(scratch: Path) -> Path:
    return scratch / "killed"


def _say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def _digest(engine: Engine) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in engine.export_weights(torch.float32):
        digest.update(name.encode())
        digest.update(memoryview(tensor.contiguous().numpy()).cast("B"))
    return digest.hexdigest()


def _live(scratch: Path, incarnation: int) -> None:
    """Continues, and writes one checkpoint; then waits to be killed."""
    keep_freed_memory(TENSOR_BYTES)
    engine = create_engine(make_spec(scratch / "model", total_steps=10_000))
    root, store = _root(scratch), CheckpointStore(_root(scratch))
    sweep(root, incarnation)
    version, whole = 0, not list(root.glob(".*-i*"))
    if complete := store.list():
        policy, folder = complete[-1]
        version = int(str(load_checkpoint({"actor": engine}, folder)["version"]))
        whole = whole and version == policy.version and _digest(engine) == (scratch / folder.name).read_text()
    _say(version=version, whole=whole)
    step = PolicyVersion(incarnation, version + 1)
    train(engine, make_sequences(step.version, groups=1))
    (scratch / checkpoint_name(step)).write_text(_digest(engine))
    _say(began=step.version)
    written = store.begin({"actor": engine}, step, {})
    seed = step.version
    while not written.done():
        seed += 1
        train(engine, make_sequences(seed, groups=1))
    prune(root, committed=written.result().name, keep=1)
    _say(written=step.version)
    sys.stdin.read()


if __name__ == "__main__":
    _live(Path(sys.argv[1]), int(sys.argv[2]))
