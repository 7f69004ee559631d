"""Reading the samples a run has kept."""

from __future__ import annotations

import heapq
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rollmesh.learner.metrics.files import SAMPLES
from rollmesh.mesh.errors import DataError

_CHUNK = 1 << 18
_UNKNOWN = object()


def read_samples(folder: Path, *, worst: bool, number: int) -> list[Mapping[str, Any]]:
    """The latest samples (newest first), or those with the lowest rewards.

    Raises:
        DataError: the folder holds no samples.
    """
    path = folder / SAMPLES
    try:
        if not worst:
            return _latest(path, number)
        with path.open(encoding="utf-8") as file:
            return heapq.nsmallest(number, _parse(file), key=lambda sample: float(sample["reward"]))
    except OSError as error:
        raise _no_samples(folder, error) from error


def read_all(folder: Path) -> Iterator[Mapping[str, Any]]:
    """All samples, in the order in which they were kept.

    Raises:
        DataError: the folder holds no samples.
    """
    try:
        with (folder / SAMPLES).open(encoding="utf-8", errors="replace") as file:
            yield from _parse(file)
    except OSError as error:
        raise _no_samples(folder, error) from error


def read_spread(folder: Path, places: int) -> list[Mapping[str, Any]]:
    """The samples of some steps that are spread over the run, the latest steps first.

    Only these steps are read: a long run has gigabytes of samples.

    Args:
        folder: of the run.
        places: how many steps at most.

    Raises:
        DataError: the folder holds no samples.
    """
    path = folder / SAMPLES
    try:
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            return [sample for place in range(places)[::-1] for sample in _step_at(file, size * place // places)]
    except OSError as error:
        raise _no_samples(folder, error) from error


def _step_at(file: BinaryIO, offset: int) -> list[Mapping[str, Any]]:
    """The samples of the first step that begins after an offset, or at the beginning of the file."""
    file.seek(offset)
    if offset:
        file.readline()
    found: list[Mapping[str, Any]] = []
    # The step in which the offset lies has begun before it.
    passed: Any = _UNKNOWN if offset else None
    for sample in _parse(line.decode("utf-8", "replace") for line in file):
        step = sample.get("step")
        if passed is _UNKNOWN:
            passed = step
        if found and step != found[0].get("step"):
            break
        if step != passed:
            found.append(sample)
    return found


def sample_lines(sample: Mapping[str, Any]) -> Iterator[str]:
    """A sample for a person to read."""
    parts = {name: value for name, value in (sample.get("components") or {}).items() if name != "total"}
    detail = " (" + ", ".join(f"{name} {value:g}" for name, value in parts.items()) + ")" if len(parts) > 1 else ""
    source = f"  {sample['data_source']}" if sample.get("data_source") else ""
    ended = f"  {sample.get('finish_reason', '')}"
    yield f"step {sample['step']}  reward {float(sample['reward']):g}{detail}{ended}{source}"
    if token_line := _token_line(sample):
        yield f"  tokens:   {token_line}"
    yield f"  prompt:   {sample.get('prompt', '')!r}"
    yield f"  response: {sample.get('response', '')!r}"
    yield f"  truth:    {sample.get('ground_truth')!r}"
    if evidence := sample.get("evidence"):
        yield f"  evidence: {evidence!r}"


def _token_line(sample: Mapping[str, Any]) -> str:
    """Number, versions, and log-prob gap of the tokens; empty where they are not known."""
    tokens = sample.get("tokens") or {}
    parts = [f"{tokens['count']}"] if "count" in tokens else []
    if versions := sample.get("versions"):
        parts.append("of " + ", ".join(f"{incarnation}:{version} ({n})" for n, incarnation, version in versions))
    if {"log_probs", "policy_log_probs"} <= set(tokens):
        pairs = zip(_expanded(tokens["policy_log_probs"]), _expanded(tokens["log_probs"]), strict=False)
        gaps = [abs(policy - sampled) for policy, sampled in pairs if policy is not None and sampled is not None]
        if gaps:
            parts.append(f"log-prob gap {sum(gaps) / len(gaps):.4f} in the mean, {max(gaps):.4f} at most")
    return "; ".join(parts)


def _expanded(entries: Iterable[Any]) -> Iterator[Any]:
    """One value per token; an entry [n, x] stands for n of them."""
    for entry in entries:
        yield from [entry[1]] * entry[0] if isinstance(entry, list) else [entry]


def _no_samples(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"no samples in {folder}: {error.strerror}",
        hint="give a run folder; logging.samples_per_step sets how many samples are kept",
    )


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
        except (ValueError, RecursionError):
            continue  # a line that is not complete yet, or no sample of ours
        if isinstance(sample, dict) and "reward" in sample:
            yield sample
