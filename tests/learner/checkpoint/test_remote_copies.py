"""Copies of checkpoints under a URL: complete or absent, and enough to continue a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pydantic import ValidationError
from typer.testing import CliRunner

from rollmesh.cli.app import app
from rollmesh.learner.checkpoint.copy_thread import CopyThread
from rollmesh.learner.checkpoint.names import list_checkpoints
from rollmesh.learner.checkpoint.remote_copies import CopyError, RemoteCopies
from rollmesh.mesh.config.evaluation import CheckpointSection
from rollmesh.mesh.errors import ConfigError
from tests.learner.checkpoint.saved_run import SavedRun

URL = "memory://bucket/runs/demo"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SavedRun]:
    run = SavedRun(tmp_path / "runs" / "demo", URL)
    run.copies.check(run.checkpoints)
    yield run
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_what_is_kept_here_is_kept_there(run: SavedRun) -> None:
    run.save("i0001-v00000010")
    run.save("i0001-v00000020")
    assert run.update() == ["i0001-v00000020", "i0001-v00000010"], "the newest is worth most"
    run.remove("i0001-v00000010")
    run.save("i0002-v00000015")
    assert run.update() == ["i0002-v00000015"]
    assert run.names() == ["i0001-v00000020", "i0002-v00000015"]
    assert run.update() == []
    # A run that began again has one under the same name.
    (run.save("i0002-v00000015") / "digests.json").write_text('{"state.json": ""}')
    assert run.update() == ["i0002-v00000015"]
    assert not fsspec.filesystem("memory").glob("bucket/runs/demo/i0001-v00000010/**")


def test_an_upload_that_breaks_off_leaves_no_copy_and_is_made_up_for(
    run: SavedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run.save("i0001-v00000010")
    run.update()
    run.remove("i0001-v00000010")
    run.save("i0001-v00000020")
    thread = CopyThread(run.copies, run.checkpoints, run.log)
    put, left = MemoryFileSystem.put_file, iter([True, True])

    def put_two(self: MemoryFileSystem, source: str, target: str) -> None:
        if not next(left, False):
            raise PermissionError("the token has ended")
        put(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", put_two)
        thread.start().result(30)
    assert run.names() == ["i0001-v00000010"], "the one before stays until there is a newer one"
    assert thread.failed == 1
    assert "the token has ended" in caplog.text
    thread.start().result(30)
    assert run.names() == ["i0001-v00000020"]


def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save("i0001-v00000010")
    run.save("i0001-v00000020")
    put = MemoryFileSystem.put_file

    def put_and_remove(self: MemoryFileSystem, source: str, target: str) -> None:
        if target.endswith("i0001-v00000010/__0_0.distcp"):
            run.remove("i0001-v00000010")
        put(self, source, target)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_and_remove)
    assert run.update() == ["i0001-v00000020"]
    assert run.names() == ["i0001-v00000020"]


def test_a_lost_run_comes_back_and_nothing_is_overwritten(run: SavedRun, tmp_path: Path) -> None:
    run.save("i0001-v00000020")
    run.save("i0002-v00000015")
    run.update()
    other = tmp_path / "elsewhere"
    fetched = CliRunner().invoke(app, ["fetch", URL, str(other)])
    assert fetched.exit_code == 0, fetched.output
    ((version, folder),) = list_checkpoints(other / "checkpoints")
    assert (version.incarnation, version.version) == (2, 15), "of the learner that came last"
    assert (folder / "critic" / "state.json").read_text() == "i0002-v00000015{}"
    assert (other / "consumption.jsonl").read_text() == "up to i0002-v00000015\n"
    assert sorted(path.name for path in folder.iterdir()) == ["__0_0.distcp", "critic", "digests.json", "state.json"]
    with pytest.raises(ConfigError, match="has copies of a run that has no checkpoint in"):
        run.copies.check(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="has a run already"):
        run.copies.fetch(other / "checkpoints", other / "consumption.jsonl")


def test_copies_outlive_a_folder_that_is_gone(run: SavedRun) -> None:
    run.save("i0001-v00000010")
    run.update()
    shutil.rmtree(run.checkpoints)
    for _ in range(2):
        with pytest.raises(CopyError, match="has no checkpoint: the copies in memory://bucket/runs/demo stay"):
            run.update()
        run.checkpoints.mkdir(exist_ok=True)
    assert run.names() == ["i0001-v00000010"]


def test_a_damaged_copy_and_none_at_all_are_named(run: SavedRun, tmp_path: Path) -> None:
    with pytest.raises(CopyError, match="no copy of a checkpoint below memory://"):
        run.copies.fetch(tmp_path / "checkpoints", tmp_path / "log")
    run.save("i0001-v00000010")
    run.update()
    fsspec.filesystem("memory").pipe_file("bucket/runs/demo/i0001-v00000010/critic/state.json", b"x")
    with pytest.raises(CopyError, match=r"critic/state\.json is damaged"):
        run.copies.fetch(tmp_path / "checkpoints", tmp_path / "log")
    assert list_checkpoints(tmp_path / "checkpoints") == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nowhere://bucket", "Protocol not known"),
        ("file:///proc/nothing", "cannot write file:///proc/nothing"),
        ("ftp://127.0.0.1:1/runs", "cannot copy to ftp://127"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RemoteCopies(url).check(Path("none"))


@pytest.mark.parametrize("url", ["bucket/runs", "s3://me:secret@host/bucket"])
def test_a_folder_and_a_login_are_no_url(url: str) -> None:
    with pytest.raises(ValidationError) as refused:
        CheckpointSection(copy_to=url)
    assert "secret" not in str(refused.value)
