"""Off-policy correction: weights and rejection of tokens that another policy sampled."""

from rollmesh.learner.algorithms.correction.apply import anchor_and_weights, correct_batch, drift_metrics
from rollmesh.learner.algorithms.correction.metrics import diagnostics, kept_metrics, rule_metrics, weight_metrics
from rollmesh.learner.algorithms.correction.ratios import importance_weights, interpolated_proximal
from rollmesh.learner.algorithms.correction.rejection import rejections
from rollmesh.learner.algorithms.correction.settings import CorrectionSettings, check_corrects, needs_proximal

__all__ = [
    "CorrectionSettings",
    "anchor_and_weights",
    "check_corrects",
    "correct_batch",
    "diagnostics",
    "drift_metrics",
    "importance_weights",
    "interpolated_proximal",
    "kept_metrics",
    "needs_proximal",
    "rejections",
    "rule_metrics",
    "weight_metrics",
]
