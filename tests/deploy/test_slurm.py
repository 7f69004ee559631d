"""The Slurm script, with programs in the place of Slurm's: which steps it starts where, and what it starts again.

On a real Slurm: deploy/slurm/try_slurm.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollmesh.mesh.errors import PERMANENT
from tests.repository import REPOSITORY

SCRIPT = REPOSITORY / "deploy" / "slurm" / "rollmesh.sbatch"
DEADLINE_S = 240.0
# Each step says how it was called. The learner ends as the next line of a file says, all others when they are asked to.
SRUN = """#!/bin/bash
said="srun $*"
echo "${said//$'\\n'/ }" >> "$CALLS"
step=$(grep -oE "job-name=[a-z]+" <<< "$*" | cut -d = -f 2)
echo "$$" > "$STEPS/$step"
case "$*" in
  *"rollmesh learner"*)
    # Nothing ends before all serve.
    until [[ $(grep -c "^serves" "$CALLS") == 3 ]]; do sleep 0.05; done
    status=$(head -n 1 "$STATUSES"); sed -i 1d "$STATUSES"
    if [[ $status == waits ]]; then trap 'exit 0' TERM; echo ready >> "$CALLS"; while true; do sleep 0.05; done; fi
    exit "$status" ;;
esac
name=$(grep -oE 'rollmesh (buffer|reward|generator)' <<< "$*" | head -n 1)
trap 'echo "ends $name" >> "$CALLS"; exit 0' TERM
echo "serves" >> "$CALLS"
while true; do sleep 0.05; done
"""
# A step's number is its name here. The first look does not find the learner's yet.
SQUEUE = """#!/bin/bash
echo "squeue $*" >> "$CALLS"
for path in "$STEPS"/*; do
  name=$(basename "$path")
  [[ $name == learner && $(grep -c "^squeue" "$CALLS") == 1 ]] || echo "7.$name $name"
done
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> "$CALLS"
[[ $1 == --quiet && $2 == --signal=TERM ]] && kill -TERM "$(cat "$STEPS/${3#7.}")"
exit 1
"""
SCONTROL = '#!/bin/bash\nprintf "a1\\na2\\nb1\\nb2\\n"\n'
ROLLMESH = '#!/bin/bash\necho "rollmesh $*" >> "$CALLS"\nwhile (($#)); do [[ $1 != --out ]] || : > "$2"; shift; done\n'
SLEEP = '#!/bin/bash\n[[ $1 == 0.05 ]] || exit 0\nexec /bin/sleep "$1"\n'


@contextmanager
def job(folder: Path, statuses: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The script in a job of four nodes, and the file of its calls."""
    programs = folder / "bin"
    programs.mkdir()
    (folder / "steps").mkdir()
    for name, text in {
        "srun": SRUN,
        "squeue": SQUEUE,
        "scancel": SCANCEL,
        "scontrol": SCONTROL,
        "rollmesh": ROLLMESH,
        "sleep": SLEEP,
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "statuses").write_text(statuses)
    calls = folder / "calls"
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "STATUSES": str(folder / "statuses"),
        "STEPS": str(folder / "steps"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "a[1-2],b[1-2]",
        "SECRETS_DIR": str(folder / "secrets"),
        **variables,
    }
    command = ["bash", str(SCRIPT), "cfg.yaml", "--run.name=x y"]
    process = subprocess.Popen(command, env=environment, cwd=folder, text=True, start_new_session=True)
    try:
        yield process, calls
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_it_is_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_services_start_where_they_belong_and_a_learner_that_ends_is_started_again(tmp_path: Path) -> None:
    options = {"LEARNER_NODES": "2", "LEARNER_INTERFACE": "ib0", "GENERATOR_BIN": "/engine/bin"}
    with job(tmp_path, "13\n0\n", **options) as (process, calls):
        assert process.wait(DEADLINE_S) == 0
        said = calls.read_text()
    steps = [line for line in said.splitlines() if line.startswith("srun")]
    learners = [step for step in steps if "rollmesh learner" in step]
    assert len(learners) == 2
    assert "--nodelist=a1,a2 --nodes=2 --ntasks=2 --ntasks-per-node=1" in learners[0]
    assert "--learner.distributed.nodes=2 --learner.distributed.rendezvous=a1:29500" in learners[0]
    assert "--learner.distributed.interface=ib0" in learners[0]
    assert ["--takeover" in step for step in learners] == [False, True]
    (buffer,) = [step for step in steps if "rollmesh buffer" in step]
    assert "--nodelist=a1 " in buffer
    assert "cfg.yaml --run.name=x y" in buffer
    (generators,) = [step for step in steps if "rollmesh generator" in step]
    assert "--nodelist=b1,b2 --nodes=2 --ntasks-per-node=8 --gpus-per-task=1" in generators
    assert "PATH=$2 rollmesh generator" in generators
    assert "trap ended=1 TERM" in generators, "its shell outlives the drain"
    assert f"{tmp_path}/secrets /engine/bin:{tmp_path}/bin:" in generators
    assert [line for line in said.splitlines() if line.startswith("ends")] == [
        "ends rollmesh generator",
        "ends rollmesh reward",
        "ends rollmesh buffer",
    ]
    assert all("mesh.token" not in step for step in steps), "services have grants"
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700


def test_the_end_of_the_time_ends_the_learner_in_order(tmp_path: Path) -> None:
    with job(tmp_path, "waits\n") as (process, calls):
        until = time.monotonic() + DEADLINE_S
        while not calls.exists() or "ready" not in calls.read_text():
            assert time.monotonic() < until
            time.sleep(0.02)  # another program's file: there is nothing to wait on
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        said = calls.read_text()
        assert said.count("rollmesh learner") == 1
        assert "rendezvous" not in said
        # srun that is sent SIGTERM would kill its step.
        assert [line for line in said.splitlines() if line.startswith("scancel")] == [
            f"scancel --quiet --signal=TERM 7.{name}" for name in ("learner", "generators", "reward", "buffer")
        ]


@pytest.mark.parametrize("status", [2, 40])
def test_what_a_restart_does_not_mend_ends_the_job(tmp_path: Path, status: int) -> None:
    with job(tmp_path, f"{status}\n0\n") as (process, calls):
        assert process.wait(DEADLINE_S) == status
        assert calls.read_text().count("rollmesh learner") == 1


def test_no_nodes_for_generators_are_refused(tmp_path: Path) -> None:
    with job(tmp_path, "0\n", LEARNER_NODES="4") as (process, calls):
        assert process.wait(DEADLINE_S) == 2
        assert not calls.exists()


def test_it_knows_the_exit_codes_that_last() -> None:
    listed = re.findall(r"in ([\d |]+)\)", SCRIPT.read_text())
    assert len(listed) == 2
    assert all({int(code) for code in codes.split("|")} == PERMANENT for codes in listed)
