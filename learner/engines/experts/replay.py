"""Router replay: experts are those that the generator has chosen, their weights the learner's own (arXiv 2510.11370).

Routers of transformers and of Megatron-Core take the best of all experts by one call of `torch.topk`. Its answer is
replaced within a call of the router: by the given experts, and by what was to be compared at their places. So a
router's weights arise from its own logits, as each architecture makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rollmesh.mesh.errors import DataError

_TOP_K: frozenset[Any] = frozenset({torch.topk, torch.Tensor.topk})


class ReplayedChoice(TorchFunctionMode):
    """Has a router choose given experts, within the context.

    Args:
        given: int64 [T, K]. A token with an expert that does not exist, such as -1, keeps the router's choice.
        experts: of the layer.

    Attributes:
        replayed, drifted: float32 [T], 1 for tokens with given experts, and for those of them for which the router
            would have chosen others.
    """

    def __init__(self, given: Tensor, experts: int) -> None:
        super().__init__()
        self._given = given
        self._experts = experts
        self.replayed = self.drifted = torch.zeros(len(given), device=given.device)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Passes everything on, and replaces the choice among all experts."""
        result = func(*args, **(kwargs or {}))
        if func not in _TOP_K or args[0].shape[-1] != self._experts or result.indices.shape != self._given.shape:
            return result
        own = result.indices
        exists = ((self._given >= 0) & (self._given < self._experts)).all(-1, keepdim=True)
        chosen = torch.where(exists, self._given, own)
        differs = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
        self.replayed, self.drifted = exists[:, 0].float(), differs.float()
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


def layer_places(recorded: int, numbers: Sequence[int]) -> list[int]:
    """Where each layer with experts stands among those of recorded experts: of all layers, or of those with experts.

    Args:
        recorded: layers of the recorded experts.
        numbers: of the model's layers with experts.

    Raises:
        DataError: they are of another model.
    """
    if recorded == len(numbers):
        return list(range(recorded))
    if recorded > max(numbers):
        return list(numbers)
    raise DataError(
        f"the recorded experts are of {recorded} layers, and the model has experts in layers {list(numbers)}",
        hint="are generators of the same model? else set learner.router.replay: false",
    )
