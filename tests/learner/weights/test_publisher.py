"""The publisher: cheap, keeps the last versions, leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from rollmesh.learner.weights import PublishRules, WeightPublisher, read_model_bundle
from rollmesh.learner.weights.published_version import PublishedVersion
from rollmesh.learner.weights.transports import SenderTransport
from rollmesh.learner.weights.version_storage import VersionWriter, sweep
from rollmesh.mesh.errors import DataError, WeightsError
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import check_manifest, digest_of
from rollmesh.protos import weights_pb2
from tests.repository import REPOSITORY


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that stands in for /dev/shm, so that tests see their own files only."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"layer.{i}.weight", torch.randn(17, 9, generator=generator)) for i in range(6)]


def test_the_file_holds_what_the_manifest_says(shared: Path) -> None:
    publisher = WeightPublisher("run", {}, PublishRules(bucket_bytes=1500), directory=shared)
    manifest = publisher.publish(PolicyVersion(1, 0), weights(), "bfloat16")
    check_manifest(manifest)
    assert len(manifest.buckets) == 2
    assert manifest.offers[0].host_id == host_id()
    content = Path(manifest.offers[0].address).read_bytes()
    version = publisher.version(PolicyVersion(1, 0))
    for start, bucket in zip(version.starts, manifest.buckets, strict=False):
        assert digest_of(content[start : start + bucket.nbytes]) == bucket.digest
    assert {entry.dtype for entry in manifest.tensors} == {"bfloat16"}
    publisher.close()
    assert not list(shared.iterdir())


def test_old_versions_go_and_running_transfers_do_not_mind(shared: Path) -> None:
    publisher = WeightPublisher("run", {}, PublishRules(keep_versions=2), directory=shared)
    publisher.publish(PolicyVersion(1, 0), weights(), torch.float32)
    reading = publisher.version(PolicyVersion(1, 0))
    for version in (1, 2):
        publisher.publish(PolicyVersion(1, version), weights(version), torch.float32)
    assert len(list(shared.iterdir())) == 2
    with pytest.raises(WeightsError, match=r"1:0 is not kept any more \(kept: 1:1, 1:2\)"):
        publisher.version(PolicyVersion(1, 0))
    assert digest_of(reading.bucket(0)) == reading.manifest.buckets[0].digest
    publisher.close()


def test_without_shared_memory_the_bytes_stay_private(shared: Path) -> None:
    publisher = WeightPublisher("run", {}, PublishRules(transport="grpc"), directory=shared)
    manifest = publisher.publish(PolicyVersion(1, 0), weights(), "float32")
    assert not manifest.offers
    assert not list(shared.iterdir())
    assert digest_of(publisher.bucket(PolicyVersion(1, 0), 0)) == manifest.buckets[0].digest
    publisher.close()


def test_shared_memory_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no file can be created"):
        WeightPublisher("run", {}, PublishRules(transport="shm"), directory=tmp_path / "missing")
    publisher = WeightPublisher("run", {}, PublishRules(transport="auto"), directory=tmp_path / "missing")
    assert not publisher.publish(PolicyVersion(1, 0), weights(), "float32").offers


def test_a_full_tmpfs_is_left_for_anonymous_memory(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, full = os.pwrite, []

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if "memfd" not in os.readlink(f"/proc/self/fd/{descriptor}") and offset > 1000:
            full.append(offset)
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    publisher = WeightPublisher("run", {}, directory=shared)
    manifest = publisher.publish(PolicyVersion(1, 0), weights(), "float32")
    assert full
    assert not manifest.offers
    assert digest_of(publisher.bucket(PolicyVersion(1, 0), 0)) == manifest.buckets[0].digest
    strict = VersionWriter(shared, fall_back=False)
    with pytest.raises(WeightsError, match="No space left"):
        strict.write(b"x", 2000)
    strict.abandon()


def test_ties_travel_once(shared: Path) -> None:
    table = torch.nn.Parameter(torch.randn(5, 3))
    publisher = WeightPublisher("run", {}, directory=shared)
    manifest = publisher.publish(PolicyVersion(1, 0), [("embed", table), ("head", table)], "float32")
    assert [entry.tied_to for entry in manifest.tensors] == ["", "embed"]
    check_manifest(manifest)
    # Temporary tensors may reuse an address: they are never taken for twins.
    manifest = publisher.publish(PolicyVersion(1, 1), ((f"t{i}", torch.full((5,), i)) for i in range(9)), "float32")
    assert not any(entry.tied_to for entry in manifest.tensors)
    assert len({entry.digest for entry in manifest.tensors}) == 9
    publisher.close()


def test_versions_go_up_and_have_tensors(shared: Path) -> None:
    publisher = WeightPublisher("run", {}, directory=shared)
    with pytest.raises(WeightsError, match="has no weights"):
        publisher.publish(PolicyVersion(1, 0), [], "float32")
    publisher.publish(PolicyVersion(1, 5), weights(), "float32")
    with pytest.raises(WeightsError, match="1:5 was published already"):
        publisher.publish(PolicyVersion(1, 5), weights(), "float32")
    publisher.publish(PolicyVersion(2, 0), weights(), "float32")
    publisher.close()


def test_publishing_a_tiny_model_is_cheap(shared: Path) -> None:
    tensors = [(f"model.layers.{i}.mlp.weight", torch.nn.Parameter(torch.randn(64, 64))) for i in range(43)]
    publisher = WeightPublisher("run", {}, directory=Path("/dev/shm"))
    times = []
    for version in range(30):
        begin = time.process_time()
        publisher.publish(PolicyVersion(1, version), tensors, "float32")
        times.append(time.process_time() - begin)
    publisher.close()
    assert min(times) < 0.02, "0.7 MB take under 2 ms of a processor"


_KILLED = """
import sys, time, torch
from pathlib import Path
from rollmesh.learner.weights import WeightPublisher
from rollmesh.mesh.trajectory.versions import PolicyVersion
publisher = WeightPublisher("run", {}, directory=Path(sys.argv[1]))
publisher.publish(PolicyVersion(1, 0), [("w", torch.zeros(100))], "float32")
sys.stdout.write("ready\\n"); sys.stdout.flush()
sys.stdin.read()
"""


def test_what_a_killed_publisher_left_is_swept(shared: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(shared)], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert sweep(shared) == [], "its publisher lives"
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert len(list(shared.iterdir())) == 1
    WeightPublisher("other", {}, directory=shared)
    assert not list(shared.iterdir())


class Interrupted(SenderTransport):
    name = "interrupted"

    def offer(self, version: PublishedVersion) -> weights_pb2.Offer | None:
        raise KeyboardInterrupt

    def retire(self, version: PublishedVersion) -> None:
        """Nothing is kept."""


def test_what_is_interrupted_before_its_announcement_leaves_nothing(shared: Path) -> None:
    publisher = WeightPublisher("run", {}, directory=shared, offers=[Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(PolicyVersion(1, 0), weights(), torch.float32)
    assert not list(shared.iterdir())
    assert publisher.newest is None
    publisher.close()


def test_a_pipe_under_a_name_of_ours_holds_up_no_one(shared: Path) -> None:
    os.mkfifo(shared / "rollmesh-weights-pipe")
    sweeping = threading.Thread(target=sweep, args=(shared,), daemon=True)
    sweeping.start()
    sweeping.join(30)
    assert not sweeping.is_alive()


def test_the_bundle_holds_small_files_only(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        read_model_bundle(tmp_path)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "modeling_x.py"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.json").write_text("{}")
    assert set(read_model_bundle(tmp_path)) == {"config.json", "tokenizer.json", "chat_template.jinja"}
