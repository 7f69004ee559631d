"""Files that are written whole or not at all."""

from pathlib import Path

import pytest

from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.files import require_writable, write_atomically


def test_what_cannot_be_written_leaves_the_former_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomically(path, "former")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "half \ud800")
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, "new", durable=True)
    assert path.read_text() == "new"
    write_atomically(path, b"\xff\r\n", durable=True)
    assert path.read_bytes() == b"\xff\r\n"


def test_a_folder_that_takes_no_files_is_refused_with_its_key(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "folder", "a.key")
    assert not list((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "blocked").touch()
    with pytest.raises(ConfigError, match=r"a\.key: files cannot be written to .*/blocked/x: Not a directory"):
        require_writable(tmp_path / "blocked" / "x", "a.key")
