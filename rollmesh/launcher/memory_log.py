"""`memory.jsonl`: memory of all services over time, in a file of bounded size.

Invariant: it holds at most a given number of samples, over the whole time of the run. When there are more, each two
neighbors become one, with the higher values; samples after that are taken together likewise.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from rollmesh.mesh.files import write_atomically
from rollmesh.report.memory import FILE, MemorySample, read_memory

log = logging.getLogger(__name__)
_MOST_SAMPLES = 2000


class MemoryLog:
    """Appends samples.

    Args:
        folder: of the run; the samples of an earlier launch in it stay.
        most: samples that the file may hold, at least 2.
    """

    def __init__(self, folder: Path, most: int = _MOST_SAMPLES) -> None:
        self._path = folder / FILE
        self._most = most
        self._samples = read_memory(folder)
        self._stride = 1
        self._gathered: list[MemorySample] = []
        self._refused = False

    def add(self, sample: MemorySample) -> None:
        """Appends a sample; a disk that refuses is reported once, and changes nothing."""
        self._gathered.append(sample)
        if len(self._gathered) < self._stride:
            return
        together, *rest = self._gathered
        for other in rest:
            together = together.max(other)
        self._gathered = []
        self._samples.append(together)
        try:
            if len(self._samples) > self._most:
                self._coarsen()
                write_atomically(self._path, "".join(map(_text, self._samples)))
            else:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(_text(together))
        except OSError as error:
            if not self._refused:
                log.warning("%s lacks samples of memory: %s", self._path, error.strerror)
            self._refused = True

    def _coarsen(self) -> None:
        pairs = zip(self._samples[::2], self._samples[1::2], strict=False)
        odd = self._samples[len(self._samples) // 2 * 2 :]
        self._samples = [*(first.max(second) for first, second in pairs), *odd]
        self._stride *= 2


def _text(sample: MemorySample) -> str:
    return "".join(json.dumps(line) + "\n" for line in sample.lines())
