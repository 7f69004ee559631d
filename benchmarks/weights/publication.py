"""Publication: how long the thread that trains stands still for a version, and how soon it can be fetched, by ranks.

Method: a random Qwen3 of 191 M parameters (0.76 GB in float32) is sharded by the FSDP2 engine over gloo ranks on this
machine. It is published into shared memory again and again: every rank copies its shards, the rest happens in the
background. Each version is waited for; then a pause stands for a batch, in which the next one's memory is prepared. The
time of a version is that of the rank that takes longest. The first version finds no memory prepared, and is left out.
Memory is the kernel's peak of each rank's resident set above that before the first version. It counts the pages in
shared memory that a rank has written or digested, in the versions that are kept and in the next.
One process computes on one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import summarize, table, write_json
from benchmarks.rank_processes import run_ranks
from benchmarks.weights.export import _barrier, _resident_mib, make, measure_each

_RANKS = (1, 2)
_TIMEOUT_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--batch-s", type=float, default=3.0, help="pause between two versions")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    document = measure_each(
        __spec__.name, _RANKS, lambda folder, ranks: measure(folder, ranks, arguments.versions, arguments.batch_s)
    )
    if arguments.json:
        write_json(arguments.json, document)
    print(as_table(document))


def measure(folder: Path, ranks: int, versions: int, batch_s: float) -> dict[str, Any]:
    """All versions with one number of ranks."""
    command = [sys.executable, "-m", __spec__.name, "--rank-of", str(folder), str(versions), str(batch_s)]
    return {"ranks": ranks, "by_rank": run_ranks(command, ranks, timeout_s=_TIMEOUT_S)}


def as_table(document: dict[str, Any]) -> str:
    """Medians with their ranges."""
    rows = []
    for cell in document["cells"]:
        by_rank = cell["by_rank"]
        still = [max(times) for times in zip(*(rank["still_s"] for rank in by_rank), strict=True)]
        extra = ", ".join(f"{rank['extra_mib']:.0f}" for rank in by_rank)
        rows.append((cell["ranks"], summarize(still), summarize(by_rank[0]["fetchable_s"]), extra))
    header = ("ranks", "s in the training thread", "s until it can be fetched", "peak MiB by rank")
    return table(header, rows)


def run_rank(folder: Path, versions: int, batch_s: float, out: Path) -> None:
    """One rank: measures, and writes what it saw as JSON."""
    import torch

    from rollmesh.learner.distributed.rank_channel import RankChannel
    from rollmesh.learner.distributed.weight_export import WeightExport
    from rollmesh.learner.engines.interface import EngineSpec
    from rollmesh.learner.engines.registry import create_engine
    from rollmesh.learner.weights import PublishRules, WeightPublisher
    from rollmesh.mesh.config.inputs import ModelSection
    from rollmesh.mesh.config.learner import DistributedSection
    from rollmesh.mesh.trajectory.versions import PolicyVersion

    torch.set_num_threads(1)
    engine = create_engine(EngineSpec(ModelSection(path=str(folder), dtype="float32"), None, 1))
    rules = PublishRules(transport="shm")
    publisher = WeightPublisher("benchmark", {}, rules) if engine.layout.leads else None
    channel = RankChannel(DistributedSection()) if engine.layout.processes > 1 else None
    export = WeightExport(engine, channel, rules.bucket_bytes)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_mib("VmRSS")
    still, fetchable = [], []
    for version in range(versions + 1):
        _barrier()
        began = time.perf_counter()
        published = export.export(publisher, PolicyVersion(1, version))
        copied = time.perf_counter()
        published.result(_TIMEOUT_S)
        if version:
            still.append(copied - began)
            fetchable.append(time.perf_counter() - began)
        time.sleep(batch_s)
    extra = _resident_mib("VmHWM") - before
    export.close()
    if publisher is not None:
        publisher.close()
    engine.close()
    found = {"still_s": still, "fetchable_s": fetchable, "extra_mib": extra}
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--rank-of"]:
        run_rank(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
