"""When two ways of computing the same model agree: the tolerances of the start-up probe, apart from all computing.

Differences are relative, so that neither the scale of the weights nor the size of the vocabulary counts: outputs by the
standard deviation of the outputs, gradients by their norm.

In float32 rounding makes up to 5e-6 (28 layers, experts among them), and the faintest of the mistakes known 1.4e-2. In
bfloat16 rounding makes about as much as one more rounding of the token embeddings: 0.01 in a shallow model, 0.07 in a
deep one, 0.8 where near ties decide which experts a token sees. So beyond a floor the tolerance there is a multiple of
that noise, which is measured on the model itself. What a sequence makes of its neighbours' tokens is no rounding: the
same kernels see the same shapes, and it came out as exactly 0 for every architecture and dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

REFUSED_HINT = "choose another model: docs/architectures.md lists what is proven"
# Of outputs and gradients against transformers' own.
FLOORS = {"float32": 1e-3, "bfloat16": 0.1}
# Of outputs whose sequence has other neighbours.
_LEAK = 1e-3
# Roundings that the whole model may make of one: 1.6 were seen, 3.6 where experts are chosen.
_ROUNDINGS = 6.0


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two computations are apart; NaN where one of them is not finite.

    Attributes:
        outputs: root mean square of the differences of log-probs or values, over the outputs' standard deviation.
        gradient: norm of the gradients' difference over the gradient's norm; None: the model is not trained.
    """

    outputs: float
    gradient: float | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the probe found.

    Attributes:
        truth: packed sequences against transformers' eager attention on each alone.
        leak: packed sequences against the same among others, over the outputs' standard deviation.
        noise: the truth, rounded once more, against itself; None: not measured.
    """

    truth: Difference
    leak: float
    noise: Difference | None = None

    def problem(self, floor: float) -> str | None:
        """What is wrong, with numbers; None where all is within the tolerances.

        Args:
            floor: of the compute dtype, see `FLOORS`.
        """
        noise = self.noise or Difference(0.0, 0.0)
        # Which of the two a token that changes its experts moves is chance. Written so that NaN is a problem.
        if not self.leak <= (most := max(_LEAK, noise.outputs)):
            return (
                f"a sequence gives other outputs among other neighbours, by {self.leak:.2g} of the "
                f"outputs' spread (at most {most:.2g})"
            )
        most = max(floor, _ROUNDINGS * max(noise.outputs, noise.gradient or 0.0))
        if not self.truth.outputs <= most:
            return (
                f"outputs differ from those of transformers' eager attention by {self.truth.outputs:.2g} of their "
                f"spread (at most {most:.2g})"
            )
        gradient = self.truth.gradient
        if gradient is not None and not gradient <= most:
            return (
                f"the gradient differs from that of transformers' eager attention by {gradient:.2g} of its norm (at "
                f"most {most:.2g})"
            )
        return None
