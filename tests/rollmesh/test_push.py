"""A model folder is pushed by the real client to a hub on loopback, and every refusal has a name."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from typer.testing import CliRunner

import rollmesh
from rollmesh.cli.app import app
from rollmesh.learner.checkpoint.names import checkpoint_name
from rollmesh.learner.recovery.run_id import take_run_id
from rollmesh.mesh.config import load_config, save_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError, DataError, UnreachableError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.push import push_folder

_DEADLINE_S = 240.0


class Hub:
    """The part of the Hub's interface by which a folder of small files becomes a commit.

    Attributes:
        files: of the commits, by path.
        created: what repositories were made with.
        status: of its answers to the creation of a repository.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, str]] = []
        self.tokens: set[str | None] = set()
        self.status = 200
        self.url = ""
        self._bridge = AsyncBridge("hub")
        self._runner = self._bridge.call(self._start(), _DEADLINE_S)

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/api/repos/create", self._create)
        app.router.add_post("/api/models/{repository:.+}/preupload/main", self._preupload)
        app.router.add_post("/api/models/{repository:.+}/commit/main", self._commit)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return runner

    def close(self) -> None:
        self._bridge.call(self._runner.cleanup(), _DEADLINE_S)
        self._bridge.close()

    async def _create(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get("authorization"))
        if self.status != 200:
            return web.json_response({"error": "no"}, status=self.status)
        self.created.append(await request.json())
        asked = self.created[-1]
        return web.json_response({"url": f"{self.url}/{asked['organization']}/{asked['name']}"})

    async def _preupload(self, request: web.Request) -> web.Response:
        asked = await request.json()
        files = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
            for file in asked["files"]
        ]
        return web.json_response({"files": files})

    async def _commit(self, request: web.Request) -> web.Response:
        for line in (await request.text()).splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        url = f"{self.url}/{request.match_info['repository']}/commit/{'0' * 40}"
        return web.json_response({"commitUrl": url, "commitOid": "0" * 40, "hookOutput": ""})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url)
    monkeypatch.setenv("HF_TOKEN", "hf_of-a-user")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    yield served
    served.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    return folder


def test_a_folder_becomes_one_private_commit(hub: Hub, model: Path) -> None:
    url = push_folder(model, "org/name")
    assert url.startswith(f"{hub.url}/org/name/commit/")
    assert hub.files == {path.name: path.read_bytes() for path in model.iterdir()}
    assert [asked["visibility"] for asked in hub.created] == ["private"]
    assert hub.tokens == {"Bearer hf_of-a-user"}


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_may_not_write_is_refused_by_name(status: int, hub: Hub, model: Path) -> None:
    hub.status = status
    with pytest.raises(ConfigError, match="refuses to write to org/name") as raised:
        push_folder(model, "org/name")
    assert "HF_TOKEN" in raised.value.hint


def test_a_hub_that_fails_or_is_gone_is_unreachable(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.status = 501
    with pytest.raises(UnreachableError, match="org/name could not be pushed"):
        push_folder(model, "org/name")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UnreachableError, match="OfflineModeIsEnabled"):
        push_folder(model, "org/name")


def test_wrong_names_and_folders_are_refused(hub: Hub, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no name of a repository"):
        push_folder(model, "org/a/name")
    with pytest.raises(DataError, match=r"has no config\.json"):
        push_folder(tmp_path / "none", "org/name")
    assert hub.created == []


def test_a_run_pushes_a_checkpoint_and_keeps_no_copy(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the handle and by the command, which leaves the folder that it was asked for."""
    config = load_config({"model": {"path": "m"}, "data": {"train": "t"}, "run": {"dir": str(tmp_path), "name": "r"}})
    folder = config.run.folder
    checkpoint = folder / "checkpoints" / checkpoint_name(PolicyVersion(1, 3))
    checkpoint.mkdir(parents=True)
    save_config(config, folder / "config.yaml")
    take_run_id(folder, "r")

    def export(_config: Config, chosen: Path, out: Path) -> None:
        out.mkdir()
        (out / "config.json").write_text(chosen.name)

    monkeypatch.setattr("rollmesh.export.export_checkpoint", export)
    before = sorted(folder.iterdir())
    assert rollmesh.Run(folder).push("org/name", private=False).startswith(f"{hub.url}/org/name")
    assert sorted(folder.iterdir()) == before
    assert hub.files == {"config.json": checkpoint.name.encode()}
    found = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "out"), "--push-to", "org/other"])
    assert found.exit_code == 0, found.output
    assert f"org/other: {hub.url}/org/other/commit/" in found.output
    assert (tmp_path / "out" / "config.json").exists()
    assert [asked["visibility"] for asked in hub.created] == ["public", "private"]
