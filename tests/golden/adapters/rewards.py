"""Scorers: one output per scorer's name, the scores of all strings of a case in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollmesh.reward_service.scorers import gsm8k_text, qa
from rollmesh.reward_service.scorers.mathematics import math_dapo, math_string
from tests.golden.adapters import adapter, math_verify_readings
from tests.golden.case import Case, Outputs


def _dapo(grade: math_dapo.Grade) -> dict[str, Any]:
    return {"score": grade.total, "acc": grade.correct, "pred": grade.answer}


def _value(**options: Any) -> Callable[[str, str], float]:
    return lambda solution, truth: float(math_verify_readings.grade(solution, truth, **options).correct)


def _value_or_none(**options: Any) -> Callable[[str, str], float | None]:
    def score(solution: str, truth: str) -> float | None:
        grade = math_verify_readings.grade(solution, truth, reading="latex", **options)
        return float(grade.correct) if grade.readable_truth else None

    return score


def _status(solution: str, truth: str) -> str:
    grade = math_verify_readings.grade(solution, truth, reading="box")
    if not grade.boxed:
        return "no_answer"
    if not grade.readable:
        return "unparsable"
    return "correct" if grade.correct else "wrong"


# Not here: the graders in PRM800K's line (verl_prime_math, slime_math_grade, slime_deepscaler); see exceptions.json.
SCORERS: dict[str, Callable[[str, str], Any]] = {
    "verl_gsm8k_strict": lambda s, t: gsm8k_text.grade(s, t, method="strict"),
    "verl_gsm8k_flexible": lambda s, t: gsm8k_text.grade(s, t, method="flexible"),
    "verl_gsm8k_strict_format0.1": lambda s, t: gsm8k_text.grade(s, t, method="strict", format_score=0.1),
    "verl_math_reward": math_string.grade,
    "verl_math_dapo": lambda s, t: _dapo(math_dapo.grade(s, t)),
    "verl_math_dapo_strict_box": lambda s, t: _dapo(math_dapo.grade(s, t, strict_box=True)),
    "verl_math_verify": _value(reading="expression_first"),
    "math_verify_default_raw_gold": _value(boxed_truth=False),
    "math_verify_default_boxed_gold": _value(),
    "trl_accuracy_reward_raw_gold": _value_or_none(boxed_truth=False),
    "trl_accuracy_reward_boxed_gold": _value_or_none(),
    "areal_math_verify_worker": _value(boxed_truth=False),
    "pipelinerl_math_status": _status,
}
QA_SCORERS: dict[str, Callable[[str, list[str]], Any]] = {
    "extracted": lambda s, _: qa.extract(s),
    "verl_qa_em": qa.grade,
    "verl_qa_em_format0.2": lambda s, t: qa.grade(s, t, format_score=0.2),
    "verl_qa_subem": lambda s, t: qa.grade(s, t, match="contains"),
    "slime_f1_first_gold": lambda s, t: list(qa.overlap(qa.extract(s), t[0])),
}


def _scores(case: Case, scorers: dict[str, Callable[[Any, Any], Any]]) -> Outputs:
    return {
        name: [score(item["solution"], item["ground_truth"]) for item in case.items] for name, score in scorers.items()
    }


@adapter("E_reward", "verl + math-verify + others", "gsm8k_style", "boxed_latex", "malformed_and_format")
def mathematics(case: Case) -> Outputs:
    return _scores(case, SCORERS)


@adapter("E_reward", "verl, slime", "qa_exact_match")
def questions(case: Case) -> Outputs:
    return _scores(case, QA_SCORERS)
