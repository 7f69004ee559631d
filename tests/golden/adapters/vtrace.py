"""V-trace: trajectories [B, T] or [B, T, 1] that end and are cut in the middle of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.algorithms.advantages.vtrace import bootstrapped, leaky_clip, vtrace_errors
from rollmesh.learner.algorithms.numerics import log_ratio
from tests.golden.adapters import adapter
from tests.golden.case import Case, Outputs

FAMILY = "C_vtrace"


def _errors(case: Case) -> Tensor:
    shape = case.inputs["v_tm1"].shape
    return vtrace_errors(
        case.rows("r_t").flatten(),
        case.rows("v_tm1").flatten(),
        case.rows("v_t").flatten(),
        case.rows("rho_tm1").flatten(),
        torch.full((shape[0],), shape[1]),
        discounts=case.rows("discount_t").flatten(),
        lam=case.settings["lambda"],
        rho_bar=case.settings["clip_rho_threshold"],
        alpha=case.settings.get("alpha", 1.0),
    )


@adapter(FAMILY, "rlax", "vtrace_errors", "leaky_vtrace_errors")
def rlax_errors(case: Case) -> Outputs:
    return {"out_errors": _errors(case).view(case.inputs["v_tm1"].shape)}


@adapter(FAMILY, "rlax", "vtrace_td_error_and_advantage")
def rlax_advantage(case: Case) -> Outputs:
    values, shape = case.rows("v_tm1").flatten(), case.inputs["v_tm1"].shape
    errors = _errors(case)
    estimates = bootstrapped(
        case.rows("r_t").flatten(),
        values + errors,
        case.rows("v_t").flatten(),
        torch.full((shape[0],), shape[1]),
        discounts=case.rows("discount_t").flatten(),
        lam=case.settings["lambda"],
    )
    rho = leaky_clip(case.rows("rho_tm1").flatten(), case.settings["clip_pg_rho_threshold"])
    return {
        "out_errors": errors.view(shape),
        "out_pg_advantage": (rho * (estimates - values)).view(shape),
        "out_q_estimate": estimates.view(shape),
    }


@adapter(FAMILY, "torchrl", "vtrace")
def torchrl_vtrace(case: Case) -> Outputs:
    """The rest after a step is discounted by gamma where the trajectory terminates, too: it is cut there anyway."""
    settings, shape = case.settings, case.inputs["value"].shape
    values, following = case.rows("value").flatten(), case.rows("next_value").flatten()
    rewards, lengths = case.rows("reward").flatten(), torch.full((shape[0],), shape[1])
    ratios = log_ratio(case.rows("log_pi").flatten(), case.rows("log_mu").flatten()).exp()
    discounts = settings["gamma"] * (1 - case.rows("terminated").flatten().to(values.dtype))
    continuations = 1 - case.rows("done").flatten().to(values.dtype)
    errors = vtrace_errors(
        rewards,
        values,
        following,
        ratios,
        lengths,
        discounts=discounts,
        rho_bar=settings["rho_thresh"],
        c_bar=settings["c_thresh"],
        continuations=continuations,
        trace_discounts=settings["gamma"],
    )
    targets = values + errors
    estimates = bootstrapped(rewards, targets, following, lengths, discounts=discounts, continuations=continuations)
    advantages = leaky_clip(ratios, settings["rho_thresh"]) * (estimates - values)
    return {"out_advantages": advantages.view(shape), "out_value_targets": targets.view(shape)}
