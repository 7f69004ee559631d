"""Settings of the off-policy correction, and their demands on a run.

Three policies are at play: behaviour (sampled the tokens), proximal (anchors the clip) and current. Invariant: a
token's loss is always its surrogate around the anchor, times a weight without gradient. A rejected token is counted
nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

from rollmesh.learner.algorithms.settings import Settings, SettingsError
from rollmesh.learner.algorithms.types import UpdatePlan

Mode = Literal["truncated_is", "masked_is", "behaviour", "none"]
Level = Literal["token", "sequence", "geometric"]
Proximal = Literal["recompute", "loglinear", "linear", "behaviour"]
Divergence = Literal["k1", "k2", "k3"]
Scope = Literal["token", "seq_sum", "seq_mean", "seq_max"]

SCOPES: tuple[Scope, ...] = ("token", "seq_sum", "seq_mean", "seq_max")
DIVERGENCES: tuple[Divergence, ...] = ("k1", "k2", "k3")
RULES = tuple(f"{scope}_{divergence}" for scope in SCOPES for divergence in DIVERGENCES)


class Rule(NamedTuple):
    """A rejection rule, read: tokens stay where low <= statistic <= high.

    Attributes:
        name: as in the configuration.
        scope: the statistic of a token, or the sum, mean or maximum over its sequence.
        divergence: the measure per token.
        low, high: bounds of the statistic itself (for k1: logarithms of the bounds of the ratio).
    """

    name: str
    scope: Scope
    divergence: Divergence
    low: float
    high: float


@dataclass(frozen=True)
class CorrectionSettings(Settings):
    """Settings of the correction. r is the ratio proximal / behaviour of a token.

    Weights (`mode`):

    `truncated_is` (default)
        The clip anchors at the proximal policy, and the loss is weighted with w = min(r, cap), at least `floor`,
        without gradient. Truncated importance sampling: Ionides 2008, eq. 3; with a proximal policy of its own it is
        decoupled PPO, arXiv:2110.00641, eq. 3.
    `masked_is`
        w = r where floor <= r <= cap, else 0 (IcePop). Tokens with weight 0 still count in the denominators.
    `behaviour`
        The clip anchors at the behaviour policy, no weights: off-policy PPO. Never an extra forward pass.
    `none`
        The clip anchors at the proximal policy and nothing weighs the tokens: biased as soon as the data is stale.

    The keys of `rollout_correction` in verl, in these words: `rollout_is` is `level`, and `rollout_is_batch_normalize`
    is `normalize`. `rollout_is_threshold: 2.0` is `cap` with mode `truncated_is`, `"0.5_2.0"` is `floor` and `cap` with
    mode `masked_is`. `rollout_rs` and `rollout_rs_threshold` are the keys and values of `reject`; `bypass_mode` with
    `ppo_clip` is mode `behaviour`. TRL's `token_truncate`, `token_mask`, `sequence_truncate` and `sequence_mask` name
    `level` and `mode`. AReaL's `rejection_sampling` with action `clamp` is `cap` and `floor`, with action `mask` it is
    `cap: .inf` and a rule of `reject`. (AReaL measures from proximal to behaviour: its bounds of a ratio are the
    reciprocals of ours.)

    Attributes:
        mode: see above.
        level: the ratio that weighs a token: its own, that of its whole sequence, or the geometric mean over the
            sequence. The ratio of the whole sequence is the product over the tokens: unbiased for the sequence's
            return, of high variance. `token` has the least variance and ignores what the earlier tokens did to the
            distribution of states: the usual choice.
        cap: largest weight, at least 1: what on-policy data has. 2 bounds the variance and leaves most tokens alone.
        floor: smallest weight; 0: none.
        normalize: divide the weights by their mean over the batch (self-normalized importance sampling). Then the size
            of the step does not depend on the drift.
        reject: rule -> threshold. Rules are `token_`, `seq_sum_`, `seq_mean_` or `seq_max_` with `k1`, `k2` or `k3`.
            With d = log r per token, k1 = -d, k2 = d^2 / 2, k3 = r - 1 - d: Schulman's estimators of
            KL(behaviour || proximal). Other scopes than the token keep or reject a sequence as a whole. For k1 the
            threshold bounds the ratio behaviour / proximal, 1 / r: `[lo, hi]` or verl's `"lo_hi"`, a single number u is
            [1/u, u]. For k2 and k3 it is the largest value.
        veto: a sequence is rejected if r of any token is below this; 1e-4 is usual. None: off.
        max_age: tokens that are older, in versions, are rejected. None: off.
        second_moment: reject the tokens with the largest d^2 until the mean of the others is below this (M2PO,
            arXiv:2510.01161, alg. 1; 0.04 there). None: off.
        proximal: where the proximal log-probs come from when a batch takes several optimizer steps. `recompute`: one
            more forward pass before the first. `loglinear` (in log-probs) and `linear` (in probabilities): interpolated
            between behaviour and current by the token's age, without one. `behaviour`: the behaviour policy itself.
        accept_uncorrected: allow mode `none` although data can be stale.
    """

    mode: Mode = "truncated_is"
    level: Level = "token"
    cap: float = 2.0
    floor: float = 0.0
    normalize: bool = False
    reject: dict[str, Any] = field(default_factory=dict)
    veto: float | None = None
    max_age: int | None = None
    second_moment: float | None = None
    proximal: Proximal = "recompute"
    accept_uncorrected: bool = False

    def __post_init__(self) -> None:
        if not self.cap >= 1.0:
            raise SettingsError("cap", f"expected a bound >= 1, got {self.cap}")
        if not 0.0 <= self.floor <= 1.0:
            raise SettingsError("floor", f"expected a bound in [0, 1], got {self.floor}")
        if self.veto is not None and not 0.0 < self.veto < 1.0:
            raise SettingsError("veto", f"expected a ratio in (0, 1), got {self.veto}", hint="1e-4 is usual")
        if self.max_age is not None and self.max_age < 0:
            raise SettingsError("max_age", f"expected a number of versions >= 0, got {self.max_age}")
        if self.second_moment is not None and not self.second_moment > 0.0:
            raise SettingsError("second_moment", f"expected a bound > 0, got {self.second_moment}")
        read_rules(self.reject)
        if self.proximal != "recompute" and self.needs_batch_log_probs:
            raise SettingsError(
                "proximal",
                f"{self.proximal!r} saves a forward pass which reject, veto, second_moment and normalize need",
                hint="use recompute, or leave those out",
            )

    @property
    def weighs(self) -> bool:
        """True where the mode has weights."""
        return self.mode in ("truncated_is", "masked_is")

    @property
    def rules(self) -> list[Rule]:
        """`reject`, read."""
        return read_rules(self.reject)

    @property
    def needs_batch_log_probs(self) -> bool:
        """True where something compares proximal and behaviour log-probs of the whole batch before its first step."""
        # A sequence's weight is that of all its tokens, also where some of them are too old to be trained.
        whole = self.normalize or (self.level != "token" and self.max_age is not None)
        rejects = bool(self.reject) or self.veto is not None or self.second_moment is not None
        return rejects or (self.weighs and whole)


def read_rules(reject: Mapping[str, Any]) -> list[Rule]:
    """Checks rules and thresholds.

    Raises:
        SettingsError: unknown rule, or a threshold that does not fit it.
    """
    rules = []
    for name, threshold in reject.items():
        if name not in RULES:
            raise SettingsError(f"reject.{name}", "unknown rule", hint=f"known: {', '.join(RULES)}")
        scope, _, divergence = name.rpartition("_")
        low, high = (_interval if divergence == "k1" else _largest)(name, threshold)
        rules.append(Rule(name, cast(Scope, scope), cast(Divergence, divergence), low, high))
    return rules


def _interval(name: str, threshold: Any) -> tuple[float, float]:
    """Bounds of the ratio behaviour / proximal, as logarithms."""
    if isinstance(threshold, str) and "_" in threshold:
        threshold = threshold.split("_")
    bounds = list(threshold) if isinstance(threshold, list | tuple) else [threshold]
    try:
        numbers = [float(bound) for bound in bounds]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) == 1 and numbers[0] > 1.0:
        numbers = [1.0 / numbers[0], numbers[0]]
    if len(numbers) != 2 or not 0.0 <= numbers[0] < numbers[1]:
        raise SettingsError(
            f"reject.{name}",
            f"expected bounds [lo, hi] of the ratio with 0 <= lo < hi, or one number above 1, got {threshold!r}",
        )
    low, high = (math.log(number) if number > 0.0 else -math.inf for number in numbers)
    return low, high


def _largest(name: str, threshold: Any) -> tuple[float, float]:
    try:
        high = float(threshold)
    except (TypeError, ValueError):
        high = -1.0
    if not high >= 0.0:
        raise SettingsError(f"reject.{name}", f"expected the largest value, a number >= 0, got {threshold!r}")
    return -math.inf, high


def check_corrects(settings: CorrectionSettings, plan: UpdatePlan) -> None:
    """Refuses a run without correction if its data can be stale.

    Raises:
        SettingsError: naming the setting.
    """
    if settings.mode == "none" and plan.max_staleness > 0 and not settings.accept_uncorrected:
        raise SettingsError(
            "correction.mode",
            f"'none' corrects for nothing while buffer.max_staleness is {plan.max_staleness}",
            hint="use truncated_is or behaviour, set buffer.max_staleness: 0, or correction.accept_uncorrected: true",
        )


def needs_proximal(settings: CorrectionSettings, plan: UpdatePlan) -> bool:
    """True where the proximal log-probs must be computed before the first optimizer step of a batch.

    With one optimizer step per batch the proximal policy is the current one, which the training pass computes anyway.
    """
    anchored = plan.updates > 1 and settings.mode != "behaviour" and settings.proximal == "recompute"
    return anchored or settings.needs_batch_log_probs
