"""One recorded case: inputs, expected outputs, and how padded arrays become the flat layout of the algorithms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.algorithms.types import GlobalCounts, Rollouts, TokenBatch

MASKS = ("in_response_mask", "in_mask", "in_loss_mask")


@dataclass(frozen=True)
class AtMost:
    """An output whose largest element may be smaller than the recorded one's."""

    value: NDArray[Any]


@dataclass(frozen=True)
class Valid:
    """An output without one right value: the adapter has asserted what must hold of it."""


@dataclass(frozen=True)
class Unrecorded:
    """An output that is a function of something which the case does not record: nothing to compare."""

    missing: str


Outputs = Mapping[str, Any]
"""Output name (`out_loss`, or a metric's name) -> array, number, `AtMost`, `Valid` or `Unrecorded`."""
Adapter = Callable[["Case"], Outputs]


@dataclass(frozen=True)
class Case:
    """A case of a manifest.

    Attributes:
        entry: as in the manifest.
        inputs: name without `in_` -> array.
        expected: name with `out_` -> array; `out_metrics` is spread into one entry per metric name. The scores of a
            JSON case: scorer -> list of scores, one per item.
        items: content of a JSON case (reward scoring).
    """

    entry: Mapping[str, Any]
    inputs: Mapping[str, NDArray[Any]]
    expected: Mapping[str, Any]
    items: list[dict[str, Any]]

    @property
    def id(self) -> str:
        return str(self.entry["id"])

    @property
    def key(self) -> tuple[str, str, str]:
        return self.entry["family"], self.entry["peer"], self.entry["name"]

    @property
    def settings(self) -> Mapping[str, Any]:
        """Hyperparameters."""
        settings: Mapping[str, Any] = self.entry["hyperparameters"]
        return settings

    @property
    def tolerance(self) -> tuple[float, float]:
        rtol, atol = self.entry["suggested_tolerance"]
        return rtol, atol

    @property
    def mask(self) -> NDArray[np.bool_] | None:
        """[B, T], where tokens count; None for cases without one."""
        for name in MASKS:
            if name in self.expected or name.removeprefix("in_") in self.inputs:
                found = self.inputs.get(name.removeprefix("in_"))
                if found is not None and found.ndim == 2:
                    return found.astype(bool)
        return None

    def flat(self, name: str) -> Tensor:
        """An input [B, T] as the trained tokens side by side, [R]."""
        mask = self.mask
        assert mask is not None
        return torch.from_numpy(np.ascontiguousarray(np.broadcast_to(self.inputs[name], mask.shape)[mask]))

    def rows(self, name: str) -> Tensor:
        """An input as it is."""
        return torch.from_numpy(np.ascontiguousarray(self.inputs[name]))

    def padded(self, values: Tensor) -> NDArray[Any]:
        """[R] (or [S]) back to [B, T]; 0 off the mask."""
        mask = self.mask
        assert mask is not None
        values = values.detach()
        if values.numel() == mask.shape[0] and values.numel() != mask.sum():
            return np.broadcast_to(values.numpy()[:, None], mask.shape) * mask
        result = np.zeros(mask.shape, dtype=values.numpy().dtype)
        result[mask] = values.numpy()
        return result

    @property
    def lengths(self) -> Tensor:
        """int64 [S], trained tokens per row."""
        mask = self.mask
        assert mask is not None
        return torch.from_numpy(mask.sum(1).astype(np.int64))

    @property
    def counts(self) -> GlobalCounts:
        lengths = self.lengths
        return GlobalCounts(int(lengths.sum()), int((lengths > 0).sum()))

    def tokens(self, **fields: Tensor) -> TokenBatch:
        """A micro-batch of the whole case; `fields` override what is not given by the inputs `advantages` and such."""
        mask = self.mask
        assert mask is not None
        rows = torch.from_numpy(np.nonzero(mask)[0])
        dtype = next(value.dtype for value in fields.values()) if fields else torch.float64
        zeros = torch.zeros(len(rows), dtype=dtype)
        values: dict[str, Any] = {
            "sequence_ids": rows,
            "sequence_lengths": self.lengths,
            "behaviour_log_probs": zeros,
            "advantages": zeros,
            "staleness": torch.zeros(len(rows), dtype=torch.int32),
            "sequence_rewards": torch.zeros(len(mask), dtype=dtype),
        }
        return TokenBatch(**(values | fields))

    def rollouts(self, **fields: Any) -> Rollouts:
        """The whole case as a batch; groups are the values of `in_index` where there are any, else one per row."""
        lengths = self.lengths
        index = self.inputs.get("index")
        if index is None:
            group_ids = torch.arange(lengths.numel())
        else:
            group_ids = torch.from_numpy(np.unique(index, return_inverse=True)[1].astype(np.int64))
        tensors = [value for value in fields.values() if isinstance(value, Tensor) and value.is_floating_point()]
        dtype = tensors[0].dtype if tensors else torch.float64
        total = int(lengths.sum())
        values: dict[str, Any] = {
            "group_ids": group_ids,
            "rewards": torch.zeros(lengths.numel(), dtype=dtype),
            "lengths": lengths,
            "behaviour_log_probs": torch.zeros(total, dtype=dtype),
            "staleness": torch.zeros(total, dtype=torch.int32),
            "truncated": torch.zeros(lengths.numel(), dtype=torch.bool),
        }
        return Rollouts(**(values | fields))


def read_manifest(path: Path) -> list[Case]:
    """All cases of a manifest; their files lie next to it."""
    return [read_case(path.parent, entry) for entry in json.loads(path.read_text(encoding="utf-8"))["cases"]]


def read_case(folder: Path, entry: Mapping[str, Any]) -> Case:
    """One case of a manifest in `folder`."""
    file = folder / entry["file"]
    if file.suffix == ".json":
        items: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        scores = {name: [item["scores"][name] for item in items] for name in items[0]["scores"]}
        return Case(entry, {}, scores, items)
    with np.load(file) as data:
        arrays = {name: data[name] for name in data.files}
    expected = {name: value for name, value in arrays.items() if name.startswith("out_") and name != "out_metrics"}
    if "out_metrics" in arrays:
        expected |= dict(zip(entry["metric_names"], arrays["out_metrics"], strict=True))
    inputs = {name.removeprefix("in_"): value for name, value in arrays.items() if name.startswith("in_")}
    return Case(entry, inputs, expected, [])
