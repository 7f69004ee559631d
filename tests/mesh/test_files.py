"""Files that are written whole or not at all."""

from pathlib import Path

import pytest

from rollmesh.mesh.files import write_atomically


def test_what_cannot_be_written_leaves_the_former_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomically(path, "former")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "half \ud800")
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, "new", durable=True)
    assert path.read_text() == "new"
