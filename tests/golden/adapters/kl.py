"""KL estimators and the adaptive coefficient."""

from __future__ import annotations

import torch

from rollmesh.learner.algorithms.kl import kl_estimate, next_coefficient
from tests.golden.adapters import adapter
from tests.golden.case import Case, Outputs


@adapter(
    "B_kl",
    "verl",
    "kl_kl",
    "kl_abs",
    "kl_mse",
    "kl_low_var_kl",
    "kl_k1_plus",
    "kl_k2_plus",
    "kl_k3_plus",
    "kl_abs_plus",
    "kl_huge_low_var_kl",
    "kl_huge_k3_plus",
    "kl_k3_neg_inf",
)
def verl_estimate(case: Case) -> Outputs:
    estimator = case.settings["kl_penalty"]
    log_probs, reference = case.rows("log_prob"), case.rows("ref_log_prob")
    outputs = {"out_kl": kl_estimate(log_probs, reference, estimator)}
    if "out_grad_log_prob" in case.expected:
        flat = case.flat("log_prob").requires_grad_()
        kl_estimate(flat, case.flat("ref_log_prob"), estimator).sum().backward()
        outputs["out_grad_log_prob"] = case.padded(flat.grad)
    return outputs


@adapter("B_kl", "areal", "areal_k1", "areal_k2", "areal_k3")
def areal_estimate(case: Case) -> Outputs:
    bound = 10.0 if case.settings["apply_clamp"] else None
    log_probs, reference = case.rows("log_prob"), case.rows("ref_log_prob")
    return {"out_kl": kl_estimate(log_probs, reference, case.settings["kl_estimator"], bound=bound)}


@adapter("B_kl", "verl", "adaptive_kl_controller")
def adaptive_coefficient(case: Case) -> Outputs:
    settings = case.settings
    coefficients = [settings["init_kl_coef"]]
    for kl in case.inputs["kl_sequence"].tolist():
        coefficients.append(
            next_coefficient(
                coefficients[-1],
                kl,
                settings["n_steps"],
                target=settings["target_kl"],
                horizon=settings["horizon"],
            )
        )
    return {"out_values": torch.tensor(coefficients, dtype=torch.float64)}
