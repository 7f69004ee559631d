"""The checkpoint folder: complete or absent."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from rollmesh.learner.checkpoint import store as store_module
from rollmesh.learner.checkpoint.collective_write import Ranks
from rollmesh.learner.checkpoint.retention import sweep
from rollmesh.learner.checkpoint.store import (
    CheckpointStore,
    DamagedCheckpointError,
    UnwrittenCheckpointError,
    _finish,
    load_checkpoint,
)
from rollmesh.learner.engines.layout import Layout
from rollmesh.learner.engines.world import World
from rollmesh.mesh.errors import ConfigError, DataError, FencedError
from rollmesh.mesh.trajectory.versions import PolicyVersion


class Engine:
    """Writes one file, or fails half-way."""

    layout = Layout()
    trained = True

    def __init__(self) -> None:
        self.fails = False
        self.saved = 0
        self.world = World("cpu", need_group=False)

    def begin_checkpoint(self, folder, extra) -> Future[None]:
        self.saved += 1
        written: Future[None] = Future()
        try:
            (folder / "part").write_text("half")
            if self.fails:
                raise OSError(28, "No space left on device")
            (folder / "state.json").write_text(json.dumps(extra))
            written.set_result(None)
        except OSError as error:
            written.set_exception(error)
        return written

    def load_checkpoint(self, folder) -> dict[str, object]:
        return json.loads((folder / "state.json").read_text())


def test_a_failed_save_leaves_nothing_behind_that_looks_complete(tmp_path):
    store, engine = CheckpointStore(tmp_path), Engine()
    engine.fails = True
    with pytest.raises(DataError, match="No space left"):
        store.begin({"actor": engine}, PolicyVersion(1, 1), {}).result(240)
    assert list(tmp_path.iterdir()) == []
    engine.fails = False
    path = store.begin({"actor": engine}, PolicyVersion(1, 1), {"cursor": 3}).result(240)
    assert json.loads((path / "state.json").read_text()) == {"cursor": 3, "incarnation": 1, "version": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["i0001-v00000001"]


def test_who_is_swept_while_it_saves_has_been_taken_over(tmp_path):
    class Swept(Engine):
        def begin_checkpoint(self, folder, extra) -> Future[None]:
            sweep(tmp_path, 2)
            return super().begin_checkpoint(folder, extra)

    with pytest.raises(FencedError, match="removed while it was written"):
        CheckpointStore(tmp_path).begin({"actor": Swept()}, PolicyVersion(1, 1), {}).result(240)


def test_a_folder_that_someone_else_removes_costs_that_checkpoint_alone(tmp_path):
    class Cleaned(Engine):
        def begin_checkpoint(self, folder, extra) -> Future[None]:
            shutil.rmtree(folder)
            return super().begin_checkpoint(folder, extra)

    store = CheckpointStore(tmp_path)
    with pytest.raises(UnwrittenCheckpointError, match="No such file"):
        store.begin({"actor": Cleaned()}, PolicyVersion(1, 1), {}).result(240)
    assert store.begin({"actor": Engine()}, PolicyVersion(1, 2), {}).result(240).is_dir()


def test_a_checkpoint_whose_name_is_not_durable_does_not_stay(tmp_path, monkeypatch):
    def fsync(path: Path) -> None:
        if path == tmp_path:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(store_module, "fsync_path", fsync)
    with pytest.raises(UnwrittenCheckpointError, match="Input/output error"):
        CheckpointStore(tmp_path).begin({"actor": Engine()}, PolicyVersion(1, 1), {}).result(240)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_no_rank_waits_for_one_whose_part_failed_by_a_mistake(failing: int, tmp_path: Path) -> None:
    unfinished, final = tmp_path / ".partial-i0001-v00000001", tmp_path / "i0001-v00000001"
    unfinished.mkdir()
    barrier, messages = threading.Barrier(2, timeout=180), {}

    def finish(process: int) -> Exception | None:
        def gather(message: bytes) -> list[bytes]:
            messages[process] = message
            barrier.wait()
            gathered = [messages[0], messages[1]]
            barrier.wait()
            return gathered

        part: Future[None] = Future()
        if process == failing:
            part.set_exception(ValueError("of no rank's file"))
        else:
            part.set_result(None)
        try:
            _finish(Ranks(process, 2, gather), [part], unfinished, final)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error
        return None

    with ThreadPoolExecutor(2) as threads:
        errors = list(threads.map(finish, (0, 1)))
    assert isinstance(errors[failing], ValueError)
    assert isinstance(errors[1 - failing], UnwrittenCheckpointError)
    assert "of no rank's file" in str(errors[1 - failing])
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_not_loaded(tmp_path):
    engines = {"actor": Engine(), "critic": Engine()}
    path = CheckpointStore(tmp_path).begin(engines, PolicyVersion(1, 1), {"cursor": 3}).result(240)
    assert load_checkpoint(engines, path)["cursor"] == 3
    (path / "critic" / "part").write_text("Half")
    with pytest.raises(DataError, match="critic/part is damaged"):
        load_checkpoint(engines, path)
    (path / "critic" / "part").unlink()
    with pytest.raises(DataError, match="critic/part: No such file"):
        load_checkpoint(engines, path)


@pytest.mark.parametrize("text", ["[]", "null", "3", '{"state.json": 5}', "[" * 100_000, "{}", '{"part": "0"}', ""])
def test_digests_that_say_nothing_are_damage(text: str, tmp_path: Path) -> None:
    engines = {"actor": Engine()}
    path = CheckpointStore(tmp_path).begin(engines, PolicyVersion(1, 1), {}).result(240)
    (path / "digests.json").write_text(text)
    with pytest.raises(DamagedCheckpointError, match=r"i0001-v00000001: digests\.json is .*damaged"):
        load_checkpoint(engines, path)


def test_saving_a_version_again_keeps_what_is_there(tmp_path):
    store, engine = CheckpointStore(tmp_path), Engine()
    assert store.begin({"actor": engine}, PolicyVersion(1, 1), {}).result(240) == store.begin(
        {"actor": engine}, PolicyVersion(1, 1), {}
    ).result(240)
    assert engine.saved == 1


def test_every_trained_role_has_its_part(tmp_path):
    actor, critic, frozen = Engine(), Engine(), Engine()
    frozen.trained = False
    engines = {"critic": critic, "reference": frozen, "actor": actor}
    path = CheckpointStore(tmp_path).begin(engines, PolicyVersion(1, 1), {"cursor": 3}).result(240)
    assert sorted(str(p.relative_to(path)) for p in path.rglob("state.json")) == ["critic/state.json", "state.json"]
    assert json.loads((path / "state.json").read_text()) == {"cursor": 3, "incarnation": 1, "version": 1}
    assert frozen.saved == 0


def test_a_critic_that_cannot_be_saved_leaves_no_checkpoint(tmp_path):
    store, critic = CheckpointStore(tmp_path), Engine()
    critic.fails = True
    with pytest.raises(DataError, match="No space left"):
        store.begin({"actor": Engine(), "critic": critic}, PolicyVersion(1, 1), {}).result(240)
    assert store.list() == []


def test_a_critic_that_cannot_begin_leaves_nothing_half_written(tmp_path):
    failing, written = threading.Event(), threading.Event()

    class Broken(Engine):
        def begin_checkpoint(self, folder, extra) -> Future[None]:
            failing.set()
            raise RuntimeError("no memory for the copy")

    class Slow(Engine):
        def begin_checkpoint(self, folder, extra) -> Future[None]:
            part: Future[None] = Future()

            def write() -> None:
                assert failing.wait(240)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "part").write_text("half")
                part.set_result(None)
                written.set()

            threading.Thread(target=write).start()
            return part

    store = CheckpointStore(tmp_path)
    with pytest.raises(RuntimeError, match="no memory"):
        store.begin({"actor": Slow(), "critic": Broken()}, PolicyVersion(1, 1), {})
    assert written.wait(240)
    assert list(tmp_path.iterdir()) == []
    assert store.begin({"actor": Engine()}, PolicyVersion(1, 1), {}).result(240).is_dir()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_done(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write checkpoints into"):
        CheckpointStore(tmp_path / "file" / "checkpoints").check(Engine())
    CheckpointStore(tmp_path / "new").check(Engine())
    assert list((tmp_path / "new").iterdir()) == []
