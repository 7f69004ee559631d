"""The publisher: cheap, keeps the last versions, leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from rollmesh.learner.distributed.weight_export import WeightExport
from rollmesh.learner.engines.interface import ExportedTensor
from rollmesh.learner.engines.layout import Layout
from rollmesh.learner.weights import PublishRules, WeightPublisher, read_model_bundle
from rollmesh.learner.weights.published_version import PublishedVersion
from rollmesh.learner.weights.transports import SenderTransport
from rollmesh.learner.weights.version_layout import VersionLayout
from rollmesh.learner.weights.version_part import copy_part, digest_part
from rollmesh.learner.weights.version_storage import VersionFile, open_version, touch_pages
from rollmesh.mesh.config.weights import EncodingName, TransportName
from rollmesh.mesh.errors import DataError, WeightsError
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import check_manifest, digest_of
from rollmesh.mesh.weights.shared_files import sweep
from rollmesh.mesh.weights.tensors import named_tensors
from rollmesh.protos import weights_pb2
from tests import fork_server
from tests.learner.weights import killed_publisher


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
    real = os.posix_fallocate

    def full(descriptor: int, offset: int, length: int) -> None:
        if "memfd" not in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        real(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    publisher = WeightPublisher("run", {}, directory=shared)
    manifest = publisher.publish(PolicyVersion(1, 0), weights(), "float32")
    assert not manifest.offers
    assert digest_of(publisher.bucket(PolicyVersion(1, 0), 0)) == manifest.buckets[0].digest
    with pytest.raises(WeightsError, match=r"No space left on device.*lower weights\.keep_versions"):
        VersionFile(shared, 1000, fall_back=False)


def test_a_tmpfs_that_takes_no_more_files_is_left_as_well(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def full(path: Path, flags: int, *rest: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *rest)

    publisher = WeightPublisher("run", {}, directory=shared)
    monkeypatch.setattr(os, "open", full)
    assert not publisher.publish(PolicyVersion(1, 0), weights(), "float32").offers
    publisher.close()
    with pytest.raises(WeightsError, match=r"in /.*: No space left on device"):
        VersionFile(shared, 1000, fall_back=False)


def test_a_version_that_cannot_be_named_is_an_error_of_the_weights(shared: Path) -> None:
    file = VersionFile(shared, 1000, fall_back=False)
    shared.rmdir()
    with pytest.raises(WeightsError, match="No such file or directory"):
        file.seal("version")


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
    with pytest.raises(WeightsError, match="the model has no weights"):
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


def test_a_publisher_killed_amid_a_publication_leaves_whole_versions_alone_until_they_are_swept(shared: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with fork_server.popen(["memory", str(shared)], module=killed_publisher.__name__, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert sweep(shared) == [], "its publisher lives"
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    (left,) = shared.iterdir()
    assert left.name.startswith("rollmesh-weights-run-1-0-"), "the version that was written had no name yet"
    WeightPublisher("other", {}, directory=shared)
    assert not list(shared.iterdir())


@pytest.mark.parametrize("ahead", [True, False])
def test_memory_of_the_next_version_is_taken_ahead_or_only_once_it_is_needed(shared: Path, *, ahead: bool) -> None:
    tensors = dict(weights())
    described = [ExportedTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    engine: Any = SimpleNamespace(
        layout=Layout(),
        exported_tensors=lambda holders, part: described,
        exported_shards=lambda part: ((name, (), tensor) for name, tensor in tensors.items()),
    )
    publisher = WeightPublisher("run", {}, directory=shared)
    taken: list[int] = []
    sink: Any = SimpleNamespace(
        allocate=lambda nbytes: (taken.append(nbytes), publisher.allocate(nbytes))[1], complete=publisher.complete
    )
    export = WeightExport(engine, None, 1000, ahead=ahead)
    for version in range(2):
        export.export(sink, PolicyVersion(1, version)).result(180)
    # Its thread has done all.
    export.close()
    publisher.close()
    assert taken == [export.layout.nbytes] * (3 if ahead else 2)


def test_pages_are_mapped_without_a_change_and_an_empty_range_has_none() -> None:
    data = bytearray(b"x" * 20_000)
    for start, end in ((0, 0), (100, 100), (100, 19_000)):
        touch_pages(memoryview(data)[start:end])
    assert data == b"x" * 20_000


def test_parts_of_several_processes_make_the_version_that_one_makes(shared: Path) -> None:
    made = {**dict(weights()), "empty": torch.zeros(0, 3), "count": torch.tensor(7)}
    exported = [
        ExportedTensor(name, tensor.dtype, tuple(tensor.shape), index % 3)
        for index, (name, tensor) in enumerate(made.items())
    ]
    # There is room for three tensors in a bucket, and each process has two large ones.
    layout = VersionLayout(exported, 2000)
    publisher = WeightPublisher("run", {}, PublishRules(bucket_bytes=2000), directory=shared)
    file = publisher.allocate(layout.nbytes)
    for holder in (2, 0, 1):
        part = [(placed.name, made[placed.name]) for placed in layout.part(holder)]
        copy_part(layout.part(holder), part, open_version(file.address))
    copy_part(layout.part(3), [], memoryview(b""))
    parts = {holder: digest_part(layout.part(holder), file.view()) for holder in range(4)}
    manifest = publisher.complete(PolicyVersion(1, 0), layout, file, parts)
    check_manifest(manifest)
    assert [entry.name for entry in manifest.tensors] == list(made)
    for index, bucket in enumerate(manifest.buckets):
        assert digest_of(publisher.bucket(PolicyVersion(1, 0), index)) == bucket.digest
        assert (
            len({t.holder for t in exported for e in manifest.tensors if e.name == t.name and e.bucket == index}) == 1
        )
    for name, tensor in named_tensors(manifest, bytearray(publisher.version(PolicyVersion(1, 0)).data.view())):
        assert torch.equal(tensor, made[name])
    assert publisher.publish(PolicyVersion(1, 1), made.items(), "float32").digest == manifest.digest
    publisher.close()


def test_a_file_is_opened_by_its_own_address_alone(shared: Path) -> None:
    file, other = (VersionFile(shared, 100, fall_back=False) for _ in range(2))
    path, device, inode = file.address.split(":")
    with pytest.raises(FileNotFoundError, match="another file"):
        open_version(f"{other.address.split(':')[0]}:{device}:{inode}")
    file.close()
    with pytest.raises(FileNotFoundError):
        open_version(f"{path}:{device}:{inode}")
    other.close()


def test_weights_that_have_not_changed_are_kept_once(shared: Path) -> None:
    publisher = WeightPublisher("run", {}, PublishRules(keep_versions=2), directory=shared)
    first = publisher.publish(PolicyVersion(1, 0), weights(), "float32")
    for version in range(1, 5):
        manifest = publisher.republish(PolicyVersion(1, version))
        assert (manifest.digest, manifest.offers) == (first.digest, first.offers)
        assert digest_of(publisher.bucket(PolicyVersion(1, version), 0)) == first.buckets[0].digest
        assert publisher.newest == manifest
    assert len(list(shared.iterdir())) == 1
    with pytest.raises(WeightsError, match="1:4 was published already"):
        publisher.republish(PolicyVersion(1, 4))
    publisher.publish(PolicyVersion(1, 5), weights(5), "float32")
    assert len(list(shared.iterdir())) == 2, "version 4 is still kept"
    publisher.publish(PolicyVersion(1, 6), weights(6), "float32")
    assert Path(first.offers[0].address) not in list(shared.iterdir())
    publisher.close()
    assert not list(shared.iterdir())


def test_a_version_that_is_complete_once_its_publisher_is_closed_leaves_nothing(shared: Path) -> None:
    publisher = WeightPublisher("run", {}, directory=shared)
    publisher.close()
    with pytest.raises(WeightsError, match="the learner ends"):
        publisher.publish(PolicyVersion(1, 0), weights(), "float32")
    assert publisher.newest is None
    assert not list(shared.iterdir())


def test_memory_is_reckoned_before_it_is_used(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    required = WeightPublisher("run", {}, PublishRules(transport="shm", keep_versions=3), directory=shared)
    with pytest.raises(WeightsError, match=r"GB free of .* for 5 versions .*lower weights\.keep_versions"):
        required.reckon_memory(1 << 50)
    required.reckon_memory(1000)
    auto = WeightPublisher("run", {}, directory=shared)
    auto.reckon_memory(1000)
    assert not caplog.records
    auto.reckon_memory(1 << 50)
    assert "they are sent over grpc; lower weights.keep_versions" in caplog.text
    assert "GB are available: lower weights.keep_versions" in caplog.text
    assert not auto.publish(PolicyVersion(1, 0), weights(), "float32").offers
    assert not list(shared.iterdir())


def test_as_much_is_reckoned_as_is_in_use_at_most(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a receiver still fetches the oldest version."""
    rules = PublishRules(transport="shm", keep_versions=2)
    publisher, used = WeightPublisher("run", {}, rules, directory=shared), 0
    with publisher.readers.reading(PolicyVersion(1, 0)):
        for version in range(5):
            publisher.publish(PolicyVersion(1, version), weights(version), torch.float32)
            nbytes = publisher.version(PolicyVersion(1, version)).data.nbytes
            next_one = publisher.allocate(nbytes)
            used = max(used, sum(path.stat().st_size for path in shared.iterdir()) + nbytes)
            next_one.close()
    publisher.close()
    free = used

    def space(_: object) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=free, f_frsize=1)

    monkeypatch.setattr(os, "statvfs", space)
    publisher.reckon_memory(nbytes)
    free -= 1
    with pytest.raises(WeightsError, match="for 4 versions"):
        publisher.reckon_memory(nbytes)


@pytest.mark.parametrize(
    ("transport", "encoding", "needed"), [("grpc", "auto", 4400), ("grpc", "full", 3000), ("shm", "auto", 3000)]
)
def test_deltas_count_as_memory_where_they_are_made_and_sent(
    transport: TransportName,
    encoding: EncodingName,
    needed: int,
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rules = PublishRules(transport=transport, encoding=encoding, keep_versions=1, chain=2)
    publisher = WeightPublisher("run", {}, rules, directory=shared)
    available = needed
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    publisher.reckon_memory(1000)
    assert not caplog.records
    available -= 1
    publisher.reckon_memory(1000)
    assert "3 versions of the weights" in caplog.text
    assert ("and 2 deltas" in caplog.text) == (needed > 3000)
    publisher.close()


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
    sweeping.join(180)
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


@pytest.mark.parametrize("known", [None, {"eos_token_id": 1, "top_k": 20}])
def test_the_bundle_names_the_tokens_at_which_responses_stop(tmp_path: Path, known: dict[str, int] | None) -> None:
    (tmp_path / "config.json").write_text("{}")
    if known is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(known))
    told = json.loads(read_model_bundle(tmp_path, (1, 7))["generation_config.json"])
    assert told == (known or {}) | {"eos_token_id": [1, 7]}
