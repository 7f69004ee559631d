"""A queue of jobs: bounded, in order, and over once it is closed."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.runtime.job_queue import JobQueue


@given(limit=st.integers(1, 5), jobs=st.lists(st.integers(), max_size=10))
def test_it_takes_as_many_as_fit_and_gives_them_in_order(limit: int, jobs: list[int]) -> None:
    queue: JobQueue[int] = JobQueue(limit)
    taken = [job for job in jobs if queue.put(job)]
    assert taken == jobs[:limit]
    assert len(queue) == len(taken)
    queue.close()
    assert not queue.put(0)
    assert [queue.get() for _ in taken] == taken
    assert queue.get() is None


def test_a_reader_waits_for_a_job_and_for_the_end() -> None:
    queue: JobQueue[int] = JobQueue(2)
    found: list[int | None] = []
    reader = threading.Thread(target=lambda: found.extend((queue.get(), queue.get())))
    reader.start()
    queue.put(7)
    queue.close()
    reader.join(180)
    assert found == [7, None]


def test_jobs_may_be_dropped_at_the_end() -> None:
    queue: JobQueue[int] = JobQueue(2)
    queue.put(1)
    assert not queue.wait_closed(0)
    queue.close(drop=True)
    assert queue.wait_closed(0)
    assert queue.get() is None
