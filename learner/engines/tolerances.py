"""Tolerances of the start-up probe: decides, without computing, when two ways of computing a model agree.

Differences are relative, so that neither the scale of the weights nor the size of the vocabulary counts. Those of
outputs are divided by the standard deviation of the outputs, those of gradients by their norm. Unrelated outputs are
1.4 apart.

The computation is judged in float32, whatever the compute dtype. Rounding makes up to 5e-6 there (28 layers, experts
among them), and the smallest known mistake 1.4e-2. A model that jumps at the smallest change (sparse activations) gets
a multiple of its noise. The noise is measured on the model itself; the multiple is never enough to hide a mistake.

The compute dtype is then compared with float32, where the same computation is already proven. Rounding makes 0.01 in a
shallow model, 0.1 in a deep one, and more where near ties decide which experts a token sees. So beyond a floor the
tolerance is a multiple of the noise here as well, but less than the error of a gradient of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

REFUSED_HINT = "choose another model: docs/architectures.md lists what is proven"
ROUNDED_HINT = "set learner.param_dtype: float32, or choose another model"
# Tolerances of outputs and gradients against transformers' own, computed in the same dtype.
FLOORS = {"float32": 1e-3, "bfloat16": 0.1}
# However noisy a model is in float32: less than the faintest mistake.
_MOST = 1e-2
# However noisy it is in another compute dtype: a gradient of zero is 1 off.
_MOST_ROUNDED = 0.99
# Tolerance of outputs of a sequence with other neighbours: the same kernels see the same shapes, and exactly 0 was
# found.
_LEAK = 1e-3
# Roundings into which the whole model may turn one: 3.6 were seen.
_ROUNDINGS = 6.0
# Tolerances of the compute dtype against float32, in any model. A single token of the probe that changes its experts
# makes 0.2 of outputs; gradients of recurrences were up to 0.5 off.
_ROUNDED = 0.3
_ROUNDED_GRADIENT = 0.6


@dataclass(frozen=True, slots=True)
class Difference:
    """The distance of two computations; NaN where one of them is not finite.

    Attributes:
        outputs: root mean square of the differences of log-probs or values, over the outputs' standard deviation.
        gradient: norm of the gradients' difference over the gradient's norm; None: the model is not trained.
    """

    outputs: float
    gradient: float | None

    def larger(self) -> float:
        """The larger of the two: which of them a token that changes its experts moves is chance."""
        return max(self.outputs, self.gradient or 0.0)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The findings of the probe.

    Attributes:
        truth: packed sequences against transformers' eager attention on each alone.
        leak: packed sequences against the same among others, over the outputs' standard deviation.
        rounded: packed sequences in the compute dtype against transformers' eager attention in float32; None: the
            compute dtype is the one in which `truth` was found.
    """

    truth: Difference
    leak: float
    rounded: Difference | None = None

    def __str__(self) -> str:
        gradient = "" if self.truth.gradient is None else f", its gradient {self.truth.gradient:.0e}"
        return f"it computes as transformers does: its outputs are {self.truth.outputs:.0e} apart{gradient}"


def problem_of_structure(truth: Difference, leak: float, dtype: str, noise: float = 0.0) -> str | None:
    """The problem of a computation, with numbers; None where all is within the tolerances.

    Args:
        truth, leak: as in `Evidence`.
        dtype: both ways were computed in it.
        noise: effect of one more rounding of float32 on the truth.
    """
    # Written so that NaN is a problem.
    if not leak <= _LEAK:
        return (
            f"a sequence gives other outputs among other neighbours, by {leak:.2g} of the outputs' "
            f"spread (at most {_LEAK:.2g})"
        )
    floor = FLOORS[dtype]
    most = max(floor, min(_MOST, _ROUNDINGS * noise))
    return _too_far(truth, Difference(most, most), "transformers' eager attention")


def problem_of_rounding(rounded: Difference, noise: float = 0.0) -> str | None:
    """The problem of the compute dtype, with numbers; None where all is within the tolerances.

    Args:
        rounded: as in `Evidence`.
        noise: effect of one more rounding of the compute dtype on the truth.
    """
    allowed = min(_MOST_ROUNDED, _ROUNDINGS * noise)
    return _too_far(rounded, Difference(max(_ROUNDED, allowed), max(_ROUNDED_GRADIENT, allowed)), "float32")


def _too_far(found: Difference, most: Difference, truth: str) -> str | None:
    if not found.outputs <= most.outputs:
        return (
            f"outputs differ from those of {truth} by {found.outputs:.2g} of their spread (at most {most.outputs:.2g})"
        )
    if found.gradient is not None and not found.gradient <= (most.gradient or 0.0):
        return (
            f"the gradient differs from that of {truth} by {found.gradient:.2g} of its norm (at most "
            f"{most.gradient:.2g})"
        )
    return None
