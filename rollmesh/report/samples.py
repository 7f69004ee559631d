"""Reading the samples a run has kept."""

from __future__ import annotations

import heapq
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollmesh.mesh.errors import DataError

_FILE = "samples.jsonl"
_CHUNK = 1 << 18


def read_samples(folder: Path, *, worst: bool, number: int) -> list[Mapping[str, Any]]:
    """The latest samples (newest first), or those with the lowest rewards.

    Raises:
        DataError: the folder holds no samples.
    """
    path = folder / _FILE
    try:
        if not worst:
            return _latest(path, number)
        with path.open(encoding="utf-8") as file:
            return heapq.nsmallest(number, _parse(file), key=lambda sample: float(sample["reward"]))
    except OSError as error:
        raise DataError(
            f"no samples in {folder}: {error.strerror}",
            hint="give a run folder; logging.samples_per_step sets how many samples are kept",
        ) from error


def sample_lines(sample: Mapping[str, Any]) -> Iterator[str]:
    """A sample for a person to read."""
    parts = {name: value for name, value in (sample.get("components") or {}).items() if name != "total"}
    detail = " (" + ", ".join(f"{name} {value:g}" for name, value in parts.items()) + ")" if len(parts) > 1 else ""
    yield f"step {sample['step']}  reward {float(sample['reward']):g}{detail}  {sample.get('finish_reason', '')}"
    yield f"  prompt:   {sample.get('prompt', '')!r}"
    yield f"  response: {sample.get('response', '')!r}"
    yield f"  truth:    {sample.get('ground_truth')!r}"


def _latest(path: Path, number: int) -> list[Mapping[str, Any]]:
    """The newest samples, read from the end of the file: a long run has gigabytes of them."""
    with path.open("rb") as file:
        size, taken = file.seek(0, io.SEEK_END), _CHUNK
        while True:
            file.seek(max(0, size - taken))
            lines = file.read(min(size, taken)).split(b"\n")
            # The first line may have begun earlier.
            whole = lines if taken >= size else lines[1:]
            samples = list(_parse(line.decode("utf-8", "replace") for line in whole))
            if len(samples) >= number or taken >= size:
                return samples[: -number - 1 : -1]
            taken *= 4


def _parse(lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            sample = json.loads(line)
        except ValueError:
            continue  # a line that is not complete yet
        if isinstance(sample, dict) and "reward" in sample:
            yield sample
