"""Comparing what we compute with what was recorded."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tests.golden.adapters import load_adapters
from tests.golden.case import AtMost, Case, Unrecorded, Valid

EXCEPTIONS = Path(__file__).parent / "exceptions.json"


@dataclass
class Verdict:
    """The result of a case.

    Attributes:
        case: which one.
        mismatches: output -> what is wrong with it.
        reasons: output -> why it differs on purpose (`exceptions.json`).
        unrecorded: output -> the input that it needs and that the case does not record.
    """

    case: Case
    mismatches: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    unrecorded: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """`passed`, `differs on purpose` or `FAILED`."""
        if self.mismatches:
            return "FAILED"
        return "differs on purpose" if self.reasons else "passed"


def read_exceptions() -> list[Mapping[str, Any]]:
    """`[{id, outputs, reason}]`: `id` may end in `*`; `outputs` are names, or `*` for all."""
    exceptions: list[Mapping[str, Any]] = json.loads(EXCEPTIONS.read_text(encoding="utf-8"))
    return exceptions


def check(case: Case, exceptions: list[Mapping[str, Any]]) -> Verdict:
    """Computes a case and compares every recorded output."""
    verdict = Verdict(case)
    adapter = load_adapters().get(case.key)
    if adapter is None:
        verdict.mismatches["*"] = "no adapter"
        return verdict
    try:
        outputs = adapter(case)
    except Exception as error:  # noqa: BLE001 - a case that cannot be computed is a mismatch like any other
        outputs = {}
        verdict.mismatches["*"] = f"{type(error).__name__}: {error}"
    for name, recorded in case.expected.items():
        found = outputs.get(name)
        if isinstance(found, Unrecorded):
            verdict.unrecorded[name] = found.missing
            continue
        wrong = _compare(case, recorded, found)
        if wrong is None:
            continue
        reason = _reason(case, name, exceptions)
        if reason is None:
            verdict.mismatches[name] = wrong
        else:
            verdict.reasons[name] = reason
    return verdict


def _reason(case: Case, output: str, exceptions: list[Mapping[str, Any]]) -> str | None:
    for entry in exceptions:
        if fnmatch.fnmatchcase(case.id, entry["id"]) and any(fnmatch.fnmatchcase(output, o) for o in entry["outputs"]):
            return str(entry["reason"])
    return None


def _compare(case: Case, recorded: NDArray[Any] | list[Any], found: Any) -> str | None:
    """None where they agree, else what is wrong."""
    if found is None:
        return "not computed"
    if isinstance(recorded, list):
        return _compare_scores(recorded, found, case.tolerance)
    if isinstance(found, Valid):
        return None
    if isinstance(found, AtMost):
        return None if np.max(found.value) <= np.max(recorded) else f"{found.value} exceeds {recorded}"
    ours = found.detach().numpy() if isinstance(found, Tensor) else np.asarray(found)
    if ours.shape != recorded.shape:
        return f"shape {ours.shape}, recorded {recorded.shape}"
    mask = case.mask
    if mask is not None and recorded.shape == mask.shape:
        ours, recorded = ours[mask], recorded[mask]
    rtol, atol = case.tolerance
    ours, recorded = ours.astype(np.float64), recorded.astype(np.float64)
    close = np.isclose(ours, recorded, rtol=rtol, atol=atol, equal_nan=True)
    if close.all():
        return None
    with np.errstate(invalid="ignore"):
        worst = float(np.nanmax(np.abs(ours - recorded)[~close])) if np.isfinite(ours[~close]).any() else np.inf
    return f"{(~close).sum()} of {close.size} differ, by up to {worst:.3g}"


def _compare_scores(recorded: list[Any], found: list[Any], tolerance: tuple[float, float]) -> str | None:
    """Scores of a JSON case: numbers within the tolerance, everything else equal."""
    wrong = [place for place, (a, b) in enumerate(zip(recorded, found, strict=True)) if not _same(a, b, tolerance)]
    if not wrong:
        return None
    place = wrong[0]
    return f"{len(wrong)} of {len(recorded)} differ; item {place}: {found[place]!r}, recorded {recorded[place]!r}"


def _same(recorded: Any, found: Any, tolerance: tuple[float, float]) -> bool:
    if isinstance(recorded, list) and isinstance(found, list):
        return len(recorded) == len(found) and all(map(_same, recorded, found, [tolerance] * len(found)))
    if isinstance(recorded, int | float) and isinstance(found, int | float):
        return bool(np.isclose(found, recorded, rtol=tolerance[0], atol=tolerance[1]))
    return bool(recorded == found)
