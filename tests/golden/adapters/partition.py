"""Dividing sequences over ranks: no worse than the recorded division; the assignment itself is free."""

from __future__ import annotations

import numpy as np

from rollmesh.learner.batching.partition import partition, sequence_cost
from tests.golden.adapters import adapter
from tests.golden.case import AtMost, Case, Outputs, Valid


@adapter("D_partition", "verl", "karmarkar_karp", "karmarkar_karp_equal_size", "greedy", "greedy_equal_size")
def division(case: Case) -> Outputs:
    costs, parts = case.inputs["seqlens"].tolist(), case.settings["k_partitions"]
    equal_size = case.settings["equal_size"]
    found = partition(costs, parts, equal_size=equal_size)
    assert sorted(index for members in found for index in members) == list(range(len(costs)))
    assert all(found) or len(costs) < parts
    sums = np.sort([sum(costs[index] for index in members) for members in found])
    sizes = np.sort([len(members) for members in found])
    return {
        "out_partition_sums_sorted": AtMost(sums),
        "out_max_min": AtMost(sums),
        "out_partition_sizes_sorted": sizes if equal_size else Valid(),
    }


@adapter("D_partition", "verl", "workload")
def workload(case: Case) -> Outputs:
    return {"out_workload": np.asarray([sequence_cost(tokens) for tokens in case.inputs["seqlens"].tolist()])}
