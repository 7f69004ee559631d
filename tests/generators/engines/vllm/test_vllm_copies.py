"""The choice of the copy that decodes a job."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generators.engines.vllm.jobs.replica_routing import ReplicaRouter


@given(st.integers(1, 8), st.lists(st.integers(0, 12), max_size=60), st.randoms())
def test_a_prompt_has_one_copy_and_the_copies_share_the_jobs(count: int, prompts: list[int], random) -> None:
    copies, where, running = ReplicaRouter(count), {}, []
    for prompt in prompts:
        copy = copies.assign(prompt)
        loads = Counter(where[other] for other in running)
        if prompt in running:
            assert copy == where[prompt]
        else:
            assert loads[copy] == min(loads[other] for other in range(count))
        where[prompt] = copy
        running.append(prompt)
        if random.random() < 0.4:
            ended = running.pop(random.randrange(len(running)))
            copies.release(ended)
    for prompt in running:
        copies.release(prompt)
    assert copies._jobs == [0] * count
    assert not copies._replica
