"""Notes where the host waits for the device: values read from it, and copies between the two."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.repository import REPOSITORY

_PACKAGE = REPOSITORY / "rollmesh"
_WATCHED = tuple(str(_PACKAGE / name) for name in ("learner", "mesh"))


class Watch:
    """Counts per place, `learner/...py:line`, of each kind since `clear`.

    Args:
        answers: the number that is read in a file, by its name; in all others it is 1.

    Attributes:
        reads: values that the host needed from the device: `item`, `float`, `tolist`.
        to_host, to_device: copies for which the host waits.
    """

    def __init__(self, answers: Mapping[str, int]) -> None:
        self._answers = answers
        self.reads: Counter[str] = Counter()
        self.to_host: Counter[str] = Counter()
        self.to_device: Counter[str] = Counter()
        self._modes: tuple[Any, ...] = (
            patch.object(FakeTensor, "tolist", lambda tensor: self._tolist(tensor)),
            _Copies(self),
        )

    def clear(self) -> None:
        for counter in (self.reads, self.to_host, self.to_device):
            counter.clear()

    def __enter__(self) -> Watch:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*(error or (None, None, None)))

    def _tolist(self, tensor: FakeTensor) -> Any:
        """A list of values is one reading; a FakeTensor would read element by element."""
        return _filled(tensor.shape, self.read(tensor))

    def read(self, tensor: FakeTensor) -> bool | float | int:
        """Notes that a value was needed, and makes one up."""
        place = _place()
        if tensor.device.type == "cuda":
            self.reads[place] += 1
        number = self._answers.get(place.rpartition("/")[2].partition(":")[0], 1)
        if tensor.dtype == torch.bool:
            return bool(number)
        return float(number) if tensor.dtype.is_floating_point else number


class _Copies(TorchDispatchMode):
    """Answers what asks for a value with one."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self._watch.read(args[0])
        result = func(*args, **kwargs)
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source, target = (args[0], result) if func is torch.ops.aten._to_copy.default else (args[1], args[0])
            waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            if waits and source.device.type != target.device.type:
                counter = self._watch.to_host if target.device.type == "cpu" else self._watch.to_device
                counter[_place()] += 1
        return result


def _filled(shape: Sequence[int], number: bool | float | int) -> Any:
    return [_filled(shape[1:], number) for _ in range(shape[0])] if shape else number


def _place() -> str:
    """The innermost line of ours, else of torch."""
    # Without the text of lines, which takes longer than the operation itself.
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
    for file, line in places:
        if file.startswith(_WATCHED):
            return f"{Path(file).relative_to(_PACKAGE)}:{line}"
    return next(f"{file}:{line}" for file, line in places if "torch" in file)
