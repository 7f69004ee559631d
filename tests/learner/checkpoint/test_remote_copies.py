"""Copies of checkpoints under a URL: complete or absent, and enough to continue a run."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pydantic import ValidationError
from typer.testing import CliRunner

from rollmesh.cli.app import app
from rollmesh.learner.checkpoint.best import Best, BestCheckpoint, best_checkpoint
from rollmesh.learner.checkpoint.names import list_checkpoints
from rollmesh.learner.checkpoint.remote_copies import CopyError, RemoteCopies
from rollmesh.learner.checkpoint.retention import prune
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


def _files(name: str) -> list[str]:
    """All that the store has of a checkpoint."""
    memory = fsspec.filesystem("memory")
    return memory.find(f"bucket/runs/demo/{name}") if memory.exists(f"bucket/runs/demo/{name}") else []


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError("the token has ended")


def _before_puts(patch: pytest.MonkeyPatch, hook: Callable[[str], None]) -> None:
    """Calls a hook with the target of each file, before the store gets it."""
    put = MemoryFileSystem.put_file

    def hooked(store: MemoryFileSystem, source: str, target: str) -> None:
        hook(target)
        put(store, source, target)

    patch.setattr(MemoryFileSystem, "put_file", hooked)


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
    thread = run.thread()
    left = iter([True, True])

    def refuse_third(_target: str) -> None:
        if not next(left, False):
            raise PermissionError("the token has ended")

    with monkeypatch.context() as patch:
        _before_puts(patch, refuse_third)
        thread.start().result(180)
    assert run.names() == ["i0001-v00000010"], "the one before stays until there is a newer one"
    assert thread.failed == 1
    assert "the token has ended" in caplog.text
    thread.start().result(180)
    assert run.names() == ["i0001-v00000020"]


@pytest.mark.parametrize("written", [0, 5])
def test_a_copy_whose_list_is_not_whole_is_none_and_is_made_up_for(run: SavedRun, tmp_path: Path, written: int) -> None:
    """As a learner leaves it in a folder that dies while it writes the list."""
    run.save("i0001-v00000010")
    run.save("i0001-v00000020")
    run.update()
    memory, path = fsspec.filesystem("memory"), "bucket/runs/demo/i0001-v00000020/digests.json"
    memory.pipe_file(path, memory.cat_file(path)[:written])
    elsewhere = tmp_path / "elsewhere"
    assert run.copies.fetch(elsewhere / "checkpoints", elsewhere / "consumption.jsonl").name == "i0001-v00000010"
    assert run.update() == ["i0001-v00000020"]
    assert run.update() == []


def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save("i0001-v00000010")
    run.save("i0001-v00000020")

    def remove(target: str) -> None:
        if target.endswith("i0001-v00000010/__0_0.distcp"):
            run.remove("i0001-v00000010")

    _before_puts(monkeypatch, remove)
    assert run.update() == ["i0001-v00000020"]
    assert run.names() == ["i0001-v00000020"]


def test_the_last_whole_copy_stays_until_a_newer_one_is_whole(
    run: SavedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where checkpoints are removed faster than they are copied."""
    run.save("i0001-v00000010")
    run.update()
    run.remove("i0001-v00000010")
    run.save("i0001-v00000020")
    run.save("i0001-v00000030")

    def overtake(target: str) -> None:
        assert run.names(), "there is a copy at every moment"
        if target.endswith("i0001-v00000030/__0_0.distcp"):
            run.save("i0001-v00000040")
            run.save("i0001-v00000050")
            run.remove("i0001-v00000020")
            run.remove("i0001-v00000030")

    _before_puts(monkeypatch, overtake)
    thread = run.thread()
    thread.start().result(180)
    assert run.names() == ["i0001-v00000040", "i0001-v00000050"]
    assert thread.failed == 1
    assert "i0001-v00000030 was removed while it was copied to memory://" in caplog.text
    assert not _files("i0001-v00000030"), "nothing of it is left"


def test_retention_spares_the_checkpoint_that_is_being_copied_and_no_other(
    run: SavedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save("i0001-v00000010")
    begun, may_end = threading.Event(), threading.Event()

    def wait(_target: str) -> None:
        begun.set()
        assert may_end.wait(180)

    _before_puts(monkeypatch, wait)
    thread = run.thread()
    copied = thread.start()
    assert begun.wait(180)
    for version in range(20, 70, 10):
        folder = run.save(f"i0001-v{version:08d}")
        prune(run.checkpoints, committed=folder.name, keep=2, uploading=thread.uploading)
        assert len(list_checkpoints(run.checkpoints)) <= 3
    may_end.set()
    copied.result(180)
    assert thread.uploading is None
    assert thread.failed == 0
    # Also those of a store that is slower than the checkpoints come do not accumulate.
    prune(run.checkpoints, committed="i0001-v00000060", keep=2, uploading=thread.uploading)
    thread.start().result(180)
    assert run.names() == ["i0001-v00000050", "i0001-v00000060"]


def test_copies_that_are_always_overtaken_do_not_pile_up(run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    versions, most = iter(range(20, 100, 10)), 0
    thread = run.thread()

    def overtake(target: str) -> None:
        nonlocal most
        if target.endswith(".distcp") and (version := next(versions, None)):
            most = max(most, len(run.names()))
            folder = run.save(f"i0001-v{version:08d}")
            prune(run.checkpoints, committed=folder.name, keep=1, uploading=thread.uploading)

    _before_puts(monkeypatch, overtake)
    run.save("i0001-v00000010")
    thread.start().result(180)
    assert thread.failed == 0
    assert most <= 2
    # The one that was spared goes with the next commit.
    assert run.names() == [folder.name for _, folder in list_checkpoints(run.checkpoints)]
    assert run.names() == ["i0001-v00000080", "i0001-v00000090"]


def test_uploads_that_broke_off_are_removed_but_not_those_of_a_successor(
    run: SavedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save("i0001-v00000010")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", _refuse)
        run.thread().start().result(180)
    assert _files("i0001-v00000010")
    fsspec.filesystem("memory").pipe_file("bucket/runs/demo/i0002-v00000001/part", b"it comes")
    run.remove("i0001-v00000010")
    run.save("i0001-v00000020")
    run.update()
    assert not _files("i0001-v00000010")
    assert _files("i0002-v00000001")


def test_a_fenced_learner_completes_no_copy_of_which_its_successor_has_removed_files(
    run: SavedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save("i0001-v00000010")

    def remove(target: str) -> None:
        if target.endswith("consumption.jsonl"):
            fsspec.filesystem("memory").rm_file("bucket/runs/demo/i0001-v00000010/state.json")

    with monkeypatch.context() as patch:
        _before_puts(patch, remove)
        with pytest.raises(CopyError, match=r"state\.json was removed while i0001-v00000010 was copied"):
            run.update()
    assert run.names() == []


def test_a_fetch_that_was_interrupted_can_be_repeated(
    run: SavedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save("i0001-v00000020")
    run.update()
    checkpoints, log = tmp_path / "elsewhere" / "checkpoints", tmp_path / "elsewhere" / "consumption.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", _refuse)
        with pytest.raises(PermissionError):
            run.copies.fetch(checkpoints, log)
    assert list_checkpoints(checkpoints) == []
    assert run.copies.fetch(checkpoints, log) == checkpoints / "i0001-v00000020"
    assert log.read_text() == "up to i0001-v00000020\n"
    shutil.rmtree(checkpoints)
    log.write_text("another run's\n")
    with pytest.raises(ConfigError, match="has a run already"):
        run.copies.fetch(checkpoints, log)


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_fetch_that_was_interrupted_before_the_best_one_can_be_repeated(
    run: SavedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    best = Best("i0001-v00000010", 1, 10, "reward", "max", 0.5, "measured")
    run.save("i0001-v00000010")
    file = BestCheckpoint(run.checkpoints, 1)
    file.claim()
    file.keep_candidate("i0001-v00000010")
    assert file.record_value(best)
    run.update()
    run.save("i0001-v00000020")
    run.update()
    checkpoints, log = tmp_path / "elsewhere" / "checkpoints", tmp_path / "elsewhere" / "consumption.jsonl"
    rename, left = Path.rename, iter(range(done))

    def refuse_after_some(self: Path, target: Path) -> Path:
        return rename(self, target) if next(left, None) is not None else _refuse()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse_after_some)
        patch.setattr("rollmesh.learner.checkpoint.remote_copies.restore_best", _refuse)
        with pytest.raises(PermissionError):
            run.copies.fetch(checkpoints, log)
    assert len(list_checkpoints(checkpoints)) == done
    assert run.copies.fetch(checkpoints, log) == checkpoints / "i0001-v00000020"
    assert best_checkpoint(checkpoints) == best
    assert [folder.name for _, folder in list_checkpoints(checkpoints)] == ["i0001-v00000010", "i0001-v00000020"]
    assert log.read_text() == "up to i0001-v00000020\n"
    assert sorted(path.name for path in checkpoints.iterdir() if path.name.startswith(".partial")) == []
    with pytest.raises(ConfigError, match="has a run already"):
        run.copies.fetch(checkpoints, log)


def test_the_best_checkpoint_comes_back_with_its_value(run: SavedRun, tmp_path: Path) -> None:
    best = Best("i0001-v00000010", 1, 10, "reward", "max", 0.5, "measured")
    run.save("i0001-v00000010")
    run.save("i0001-v00000020")
    run.update()
    # Its round ends after its copy was made.
    file = BestCheckpoint(run.checkpoints, 1)
    file.claim()
    file.keep_candidate("i0001-v00000010")
    assert file.record_value(best)
    run.save("i0001-v00000030")
    run.update()
    checkpoints = tmp_path / "elsewhere" / "checkpoints"
    assert run.copies.fetch(checkpoints, checkpoints.parent / run.log.name).name == "i0001-v00000030"
    assert best_checkpoint(checkpoints) == best
    assert [folder.name for _, folder in list_checkpoints(checkpoints)] == ["i0001-v00000010", "i0001-v00000030"]
    assert sorted(path.name for path in (checkpoints / best.checkpoint).iterdir()) == sorted(
        path.name for path in (run.checkpoints / best.checkpoint).iterdir()
    )
    assert BestCheckpoint(checkpoints, 1).claim() == best, "whichever incarnation the next learner has"
    fsspec.filesystem("memory").rm("bucket/runs/demo/i0001-v00000010", recursive=True)
    run.copies.fetch(tmp_path / "third", tmp_path / run.log.name)
    assert best_checkpoint(tmp_path / "third") is None


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
        run.copies.fetch(tmp_path / "checkpoints", tmp_path / "consumption.jsonl")
    run.save("i0001-v00000010")
    run.update()
    fsspec.filesystem("memory").pipe_file("bucket/runs/demo/i0001-v00000010/critic/state.json", b"x")
    with pytest.raises(CopyError, match=r"critic/state\.json is damaged"):
        run.copies.fetch(tmp_path / "checkpoints", tmp_path / "consumption.jsonl")
    assert list_checkpoints(tmp_path / "checkpoints") == []


def test_a_copy_without_its_log_or_with_a_file_of_elsewhere_is_refused(run: SavedRun, tmp_path: Path) -> None:
    run.save("i0001-v00000010")
    run.update()
    memory, copy = fsspec.filesystem("memory"), "bucket/runs/demo/i0001-v00000010"
    log = memory.cat_file(f"{copy}/consumption.jsonl")
    memory.rm_file(f"{copy}/consumption.jsonl")
    with pytest.raises(CopyError, match="would train the same prompts again"):
        run.copies.fetch(tmp_path / "checkpoints", tmp_path / "consumption.jsonl")
    memory.pipe_file(f"{copy}/consumption.jsonl", log)
    # As an object store keeps a name; fsspec's memory makes a path of it.
    memory.store[f"/{copy}/../../outside"] = memory.store[f"/{copy}/state.json"]
    with pytest.raises(CopyError, match="is not the name of a file"):
        run.copies.fetch(tmp_path / "checkpoints", tmp_path / "consumption.jsonl")
    assert not (tmp_path / "outside").exists()
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


def test_a_best_checkpoint_has_a_copy_also_where_uploads_are_slower_than_checkpoints(
    run: SavedRun, tmp_path: Path
) -> None:
    first, second = (
        Best(f"i0001-v000000{step}", 1, step, "reward", "max", step / 100, "measured") for step in (10, 20)
    )
    run.save(first.checkpoint)
    file = BestCheckpoint(run.checkpoints, 1)
    file.claim()
    file.keep_candidate(first.checkpoint)
    assert file.record_value(first)
    run.update()
    run.save(second.checkpoint)
    file.keep_candidate(second.checkpoint)
    assert file.record_value(second)
    run.remove(first.checkpoint)

    def fetched(name: str) -> Best | None:
        checkpoints = tmp_path / name / "checkpoints"
        run.copies.fetch(checkpoints, checkpoints.parent / run.log.name)
        return best_checkpoint(checkpoints)

    # Each upload ends when the next checkpoint is there.
    run.save("i0001-v00000030")
    assert run.copies.copy_next(run.checkpoints, run.log) == "i0001-v00000030"
    assert fetched("the former one stays") == first
    run.save("i0001-v00000040")
    assert run.copies.copy_next(run.checkpoints, run.log) == second.checkpoint, (
        "its turn, although it is not the newest"
    )
    assert fetched("the new one is there") == second
    assert first.checkpoint not in run.names()
    assert run.copies.copy_next(run.checkpoints, run.log) == "i0001-v00000040"
