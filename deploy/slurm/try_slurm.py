"""Runs `rollmesh.sbatch` on a real Slurm on this host: `python -m deploy.slurm.try_slurm --out FOLDER` (as root).

Each node is a slurmd in a network namespace, with a host name and an address of its own; controller and munge are real
too. GPUs are counted and not there. The demonstration trains; then a generator is killed, the job is asked to end, and
a second job continues the run. Needs Debian's slurm-wlm, munge and iproute2. Everything that was started is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from deploy.trials import Daemons, balance, inside, ip, wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "deploy" / "slurm" / "rollmesh.sbatch"
CONTROLLER, NODES = "rmctl", ("rma1", "rmb1", "rmb2")
NETWORK = "10.77.9"

CONFIGURATION = """
ClusterName=trial
SlurmctldHost={controller}({network}.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster of namespaces of this host."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons = Daemons(folder, self._environment)
        self._hosts = folder / "hosts"

    def start(self) -> None:
        """Makes the network, and starts munge, the controller and all nodes."""
        folder = self.folder
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True, exist_ok=True)
        nodes = "\n".join(
            f"NodeName={node} NodeAddr={NETWORK}.{10 + index} CPUs=8 RealMemory=8000 Gres=gpu:2 State=UNKNOWN"
            for index, node in enumerate(NODES)
        )
        text = CONFIGURATION.format(folder=folder, network=NETWORK, controller=CONTROLLER, nodes=nodes)
        (folder / "slurm.conf").write_text(text)
        for number in range(2):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"NodeName={','.join(NODES)} Name=gpu File={folder}/gpu[0-1]\n")
        self._network()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._daemons.start(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        wait_for("munge", (folder / "munge.socket").exists)
        self._daemons.start("slurmctld", *inside(CONTROLLER, self._hosts), "slurmctld", "-D")
        for node in NODES:
            self._daemons.start(f"slurmd-{node}", *inside(node, self._hosts), "slurmd", "-D")
        wait_for("all nodes", lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(len(NODES)))

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """The output of a command in the controller's namespace.

        Raises:
            subprocess.CalledProcessError: it has failed.
        """
        done = subprocess.run(
            [*inside(CONTROLLER, self._hosts), *command], env=self._environment, cwd=cwd,
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return done.stdout

    def state(self, job: str) -> str:
        """The state of a job."""
        found = dict(item.partition("=")[::2] for item in self.run("scontrol", "show", "job", job).split())
        return found["JobState"]

    def close(self) -> None:
        """Ends all that was started, jobs first."""
        self._daemons.close()

    def _network(self) -> None:
        """A namespace for each host, bridged in the controller's: the rules of this host's firewall hold elsewhere."""
        addresses = {CONTROLLER: f"{NETWORK}.1", **{node: f"{NETWORK}.{10 + i}" for i, node in enumerate(NODES)}}
        names = "".join(f"{address} {name}\n" for name, address in addresses.items())
        self._hosts.write_text(f"127.0.0.1 localhost\n{names}")
        for name, address in addresses.items():
            self._daemons.add_host(name)
            if name == CONTROLLER:
                ip("-n", name, "link", "add", "eth0", "type", "bridge")
            else:
                ip("-n", CONTROLLER, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("-n", CONTROLLER, "link", "set", name, "master", "eth0", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")


def steps(run: Path) -> int:
    """The last step in a run's records; 0 before the first."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((int(json.loads(line).get("step", 0)) for line in lines), default=0)


def generators() -> list[int]:
    """The processes of the generators, without those that watch them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "generator" in line and "--mesh" in line and f"{NODES[0]}:7400" in line and "bash" not in line[0]:
            found.append(process.pid)
    return found


@contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """A Slurm that is ended whatever happens."""
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.close()


def try_it(slurm: Slurm, out: Path, say: Callable[[str], None]) -> None:
    """The trial itself."""
    from examples.demo.prepare import prepare

    data, run = out / "data", out / "runs" / "slurm"
    prepare(data, task="arithmetic", seed=0, largest_digit=4, held_out=32, warm_steps=2)
    options = [
        f"--run.dir={out / 'runs'}", "--run.name=slurm", f"--model.path={data / 'model'}",
        f"--data.train={data / 'train.parquet'}", f"--data.eval={data / 'eval.parquet'}",
        "--learner.steps=100000", "--eval.every_steps=100000", "--eval.stop_at=null",
    ]  # fmt: skip
    command = [
        "sbatch", "--parsable", f"--nodes={len(NODES)}", "--gpus-per-node=2", f"--output={out / 'job-%j.log'}",
        "--export=ALL,GENERATORS_PER_NODE=1,GPUS_PER_GENERATOR=1", str(SCRIPT),
        str(REPOSITORY / "examples" / "demo" / "demo.yaml"), *options,
    ]  # fmt: skip

    def submit() -> str:
        job = slurm.run(*command, cwd=out).strip()
        say(f"$ sbatch --nodes={len(NODES)} deploy/slurm/rollmesh.sbatch demo.yaml ...: job {job}")
        return job

    def trained(until: int) -> None:
        wait_for(f"step {until}", lambda: steps(run) >= until)

    began = time.monotonic()
    job = submit()
    trained(1)
    say(f"first step after {time.monotonic() - began:.0f} s")
    say(slurm.run("squeue", "--steps", "-o", "%.8i %.12j %.6M %.10N").rstrip())
    trained(5)
    victim, *others = generators()
    assert len(others) == len(NODES) - 2, "one generator on each of the other nodes"
    os.kill(victim, signal.SIGKILL)
    say(f"kill -9 of a generator at step {steps(run)}")
    wait_for("its successor", lambda: len(set(generators()) - {victim}) == len(NODES) - 1)
    trained(steps(run) + 5)
    say(f"two generators again, step {steps(run)}")
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    wait_for("the end of the job", lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"))
    ended = json.loads((run / "learner.json").read_text())
    say(f"scancel --batch --signal=TERM: {slurm.state(job)}, {ended['stop_reason']} after version {ended['version']}")
    assert (slurm.state(job), ended["stop_reason"]) == ("COMPLETED", "SIGTERM")
    assert not generators()
    job = submit()
    trained(ended["version"] + 3)
    say(f"the second job continues: step {steps(run)}")
    ledger = ["rollmesh", "ledger", "--mesh", f"{NODES[0]}:7400", "--token-file"]
    say(balance(slurm.run(*ledger, str(out / f"rollmesh-secrets-{job}" / "mesh.token"))))
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    wait_for("the end of the job", lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"))
    assert slurm.state(job) == "COMPLETED"
    say(f"job {job}: {slurm.state(job)}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True)
    # `rollmesh` on the PATH of all nodes.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    os.environ["OMP_NUM_THREADS"] = "1"
    # All that was started is ended then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()

    def say(text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - began:6.0f} s  {text}\n")
        sys.stdout.flush()

    with cluster(out / "cluster") as slurm:
        say(f"{slurm.run('sinfo', '--version').strip()}: {slurm.run('sinfo', '-h', '-o', '%D nodes, %G').strip()}")
        try_it(slurm, out, say)


if __name__ == "__main__":
    main()
