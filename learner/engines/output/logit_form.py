"""The way from a language model's last hidden states to its logits, read from the model's own code.

Models scale their logits or bound them by tanh, each under another name. Here the model's code is run once between a
backbone that gives known hidden states and an output layer that gives known products. It needs no weights. A way that
is not `LogitForm` is named, and such a model computes its logits itself, all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from rollmesh.mesh.errors import RollmeshError

# Products that reveal scale (a small one), bound (a huge one), and any other operation in between.
_PRODUCTS = (2**-10, 1e30, -0.5, 3.0, -20.0, 70.0, 0.0)
_TOKENS, _KEPT = 3, (2, 0)
_TOLERANCE = 1e-5
# Errors of a model's code that is not written as all others'.
_FOREIGN = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, RollmeshError)


@dataclass(frozen=True, slots=True)
class LogitForm:
    """Logits from the output layer's products: cap * tanh(scale * product / cap), of the first columns.

    Attributes:
        scale: factor of the product; Cohere and Granite have one.
        cap: bound of the logits, as Gemma's; infinite: none.
        columns: entries of the vocabulary; rows of the weight after them only pad it. None: all.
    """

    scale: float = 1.0
    cap: float = math.inf
    columns: int | None = None

    def apply(self, products: Tensor) -> Tensor:
        """Logits from products, in place."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        return products if math.isinf(self.cap) else products.div_(self.cap).tanh_().mul_(self.cap)

    def slopes(self, logits: Tensor) -> Tensor | float:
        """Derivatives of the logits by the products; logits: from `apply`."""
        if math.isinf(self.cap):
            return self.scale
        return (logits / self.cap).square_().neg_().add_(1.0).mul_(self.scale)


class UnknownFormError(Exception):
    """The logits come about in another way; the text names it."""


def read_logit_form(model: PreTrainedModel) -> LogitForm:
    """The form of a model's logits.

    Args:
        model: a causal language model, with or without weights (meta device).

    Raises:
        UnknownFormError: it has no plain output layer, or something else is done before or after it.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head) is not nn.Linear:
        raise UnknownFormError(f"its output layer is of the type {type(head).__name__}")
    backbone = find_backbone(model)
    if backbone is None or head not in model.children():
        raise UnknownFormError("it does not separate its backbone from its output layer")
    if any(True for _ in (*model.parameters(recurse=False), *model.buffers(recurse=False))):
        raise UnknownFormError("it has parameters outside of its backbone and its output layer")
    columns, width = head.weight.shape
    hidden = torch.randn(1, _TOKENS, width, generator=torch.Generator().manual_seed(0))
    products = torch.tensor(_PRODUCTS).repeat(math.ceil(columns / len(_PRODUCTS)) + 1)
    products = torch.stack([products[:columns], products[1 : columns + 1]])[None]
    seen: list[Tensor] = []
    given: list[_States] = []

    def give_states(*_: Any, **__: Any) -> _States:
        given.append(_States(last_hidden_state=hidden.clone()))
        return given[-1]

    def give_products(states: Tensor) -> Tensor:
        seen.append(states)
        return products.clone()

    try:
        with (
            torch.no_grad(),
            _computing(backbone, give_states),
            _computing(head, give_products),
        ):
            ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor(_KEPT)).logits
        (states,) = seen
        factor = _factor(states, hidden[:, list(_KEPT)])
        form = _fit(logits, products)
    except _FOREIGN as error:
        reason = f"{type(error).__name__}: {error}" if given else "its code does not call its backbone as a whole"
        raise UnknownFormError(reason) from error
    if factor != 1.0 and head.bias is not None:
        raise UnknownFormError("it scales hidden states before an output layer with a bias")
    return LogitForm(form.scale * factor, form.cap, form.columns)


def find_backbone(model: PreTrainedModel) -> PreTrainedModel | None:
    """The part of a model that gives hidden states, where it is one."""
    children = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return children[0] if len(children) == 1 else None


class _States(BaseModelOutputWithPast):
    """A backbone's output; all but the hidden states is absent."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _computing(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Computes, within the context, a function in place of the module's own."""
    # Hides the class's method until it is deleted.
    module.forward = function
    try:
        yield
    finally:
        del module.forward


def _factor(states: Tensor, hidden: Tensor) -> float:
    """The factor from the backbone's hidden states to those that the output layer gets."""
    if states.shape != hidden.shape:
        raise UnknownFormError(f"its output layer gets a tensor of another shape, {list(states.shape)}")
    factor = float((states * hidden).sum() / hidden.square().sum())
    if not torch.allclose(states, hidden * factor, rtol=_TOLERANCE, atol=_TOLERANCE * abs(factor)):
        raise UnknownFormError("it changes hidden states before its output layer")
    return 1.0 if abs(factor - 1.0) < _TOLERANCE else factor


def _fit(logits: Tensor, products: Tensor) -> LogitForm:
    columns = logits.shape[-1]
    small, huge = logits[0, 0, :2].tolist()
    scale = small / _PRODUCTS[0]
    capped = not math.isclose(huge, scale * _PRODUCTS[1], rel_tol=1e-3)
    form = LogitForm(
        scale=1.0 if abs(scale - 1.0) < _TOLERANCE else scale,
        cap=huge if capped else math.inf,
        columns=None if columns == products.shape[-1] else columns,
    )
    expected = form.apply(products[..., :columns].clone())
    if not torch.allclose(logits.float(), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise UnknownFormError("it computes its logits from the output layer in a way of its own")
    return form
