"""Copies of checkpoints in an object store: a server that speaks S3, and s3fs as its client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import s3fs
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

from rollmesh.learner.checkpoint.names import list_checkpoints
from rollmesh.learner.checkpoint.remote_copies import CopyError, RemoteCopies
from rollmesh.mesh.errors import ConfigError
from tests.learner.checkpoint.saved_run import SavedRun

# The least that S3 takes as a part of several; s3fs sends ten times as much.
_PART = 5 << 20
_LARGE = 2 * _PART + 1
URL = "s3://bucket/runs/demo"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedMotoServer]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    s3_backends.reset()
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    s3fs.S3FileSystem.clear_instance_cache()
    yield server
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_run_is_kept_in_a_bucket_and_comes_back(
    server: ThreadedMotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3fs.S3FileSystem, "default_block_size", _PART)
    with pytest.raises(ConfigError, match=r"there is no bucket bucket \(create it, or change checkpoint\.copy_to\)"):
        RemoteCopies(URL).check(tmp_path / "none")
    boto3.client("s3").create_bucket(Bucket="bucket")
    run = SavedRun(tmp_path / "runs" / "demo", URL)
    run.copies.check(run.checkpoints)
    run.save("i0001-v00000010")
    assert run.update() == ["i0001-v00000010"]
    run.remove("i0001-v00000010")
    run.save("i0002-v00000020", weights=bytes(_LARGE))
    assert run.update() == ["i0002-v00000020"]
    assert run.update() == []
    keys = [item["Key"] for item in boto3.client("s3").list_objects_v2(Bucket="bucket")["Contents"]]
    assert all(key.startswith("runs/demo/i0002-v00000020/") for key in keys), "neither the probe nor what was removed"
    fetched = RemoteCopies(URL).fetch(tmp_path / "checkpoints", tmp_path / "consumption.jsonl")
    assert [folder for _, folder in list_checkpoints(tmp_path / "checkpoints")] == [fetched]
    assert (fetched / "__0_0.distcp").stat().st_size > _LARGE


def test_an_upload_into_a_bucket_that_is_gone_leaves_no_copy(server: ThreadedMotoServer, tmp_path: Path) -> None:
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    run = SavedRun(tmp_path / "runs" / "demo", URL)
    run.save("i0001-v00000010")
    client.delete_bucket(Bucket="bucket")
    with pytest.raises(CopyError, match=rf"cannot write {URL}: there is no bucket bucket"):
        run.update()
    client.create_bucket(Bucket="bucket")
    assert run.names() == []
    assert run.update() == ["i0001-v00000010"]


def test_missing_credentials_are_named(server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY":
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigError, match="Unable to locate credentials"):
        RemoteCopies(URL).check(Path("none"))
