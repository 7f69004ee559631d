"""Images as files: found by the digest of their bytes, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.mesh.errors import DataError, StoreError
from rollmesh.mesh.trajectory.image_files import ImageFiles


def test_equal_images_are_one_file(tmp_path: Path) -> None:
    files = ImageFiles(tmp_path / "images")
    first, second = files.write([b"one", b"two"])
    assert ImageFiles(tmp_path / "images").write([b"two", b"one"]) == [second, first]
    assert files.read([second, first, second]) == (b"two", b"one", b"two")
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2


def test_what_is_not_what_was_written_is_refused(tmp_path: Path) -> None:
    files = ImageFiles(tmp_path)
    [digest] = files.write([b"one"])
    (tmp_path / digest[:2] / digest).write_bytes(b"other")
    with pytest.raises(DataError, match="not the image that was written"):
        files.read([digest])
    (tmp_path / digest[:2] / digest).unlink()
    with pytest.raises(DataError, match="no image at") as refused:
        files.read([digest])
    assert "buffer.side_dir" in refused.value.hint
    for wrong in ("../../secret", digest.upper(), f"{digest}/.."):
        with pytest.raises(DataError, match="no digest of an image"):
            files.read([wrong])


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(b"a file")
    with pytest.raises(StoreError, match="cannot be written"):
        ImageFiles(tmp_path / "images").write([b"one"])
