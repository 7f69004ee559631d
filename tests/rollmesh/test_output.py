"""Text on its way to a reader who may not read."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Iterator

import pytest

from rollmesh.launcher.console.output import BufferedOutput

DEADLINE_S = 240.0


class Held(io.StringIO):
    """A stream whose reader reads when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = threading.Event()
        self.asked = threading.Event()

    def write(self, text: str) -> int:
        self.asked.set()
        assert self.reads.wait(DEADLINE_S)
        return super().write(text)


@pytest.fixture
def held() -> Iterator[Held]:
    stream = Held()
    yield stream
    stream.reads.set()


def test_all_that_is_read_is_written_in_order() -> None:
    stream = io.StringIO()
    output = BufferedOutput(stream)
    for number in range(1000):
        output.write(f"{number}\n")
    output.close()
    assert stream.getvalue().split() == [str(number) for number in range(1000)]


def test_what_no_one_reads_is_dropped_and_counted(held: Held) -> None:
    output = BufferedOutput(held, kept=30, end_s=DEADLINE_S)
    output.write("first\n")
    assert held.asked.wait(DEADLINE_S)
    for number in range(100):
        output.write(f"line {number:03}\n")
    held.reads.set()
    output.close()
    assert held.getvalue().splitlines() == [
        "first",
        "... lines that could not be written are missing here: 97",
        *("line 097", "line 098", "line 099"),
    ]


def test_an_end_that_no_one_reads_is_an_end(held: Held) -> None:
    output = BufferedOutput(held, end_s=0.05)
    output.write("first\n")
    output.close()
    assert not held.reads.is_set()


class FullAtFirst(io.StringIO):
    """A file on a disk that has no room for the first write."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = threading.Event()

    def write(self, text: str) -> int:
        if self.failed.is_set():
            return super().write(text)
        self.failed.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_a_trouble_until_it_has_room_again() -> None:
    stream = FullAtFirst()
    output = BufferedOutput(stream)
    output.write("lost\n")
    assert stream.failed.wait(DEADLINE_S)
    output.write("shown\n")
    output.close()
    assert not output.write_error
    said = "... lines that could not be written are missing here: 1"
    assert stream.getvalue().splitlines() == [said, "shown"]


def test_what_cannot_be_encoded_is_shown_as_far_as_it_can() -> None:
    raw = io.BytesIO()
    output = BufferedOutput(io.TextIOWrapper(raw, encoding="ascii"))
    output.write("ä b\n")
    output.close()
    assert raw.getvalue() == b"? b\n"
