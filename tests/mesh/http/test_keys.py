"""A service that serves HTTP without a key, although the mesh has secrets, logs a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.http.server import http_key
from tests.secrets_here import write_secret


@pytest.mark.parametrize(("token", "key", "warned"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_a_key_that_a_mesh_with_a_token_lacks_is_named(
    *, token: bool, key: bool, warned: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_secret(tmp_path / "file", "of both")
    security = SecuritySection(token_file=file if token else None, endpoint_key_file=file if key else None)
    found = http_key(security.endpoint_key_file, "endpoint_key_file", "127.0.0.1", "the endpoint", security)
    assert found == ("of both" if key else None)
    assert ["set endpoint_key_file" in line for line in caplog.messages] == [True] * warned


def test_a_key_that_is_not_there_comes_with_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"security\.metrics_key_file .*none: No such file") as caught:
        http_key(tmp_path / "none", "security.metrics_key_file", "127.0.0.1", "metrics", SecuritySection())
    assert "rollmesh token new --out" in caught.value.hint
