"""Versions on disk: ordinary safetensors, whole or not there, removed in time."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rollmesh.learner.weights import PublishRules, WeightPublisher
from rollmesh.learner.weights.transports import Disk
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests import fork_server
from tests.learner.weights import killed_publisher


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {f"layer.{i}.weight": torch.randn(17, 9, generator=generator) for i in range(6)}
    return made | {"steps": torch.arange(5), "empty": torch.zeros(0, 3)}


def publisher(folder: Path, keep_versions: int = 2) -> WeightPublisher:
    return WeightPublisher(
        "run",
        {},
        PublishRules(transport="disk", bucket_bytes=1500, keep_versions=keep_versions),
        offers=[Disk(folder, "run")],
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_anybody_can_read_the_files(tmp_path: Path, dtype: str) -> None:
    source = publisher(tmp_path)
    manifest = source.publish(PolicyVersion(2, 7), weights().items(), dtype)
    (offer,) = manifest.offers
    assert (offer.transport, offer.address, offer.host_id) == ("disk", "run/2-7", "")
    folder = tmp_path / offer.address
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == len(manifest.buckets) > 1 or dtype != "float32"
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["rollmesh.digest"] == manifest.digest
    wanted = getattr(torch, dtype)
    for name, tensor in weights().items():
        expected = tensor.to(wanted) if tensor.is_floating_point() else tensor
        assert found[name].dtype == expected.dtype
        assert found[name].reshape(-1).view(torch.uint8).tolist() == expected.reshape(-1).view(torch.uint8).tolist()
    source.close()
    assert not list((tmp_path / "run").iterdir())


def test_old_versions_go(tmp_path: Path) -> None:
    source = publisher(tmp_path, keep_versions=2)
    for version in range(4):
        source.publish(PolicyVersion(1, version), weights(version).items(), "float32")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["1-2", "1-3"]
    source.close()


def test_what_a_killed_publisher_left_is_swept(tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with fork_server.popen(["disk", str(tmp_path)], module=killed_publisher.__name__, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert len(names) == 2, "a whole version, and one that is half written under another name"
    assert names[0].startswith(".unfinished-1-1-")
    assert names[1] == "1-0"
    for name in ("notes", "1-of-2", "1-checkpoint"):
        (tmp_path / "run" / name).mkdir()
    source = publisher(tmp_path)
    source.publish(PolicyVersion(2, 0), weights().items(), "float32")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["1-checkpoint", "1-of-2", "2-0", "notes"]
    source.close()


def test_a_full_disk_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = publisher(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not source.publish(PolicyVersion(1, 0), weights().items(), "float32").offers
    assert "No space left on device" in caplog.text
    assert not list((tmp_path / "run").iterdir())
    monkeypatch.undo()
    assert source.publish(PolicyVersion(1, 1), weights().items(), "float32").offers
    source.close()


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"weights\.dir .* cannot be written to"):
        Disk(tmp_path / "file", "run")
