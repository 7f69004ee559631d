"""Room for a run: memory of devices and host, `/dev/shm`, and the disk of the run's folder.

The needs are those that `rollmesh plan` computes. They are compared with the bytes that are free now.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmesh.doctor.findings import Finding, not_checked, ok, problem, warning
from rollmesh.launcher.placement import nvidia_smi
from rollmesh.launcher.placement.visible import has_driver
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.runtime.host_memory import free_host_bytes
from rollmesh.planning.cluster import Cluster, Host, size_text

MEMORY, SHM, DISK = "memory", "shared memory", "disk"
# Being written, best, and one that is evaluated.
_CHECKPOINTS_MORE = 3
# Share of a disk below which other programs begin to fail.
_LEAST_FREE = 0.05
_TMPFS = Path("/dev/shm")  # noqa: S108 # only measured


@dataclass(frozen=True, slots=True)
class Need:
    """A place, and the bytes that a run takes there.

    Attributes:
        name: of the place.
        needed: at the peak, the reserve included; 0: not known.
        free: now.
        required: the run cannot do without.
    """

    name: str
    needed: int
    free: int
    required: bool = True


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of a run's folder.

    Attributes:
        folder: of the run, or the first above it that exists.
        free, size: bytes.
        checkpoint: bytes of one; 0: not known.
        kept: checkpoints that lie there at one time, at most.
        rest: bytes of Redis' file and of recordings, at most.
        present: bytes of checkpoints that are there already.
    """

    folder: str
    free: int
    size: int
    checkpoint: int
    kept: int
    rest: int
    present: int = 0


def check_space(config: Config) -> Iterator[Finding]:
    """Memory, shared memory and disk."""
    try:
        needs, checkpoint = planned(config)
    except RollmeshError as error:
        yield not_checked(MEMORY, f"the run cannot be planned: {error.message}")
        needs, checkpoint = [], 0
    yield from judge_memory(needs, config.weights.transport)
    yield from judge_disk(read_disk(config, checkpoint), config.checkpoint.keep)


def planned(config: Config) -> tuple[list[Need], int]:
    """The needs of the run on this machine, and the bytes of one checkpoint.

    Raises:
        RollmeshError: it cannot be planned, for instance with an engine of another package.
    """
    # They load torch and transformers.
    from rollmesh.learner.builders import build_algorithm
    from rollmesh.planning.memory_uses import SHM as SHM_USE
    from rollmesh.planning.models import RunModels
    from rollmesh.planning.plan import make_plan

    plan = make_plan(config, cluster_here(), build_algorithm(config).needs.roles, RunModels(config))
    checkpoint = config.learner.ranks * sum(role.setup.staged for role in plan.roles if role.setup.trained)
    needs = [
        Need(SHM if use.name == SHM_USE else use.name, use.needed, use.memory, use.required)
        for use in (*plan.devices, *plan.hosts)
    ]
    return needs, checkpoint


def cluster_here() -> Cluster:
    """This machine, with what is free of its memory; devices count with all of theirs."""
    free = free_host_bytes()
    host = Host(free, shutil.disk_usage(_TMPFS).free if _TMPFS.is_dir() else 0, "free on this machine")
    sizes = nvidia_smi.device_sizes() if has_driver() else []
    if not sizes:
        return Cluster("CPU", 1, 1, free, host)
    return Cluster(f"CUDA-{min(sizes) >> 30}G", len(sizes), 1, min(sizes), host)


def judge_memory(needs: list[Need], transport: str) -> Iterator[Finding]:
    """Compares what is needed with what is free.

    Args:
        needs: of devices, host and `/dev/shm`.
        transport: `weights.transport`.
    """
    for need in needs:
        numbers = {"needed_bytes": need.needed, "free_bytes": need.free}
        text = f"{size_text(need.needed)} are needed, {size_text(need.free)} are free"
        if need.needed <= need.free:
            yield ok(SHM if need.name == SHM else MEMORY, f"{need.name}: {text}", **numbers)
        elif need.name == SHM:
            severity, otherwise = (problem, "weights.transport=grpc") if need.required else (warning, "")
            yield severity(
                SHM,
                f"{_TMPFS}: published versions take {size_text(need.needed)}, {size_text(need.free)} are free"
                + ("" if need.required else "; weights will travel over gRPC, which is slower"),
                f"enlarge it to {_gib(need.needed)}G (`docker run --shm-size={_gib(need.needed)}g`, `mount -o "
                f"remount,size={_gib(need.needed)}G /dev/shm`), or set weights.keep_versions=1"
                + (f", or {otherwise}" if otherwise else ""),
                transport=transport,
                **numbers,
            )
        else:
            yield problem(
                MEMORY,
                f"{need.name}: {text}",
                "end what else takes memory, or lower rollout.replicas, rollout.slots or "
                "learner.batch.tokens_per_micro_batch; `rollmesh plan` says what each key saves",
                **numbers,
            )


def read_disk(config: Config, checkpoint: int) -> Disk:
    """The disk of the run's folder, which may not exist yet.

    Args:
        config: of the run.
        checkpoint: bytes of one; 0: not known.
    """
    folder = config.run.folder.absolute()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(place)
    # Redis writes a new file next to the old one.
    redis = 2 * config.buffer.max_bytes if config.buffer.redis is None and config.buffer.durability != "none" else 0
    recording = config.logging.record_max_bytes if config.logging.record else 0
    present = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*") if path.is_file())
    kept = config.checkpoint.keep + _CHECKPOINTS_MORE
    return Disk(str(place), usage.free, usage.total, checkpoint, kept, redis + recording, present)


def judge_disk(disk: Disk, keep: int) -> Iterator[Finding]:
    """Compares the checkpoints that are kept, and what Redis may write, with the free bytes.

    Args:
        disk: of the run.
        keep: `checkpoint.keep`.
    """
    checkpoints = max(0, disk.kept * disk.checkpoint - disk.present)
    numbers = {"free_bytes": disk.free, "checkpoint_bytes": disk.checkpoint, "rest_bytes": disk.rest}
    text = (
        f"{disk.folder}: {size_text(disk.free)} are free; up to {disk.kept} checkpoints of "
        f"{size_text(disk.checkpoint)}, and {size_text(disk.rest)} of Redis and recordings"
    )
    remedy = (
        f"set run.dir to a larger disk, or checkpoint.keep=1 (now {keep}); buffer.max_bytes and "
        "logging.record_max_bytes bound the rest"
    )
    if disk.free < disk.checkpoint or disk.free < checkpoints:
        yield problem(DISK, f"{text}: they do not fit", remedy, **numbers)
    elif disk.free < checkpoints + disk.rest:
        yield warning(DISK, f"{text}: both together may not fit", remedy, **numbers)
    elif disk.free < _LEAST_FREE * disk.size:
        yield warning(DISK, f"{text}: the disk is almost full", remedy, **numbers)
    else:
        yield ok(DISK, text, **numbers)


def _gib(nbytes: int) -> int:
    return max(1, -(-nbytes >> 30))
