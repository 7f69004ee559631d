"""Failed groups in words."""

from __future__ import annotations

from rollmesh.mesh.tables import EVAL, TRAIN
from rollmesh.report.failures import failed_groups, failures_text


def test_reasons_are_counted_and_the_cause_is_named() -> None:
    reasons = {"failed/too_few_scored": 2, "failed/payload_lost": 1, "evicted_stale/overdue": 5, "failed/withdrawn": 64}
    assert failed_groups(reasons) == 3
    assert failures_text(TRAIN, reasons, ["no such key"]) == (
        "3 training groups failed (payload_lost 1, too_few_scored 2); mostly: no such key"
    )


def test_an_evaluation_that_the_end_of_a_run_withdraws_is_no_failure() -> None:
    assert failures_text(EVAL, {"failed/withdrawn": 64, "trained": 200}) == ""
