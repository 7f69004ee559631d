"""Log-probs, entropies and squares from logits: values and gradients of plain softmax, chunk by chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollmesh.learner.engines.output.log_probs import token_log_probs
from rollmesh.learner.engines.output.softmax_pieces import Targets

torch.set_num_threads(1)

# Many rows of a wide vocabulary: several chunks, the last one smaller.
WIDE = (301, 4099)


def make_case(rows: int, vocabulary: int, seed: int = 0, forbidden: float = 0.0):
    """Logits (with this share forbidden), labels that are allowed, one temperature per row."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=random) * 3
    labels = torch.randint(0, max(vocabulary, 1), (rows,), generator=random)
    if forbidden:
        banned = torch.rand(rows, vocabulary, generator=random) < forbidden
        banned[torch.arange(rows), labels] = False
        logits[banned] = -torch.inf
    return logits, labels, 0.5 + torch.rand(rows, generator=random)


def reference(logits: Tensor, labels: Tensor, temperatures: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and sums of squares in float64 by autograd's own operations."""
    scaled = logits.double() / (temperatures[:, None] if isinstance(temperatures, Tensor) else temperatures)
    # Where a token is forbidden, finite stand-ins: autograd of softmax knows no 0 * inf.
    log_p = torch.log_softmax(scaled.clamp_min(-1e5), -1)
    p = log_p.exp()
    return log_p.gather(1, labels[:, None])[:, 0], -(p * log_p).sum(-1), p.square().sum(-1)


@pytest.mark.parametrize("shape", [(1, 1), (5, 48), (64, 7), WIDE])
@pytest.mark.parametrize("forbidden", [0.0, 0.3])
def test_values_are_those_of_softmax(shape, forbidden):
    logits, labels, temperatures = make_case(*shape, forbidden=forbidden)
    for at in (temperatures, 1.0, 0.7):
        found = token_log_probs(logits, Targets(labels, at, sum_pi_squared=True))
        for value, wanted in zip(
            (found.log_probs, found.entropy, found.sum_pi_squared), reference(logits, labels, at), strict=True
        ):
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("shape", [(1, 1), (5, 48), WIDE])
@pytest.mark.parametrize("forbidden", [0.0, 0.3])
@pytest.mark.parametrize("wanted", ["log_probs", "entropy", "both"])
def test_gradients_are_those_of_autograd(shape, forbidden, wanted):
    logits, labels, temperatures = make_case(*shape, forbidden=forbidden)
    random = torch.Generator().manual_seed(1)
    weights = torch.randn(2, shape[0], generator=random, dtype=torch.float64)
    weights[0 if wanted == "entropy" else 1] *= wanted == "both"

    def total(log_probs: Tensor, entropy: Tensor) -> Tensor:
        parts = []
        if wanted != "entropy":
            parts.append((log_probs * weights[0]).sum())
        if wanted != "log_probs":
            parts.append((entropy * (weights[1] if wanted == "both" else 1.0)).sum())
        return torch.stack(parts).sum()

    ours, exact = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    total(*token_log_probs(ours, Targets(labels, temperatures, entropy_gradient=True)).policy()).backward()
    log_probs, entropy, _ = reference(exact, labels, temperatures)
    total(log_probs, entropy).backward()
    torch.testing.assert_close(ours.grad, exact.grad, atol=2e-5, rtol=2e-4)


def test_entropy_and_squares_have_no_gradient_unless_asked():
    logits, labels, _ = make_case(5, 48)
    logits.requires_grad_()
    output = token_log_probs(logits, Targets(labels, sum_pi_squared=True))
    assert output.log_probs.requires_grad
    assert not output.entropy.requires_grad
    assert not output.sum_pi_squared.requires_grad
    assert token_log_probs(logits, Targets(labels)).sum_pi_squared is None
    asked = token_log_probs(logits, Targets(labels, entropy_gradient=True, sum_pi_squared=True))
    assert asked.entropy.requires_grad
    assert not asked.sum_pi_squared.requires_grad


def test_bfloat16_logits_lose_nothing_but_their_own_rounding():
    logits, labels, _ = make_case(*WIDE)
    rounded = logits.bfloat16().requires_grad_()
    output = token_log_probs(rounded, Targets(labels))
    exact, entropy, _ = reference(rounded.detach().float(), labels, 1.0)
    torch.testing.assert_close(output.log_probs.double(), exact, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(output.entropy.double(), entropy, atol=2e-5, rtol=2e-5)
    output.log_probs.sum().backward()
    assert rounded.grad.dtype == torch.bfloat16
    plain = rounded.detach().float().requires_grad_()
    reference(plain, labels, 1.0)[0].sum().backward()
    torch.testing.assert_close(rounded.grad.float(), plain.grad, atol=1e-6, rtol=5e-3)


@given(
    rows=st.integers(0, 6),
    vocabulary=st.integers(1, 9),
    scale=st.sampled_from([1e-3, 1.0, 1e3, 1e30]),
    forbidden=st.sampled_from([0.0, 0.5, 1.0]),
    forbidden_label=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80)
def test_nothing_becomes_nan(rows, vocabulary, scale, forbidden, forbidden_label, seed):
    logits, labels, temperatures = make_case(rows, vocabulary, seed, forbidden)
    logits = logits * scale
    if forbidden_label and rows and vocabulary > 1:
        logits[0] = 0.0
        logits[0, labels[0]] = -torch.inf
    logits.requires_grad_()
    output = token_log_probs(logits, Targets(labels, temperatures, entropy_gradient=True, sum_pi_squared=True))
    log_probs, entropy = output.policy()
    assert not log_probs.isnan().any()
    assert entropy.isfinite().all()
    assert bool((entropy >= -1e-6).all())
    assert output.sum_pi_squared.isfinite().all()
    # A loss passes nothing back to an impossible token.
    (log_probs.nan_to_num(neginf=0.0).sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()


def test_a_forbidden_label_has_probability_zero():
    logits = torch.zeros(2, 4, requires_grad=True)
    with torch.no_grad():
        logits[0, 1] = -torch.inf
    log_probs, _ = token_log_probs(logits, Targets(torch.tensor([1, 1]))).policy()
    assert log_probs[0] == -torch.inf
    log_probs.sum().backward()
    assert logits.grad.isfinite().all()


class _Largest(TorchDispatchMode):
    """Remembers the largest float32 tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_float32_tensor_spans_tokens_and_vocabulary():
    rows, vocabulary = 600, 4096
    logits, labels, _ = make_case(rows, vocabulary)
    half = logits.bfloat16().requires_grad_()
    with _Largest() as seen:
        output = token_log_probs(half, Targets(labels, 0.7, entropy_gradient=True, sum_pi_squared=True))
        (output.log_probs.sum() + output.entropy.sum()).backward()
    assert 0 < seen.elements < rows * vocabulary / 4
