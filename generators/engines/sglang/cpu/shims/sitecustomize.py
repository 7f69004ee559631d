"""Makes torchvision importable with a CPU build of torch.

The wheel's compiled operators belong to a CUDA build and do not load. Importing torchvision then fails because it
registers rules for operators that are not defined. Their bare definitions are enough: nothing here detects objects.
Python imports this module at its start, in each of the server's processes.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    import torch

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Defines the operators the moment torchvision is imported; finds nothing itself."""

    def __init__(self) -> None:
        # The definitions live as long as this object.
        self._library: torch.library.Library | None = None

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  # as Python calls it
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> None:
        """None: the next finder's turn."""
        if fullname == "torchvision" and self._library is None:
            import torch

            self._library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in _OPERATORS:
                self._library.define(schema)


sys.meta_path.insert(0, _BeforeTorchvision())
