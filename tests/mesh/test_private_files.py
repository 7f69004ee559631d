"""Files with secrets are used only where no other user may read or change them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.buffer.redis_backend.connection import tls_context
from rollmesh.mesh.access.tls import channel_credentials, server_credentials
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.redis_url import RedisOptions, parse_redis_url
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.private_files import check_closed, read_secret
from tests.certificates import Authority
from tests.secrets_here import TOKEN, write_secret


def given_away(path: Path) -> Path:
    """Owned by another user than root, who may keep a file for a group of the machine."""
    if os.getuid() == 0:
        os.chown(path, 65534, -1)
    return path


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = given_away(write_secret(tmp_path / "token"))
    assert read_secret(path, "key") == TOKEN
    for mode in (0o640, 0o620, 0o604, 0o602, 0o644):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=r"key .*/token: other users") as caught:
            read_secret(path, "key")
        assert caught.value.hint == f"chmod 600 {path}"
    path.chmod(0o600)


def test_where_there_is_no_secret_the_hint_says_how_to_make_one(tmp_path: Path) -> None:
    empty = write_secret(tmp_path / "empty", "")
    for path, wrong in ((empty, "is empty"), (tmp_path / "none", "No such file")):
        with pytest.raises(ConfigError, match=wrong) as caught:
            read_secret(path, "key", how="make one")
        assert caught.value.hint == "make one"
        with pytest.raises(ConfigError, match=wrong) as caught:
            read_secret(path, "key")
        assert "umask 077" in caught.value.hint


def test_what_is_no_file_is_not_to_be_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="not a file") as caught:
        read_secret(tmp_path, "key")
    assert "chmod" not in caught.value.hint


def test_a_secret_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = given_away(write_secret(tmp_path / "token"))
    other, owner = 12345, path.stat().st_uid
    for user, may in ((owner, True), (0, True), (other, False)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        if may:
            check_closed(path, "key")
            continue
        with pytest.raises(ConfigError, match="another user"):
            check_closed(path, "key")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, whose files are meant")
def test_root_may_let_a_group_read(tmp_path: Path) -> None:
    path = write_secret(tmp_path / "service.key")
    path.chmod(0o640)
    check_closed(path, "key")
    for mode in (0o660, 0o644):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="other users"):
            check_closed(path, "key")


@pytest.mark.parametrize(
    ("key", "use"),
    [
        ("security.tls_key", lambda cert, path: server_credentials(SecuritySection(tls_cert=cert, tls_key=path))),
        ("security.tls_key", lambda cert, path: channel_credentials(SecuritySection(tls_cert=cert, tls_key=path))),
        (
            "buffer.redis_tls_key",
            lambda cert, path: tls_context(parse_redis_url("rediss://a", RedisOptions(tls_cert=cert, tls_key=path))),
        ),
        (
            "buffer.redis_password_file",
            lambda _, path: parse_redis_url("redis://a", RedisOptions(password_file=path)).login(),
        ),
    ],
)
def test_every_file_that_holds_a_secret_has_to_be_closed(
    key: str, use: Callable[[Path, Path], object], tmp_path: Path
) -> None:
    cert, path = Authority(tmp_path).certify("service")
    use(cert, path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=rf"{key} .*service\.key: other users"):
        use(cert, path)
