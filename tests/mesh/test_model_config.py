"""The configuration of a hub id: from the local cache, and refused at once where the hub has no address."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from rollmesh.mesh.errors import DataError
from rollmesh.mesh.model_config import read_config


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, whose name has no address; connections count as failures."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network is used"))
    monkeypatch.setattr("rollmesh.mesh.model_config.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_without_network_a_model_that_is_nowhere_is_refused_at_once(offline: Path) -> None:
    with pytest.raises(DataError, match=r"nor in the hub's local cache, and the hub cannot be reached"):
        read_config("org/absent")


def test_a_cached_configuration_needs_no_network(offline: Path) -> None:
    folder = offline / "models--org--here"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    values = {"model_type": "llama", "hidden_size": 64}
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(values))
    assert read_config("org/here").hidden_size == 64
