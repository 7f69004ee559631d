"""The parts of the `hf` engine that are pure: draws, masks, the slot table, the waiting line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generators.engines.hf.model.attention_masks import MaskBuilder
from rollmesh.generators.engines.hf.sampling import RowSampling, draw, next_uniform
from rollmesh.generators.engines.hf.slot_table import RunningSequence, SlotTable
from rollmesh.generators.engines.hf.waiting_queue import WaitingQueue
from rollmesh.generators.engines.types import GenerationRequest, SamplingParams
from rollmesh.mesh.trajectory.versions import PolicyVersion

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


def column(value: float, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, 1), value, dtype=dtype)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 3, 1.0), (1.5, 5, 0.7)]
)
def test_draws_follow_the_stated_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """Frequencies and log-probs agree with a distribution computed independently in numpy."""
    logits = torch.tensor([2.0, -1.0, 0.5, 1.5, 0.0, -3.0, 1.0])
    weights = np.exp(logits.numpy() / temperature)
    order = np.argsort(-weights)
    kept = order[:top_k] if top_k else order
    mass = np.cumsum(weights[kept] / weights[kept].sum())
    kept = kept[: int(np.searchsorted(mass, top_p) + 1)]
    expected = np.zeros(7)
    expected[kept] = weights[kept] / weights[kept].sum()

    rows = 40_000
    uniform = torch.from_numpy(next_uniform(np.arange(1, rows + 1, dtype=np.uint64)))
    sampling = RowSampling(
        temperature=column(temperature, rows, torch.float32),
        greedy=None,
        top_k=column(top_k, rows, torch.int64),
        top_p=column(top_p, rows, torch.float32),
    )
    ids, log_probs = draw(logits.expand(rows, -1), uniform, sampling)
    frequency = np.bincount(ids.numpy(), minlength=7) / rows
    np.testing.assert_allclose(frequency, expected, atol=0.01)
    np.testing.assert_allclose(log_probs.numpy(), np.log(expected[ids.numpy()]), atol=1e-5)


def test_rows_have_their_own_parameters() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    sampling = RowSampling(
        temperature=torch.tensor([[1.0], [0.5], [1.0]]),
        greedy=torch.tensor([True, False, False]),
        top_k=torch.tensor([[0], [0], [1]]),
        top_p=torch.ones(3, 1),
    )
    ids, log_probs = draw(logits, torch.full((3,), 0.999999, dtype=torch.float64), sampling)
    best = logits.argmax(-1)
    assert ids[0] == best[0]
    assert ids[2] == best[2]
    assert log_probs[2] == 0
    torch.testing.assert_close(log_probs[0], torch.log_softmax(logits[0], -1)[best[0]])
    torch.testing.assert_close(log_probs[1], torch.log_softmax(logits[1] / 0.5, -1)[ids[1]])


@given(st.integers(0, 2**64 - 1), st.integers(1, 50))
def test_uniforms_depend_on_the_row_alone(seed: int, steps: int) -> None:
    alone = np.array([seed], dtype=np.uint64)
    among = np.array([1, seed, 2], dtype=np.uint64)
    for _ in range(steps):
        one, three = next_uniform(alone), next_uniform(among)
        assert 0 <= one[0] < 1
        assert one[0] == three[1]


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_masks(window: int, columns: int, data: st.DataObject) -> None:
    """Every query sees itself and what stands before it, a sliding layer no further back than its window."""
    begin = data.draw(st.integers(0, columns - 1))
    builder = MaskBuilder(("sliding_attention", "full_attention"), window, torch.float32, torch.device("cpu"))
    prefill = builder.prefill(begin, columns)
    decode = builder.decode(torch.arange(columns), columns)
    assert isinstance(prefill, dict)
    assert isinstance(decode, dict)
    for kind, reach in (("full_attention", columns), ("sliding_attention", window)):
        for query in range(columns):
            visible = [column <= query and query - column < reach for column in range(columns)]
            if query >= begin:
                assert (prefill[kind][0, 0, query - begin] == 0).tolist() == visible
            assert (decode[kind][query, 0, 0] == 0).tolist() == visible


def running(name: str, version: PolicyVersion = V1, **sampling: object) -> RunningSequence:
    request = GenerationRequest(name, [1], SamplingParams(**sampling))  # type: ignore[arg-type] # test shorthand
    return RunningSequence(request, [(0, version)], None)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=60))
def test_the_table_keeps_every_sequence_whole(commands: list[tuple[int, int]]) -> None:
    """Rows opened, grown, closed and moved at random: each result is exactly what was recorded for its request."""
    table = SlotTable(4)
    expected: dict[str, list[int]] = {}
    rows: dict[int, str] = {}
    for serial, (kind, number) in enumerate(commands):
        if kind == 0 and table.free:
            name = f"r{serial}"
            row = table.open(running(name), tuple(range(1, 2 + number % 5)), 1000, serial)
            assert row not in rows
            rows[row] = name
            expected[name] = []
        elif kind == 1 and rows:
            row = sorted(rows)[number % len(rows)]
            if expected[rows[row]]:
                result = table.close(row, "length")
                assert result.sampled.response_ids.tolist() == expected[rows[row]]
                assert len(result.sampled.versions) == len(expected[rows[row]])
                del rows[row]
        elif kind == 2:
            while table.holes:
                move = table.next_move()
                if move is not None:
                    rows[move[1]] = rows.pop(move[0])
            assert sorted(rows) == list(range(table.rows))
        elif not table.holes and table.rows:
            tokens = np.arange(table.rows) + 10 * serial
            fresh = [row for row in rows if not expected[rows[row]]]
            table.position[: table.rows] += 1
            table.position[fresh] = table.prompt_length[fresh]
            table.record(tokens, np.zeros(table.rows, np.float32))
            for row, name in rows.items():
                expected[name].append(int(tokens[row]))
        assert table.active == len(rows)


def test_a_request_that_fits_no_row_takes_none() -> None:
    table = SlotTable(2)
    table.open(running("good"), (1, 2), 10, 0)
    for holes in (0, 1):
        with pytest.raises(OverflowError):
            table.open(running("bad", top_k=2**63), (1, 2), 10, 0)
        assert (table.active, table.rows, len(table.holes)) == (1 - holes, 1, holes)
        assert [table.running[row] is None for row in range(2)] == [bool(holes), True]
        assert table.longest == (0 if holes else 2)
        if not holes:
            table.close(0, "aborted")


def waiting_requests(*names: str, pinned: bool = False, prompt: tuple[int, ...] = (1, 2)) -> list[GenerationRequest]:
    return [GenerationRequest(name, prompt, SamplingParams(), pinned) for name in names]


def roomy(count: int, longest: int) -> bool:
    return True


def test_line_starts_in_order_and_pinned_first_while_a_swap_waits() -> None:
    line = WaitingQueue()
    line.add(waiting_requests("a", "b"))
    line.add(waiting_requests("p", "q", pinned=True))
    line.add(waiting_requests("c"))
    assert [item.request.request_id for item in line.pop_waiting(1, pinned_only=False, fits=roomy)] == ["a"]
    assert [item.request.request_id for item in line.pop_waiting(5, pinned_only=True, fits=roomy)] == ["p", "q"]
    assert line.pinned == 0
    assert [item.request.request_id for item in line.pop_waiting(5, pinned_only=False, fits=roomy)] == ["b", "c"]


def test_equal_prompts_are_prefilled_once_and_ahead() -> None:
    line = WaitingQueue()
    line.add(waiting_requests("a", "b", "c") + waiting_requests("d", prompt=(7,)))
    taken = line.pop_waiting(2, pinned_only=False, fits=roomy)
    assert taken[0].prompt is taken[1].prompt
    assert [prompt.ids for prompt in line.to_prefill(taken, ahead=True)] == [(1, 2), (7,)]
