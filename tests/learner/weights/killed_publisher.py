"""A publisher that stands still during its second version, in its own process; arguments: how it offers, folder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rollmesh.learner.distributed import weight_export
from rollmesh.learner.engines.interface import ExportedTensor
from rollmesh.learner.engines.layout import Layout
from rollmesh.learner.weights import PublishRules, WeightPublisher
from rollmesh.learner.weights.transports import Disk, disk
from rollmesh.mesh.trajectory.versions import PolicyVersion


def in_memory(folder: Path) -> None:
    """It has written the version, which has no name yet."""
    tensors = {"w": torch.zeros(100)}
    engine: Any = SimpleNamespace(
        layout=Layout(),
        exported_tensors=lambda holders, part: [ExportedTensor("w", torch.float32, (100,))],
        exported_shards=lambda part: ((name, (), tensor) for name, tensor in tensors.items()),
    )
    export = weight_export.WeightExport(engine, None, 1000)
    publisher = WeightPublisher("run", {}, directory=folder)
    export.export(publisher, PolicyVersion(1, 0)).result(180)
    weight_export.digest_part = stand_still
    export.export(publisher, PolicyVersion(1, 1)).result(180)


def on_disk(folder: Path) -> None:
    """It has written half of the version."""
    rules = PublishRules(transport="disk", bucket_bytes=500)
    publisher = WeightPublisher("run", {}, rules, offers=[Disk(folder, "run")])
    publisher.publish(PolicyVersion(1, 0), [(f"w{i}", torch.zeros(100)) for i in range(4)], "float32")
    write, files = disk.serialize_file, []

    def stop_half_way(*arguments: Any, **settings: Any) -> None:
        write(*arguments, **settings)
        files.append(1)
        if len(files) == 2:
            stand_still()

    disk.serialize_file = stop_half_way
    publisher.publish(PolicyVersion(1, 1), [(f"w{i}", torch.ones(100)) for i in range(4)], "float32")


def stand_still(*_: Any) -> Any:
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"memory": in_memory, "disk": on_disk}[sys.argv[1]](Path(sys.argv[2]))
