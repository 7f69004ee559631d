"""The `hf` engine where memory is short, and where the model fails at one request: nothing else is disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.hf import kv_budget as budget
from rollmesh.generators.engines.hf.decoder import Decoder
from rollmesh.generators.engines.hf.failure_isolation import FailureIsolation, out_of_memory
from rollmesh.generators.engines.hf.kv_budget import COLUMNS, Budget, Shape, rounded
from rollmesh.generators.engines.hf.kv_cache import SlotCache
from rollmesh.generators.engines.hf.model import prefill
from rollmesh.generators.engines.hf.model.attention_masks import MaskBuilder
from rollmesh.generators.engines.hf.model.loading import load_model
from rollmesh.generators.engines.hf.model.prefill import Prefiller
from rollmesh.generators.engines.types import GenerationRequest
from tests.generators.engines import tiny
from tests.generators.engines.harness import V1, V2, request
from tests.generators.engines.hf_harness import HfHarness
from tests.generators.engines.tiny import ContractModel

# Bytes per token of the contract's model: two layers of two heads of 32 numbers, keys and values.
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4


@contextmanager
def serving(model: ContractModel, kv_tokens: int | None = None) -> Iterator[HfHarness]:
    """An engine with random weights and room for so many tokens."""
    harness = HfHarness(model, "keep", kv_gib=None if kv_tokens is None else kv_tokens * TOKEN_BYTES / 2**30)
    harness.update(V1, harness.random_weights(0))
    try:
        yield harness
    finally:
        harness.close()


def renamed(asked: list[GenerationRequest], word: str) -> list[GenerationRequest]:
    """The same requests under other ids."""
    return [replace(item, request_id=f"{word} {item.request_id}") for item in asked]


def no_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@given(st.integers(1, 9), st.integers(1, 40), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 2000)), max_size=20))
def test_storage_has_room_and_keeps_to_its_budget(slots: int, sixty_fours: int, wanted: list[tuple[int, int]]) -> None:
    budget, have = Budget(sixty_fours * COLUMNS + 17, slots), Shape(1, 1)
    for rows, columns in wanted:
        if not budget.fits(rows, columns):
            continue
        again = budget.shape(have, rows, columns)
        assert again.rows >= rows
        assert again.columns >= columns
        assert again.rows <= slots
        assert again.rows * again.columns <= budget.tokens
        have = again
        assert 0 < budget.usage(rows, columns) <= 1
    # Memory that is not needed any more is released step by step.
    for _ in range(20):
        have = budget.shape(have, 1, 1)
    assert have.rows <= 3
    assert have.columns <= 4 * COLUMNS


def test_with_little_room_fewer_are_decoded_and_none_is_lost(contract_model: ContractModel) -> None:
    """The last to start make room, with their tokens; seeded draws and log-probs are those of an engine with room."""
    asked = [
        request(f"{index}", [3 + index] * (50 + index % 4), max_tokens=24 + 3 * (index % 5), seed=index + 1)
        for index in range(HfHarness.slots + 2)
    ]
    with serving(contract_model) as harness:
        expected = harness.run(asked)
        assert harness.engine.status().preemptions == 0
    with serving(contract_model, rounded(harness.context)) as harness:
        found = harness.run(asked)
        status = harness.engine.status()
        assert status.preemptions > 0
        assert status.kv_usage == 0
        harness.freeze([request("one", max_tokens=harness.long)])
        assert 0 < (harness.engine.status().kv_usage or 0) <= 0.5
        decoder: Decoder = harness.engine._decoder  # type: ignore[attr-defined]  # a look inside
        assert decoder.release() <= rounded(harness.context) * TOKEN_BYTES
    for one, other in zip(expected, found, strict=True):
        assert other.sampled.response_ids.tolist() == one.sampled.response_ids.tolist()
        np.testing.assert_allclose(other.sampled.log_probs, one.sampled.log_probs, atol=1e-4)


def test_generators_on_one_host_do_not_count_on_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "free_host_bytes", lambda: 1000)
    cpu, weights = torch.device("cpu"), 100
    assert budget.free_bytes(cpu, weights) == 450
    for sharing in range(1, 12):
        together = sharing * (weights + budget.free_bytes(cpu, weights, sharing))
        assert together <= 1000 or budget.free_bytes(cpu, weights, sharing) == 0


def test_an_engine_that_shares_memory_with_too_many_is_refused(contract_model: ContractModel) -> None:
    harness = HfHarness(contract_model, "keep", sharing=10**9)
    try:
        with pytest.raises(EngineError, match=r"rollout\.replicas"):
            harness.update(V1, harness.random_weights(0))
    finally:
        harness.close()


def test_a_budget_below_the_longest_sequence_is_refused_with_the_first_weights(contract_model: ContractModel) -> None:
    with pytest.raises(EngineError, match=r"rollout\.hf\.kv_cache_gib"), serving(contract_model, 100):
        pass


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_long_prompt_is_prefilled_in_parts(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the same keys, values, logits and log-probs as in one pass."""
    torch.set_num_threads(1)
    model = tiny.build_model(tiny.configs()[name])
    folder = tiny.save_folder(tmp_path, model, None)
    loaded = load_model(folder, dtype="float32", device="cpu")
    loaded.model.load_state_dict(model.state_dict())
    masks = MaskBuilder(loaded.layer_types, loaded.window, torch.float32, torch.device("cpu"))
    prefiller = Prefiller(loaded.model, len(loaded.layer_types), masks)
    prompts = [list(range(3, 3 + length)) for length in (40, 7, 9, 64)]
    with torch.inference_mode():
        whole, log_probs = prefiller.run(prompts), prefiller.log_probs(prompts[3])
        monkeypatch.setattr(prefill, "CHUNK_TOKENS", 16)
        parts, again = prefiller.run(prompts), prefiller.log_probs(prompts[3])
    torch.testing.assert_close(again, log_probs)
    assert len({id(part.batch) for part in parts}) == 3
    for prompt, one, other in zip(prompts, whole, parts, strict=True):
        torch.testing.assert_close(other.batch.logits[other.member], one.batch.logits[one.member])
        for mine, theirs in zip(one.batch.cache.prefix_layers, other.batch.cache.prefix_layers, strict=True):
            for kind in ("keys", "values"):
                expected = getattr(mine, kind)[one.member, :, : len(prompt)]
                torch.testing.assert_close(getattr(theirs, kind)[other.member, :, : len(prompt)], expected)


def _fail_prefill(monkeypatch: pytest.MonkeyPatch, when: Callable[[list[int]], bool]) -> None:
    forward = Prefiller._forward

    def failing(self: Prefiller, sequences: Any, images: Any) -> Any:
        if when([len(ids) for ids in sequences]):
            no_memory()
        return forward(self, sequences, images)

    monkeypatch.setattr(Prefiller, "_forward", failing)


def test_a_prompt_that_finds_no_memory_alone_is_refused(
    contract_model: ContractModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(contract_model) as harness:
        _fail_prefill(monkeypatch, lambda lengths: max(lengths) > 40)
        harness.freeze([request("running", max_tokens=60)])
        harness.engine.submit([request("long", [5] * 50, max_tokens=4), request("short", max_tokens=4)])
        harness.resume()
        long, running, short = harness.collector.wait(["long", "running", "short"])
        assert "no memory for it, alone" in long.refusal
        assert (len(running.sampled.response_ids), len(short.sampled.response_ids)) == (60, 4)
        assert harness.collector.failure is None


@pytest.mark.parametrize("where", ["prefill", "step", "storage"])
def test_what_finds_no_memory_together_is_decoded_apart(
    where: str, contract_model: ContractModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every response is the one of an engine with memory enough."""
    # All grow into the second sixty-four columns of the storage, where that is what is short.
    prompt = 56 if where == "storage" else 1
    asked = [request(f"{index}", [3 + index] * prompt, max_tokens=12 + index, seed=index + 1) for index in range(7)]
    with serving(contract_model) as harness:
        expected = harness.run(asked)
        if where == "prefill":
            _fail_prefill(monkeypatch, lambda lengths: len(lengths) > 2)
        elif where == "step":
            decode = Decoder._decode

            def few(self: Decoder) -> torch.Tensor:
                if self.table.rows > 3:
                    no_memory()
                return decode(self)

            monkeypatch.setattr(Decoder, "_decode", few)
        else:
            _limit_storage(monkeypatch, 3 * 128)
        found = harness.run(renamed(asked, "again"))
        if where == "storage":
            # The next update asks for all of it again.
            monkeypatch.undo()
            harness.update(V2, harness.random_weights(0))
            before = harness.engine.status().preemptions
            harness.run(renamed(asked, "later"))
            assert before > 0
            assert harness.engine.status().preemptions == before
    for one, other in zip(expected, found, strict=True):
        assert other.sampled.response_ids.tolist() == one.sampled.response_ids.tolist()


def _limit_storage(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    resize = SlotCache.resize

    def limited(self: SlotCache, shape: Shape, used_rows: int) -> None:
        if shape.rows * shape.columns > tokens:
            no_memory()
        resize(self, shape, used_rows)

    monkeypatch.setattr(SlotCache, "resize", limited)


@pytest.mark.parametrize(
    "culprits",
    [
        {"3": 0},
        pytest.param({"0": 0}, marks=pytest.mark.exhaustive),
        pytest.param({"0": 9}, marks=pytest.mark.exhaustive),
        pytest.param({"4": 4}, marks=pytest.mark.exhaustive),
        {"0": 4, "1": 0, "2": 17, "7": 9, "8": 2},
    ],
    ids=str,
)
def test_a_sequence_at_which_steps_fail_is_found_among_others(
    culprits: dict[str, int], contract_model: ContractModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fails once it has so many tokens, which its result keeps; the others are answered as without it."""
    asked = [request(f"{index}", [3 + index], max_tokens=20, seed=index + 1) for index in range(9)]
    with serving(contract_model) as harness:
        expected = harness.run(asked)
        decode = Decoder._decode

        def failing(self: Decoder) -> torch.Tensor:
            for part in self.table.progress({f"again {name}": tokens for name, tokens in culprits.items()}):
                raise ValueError(f"odd: {part.request_id}")
            return decode(self)

        monkeypatch.setattr(Decoder, "_decode", failing)
        for one, other in zip(expected, harness.run(renamed(asked, "again")), strict=True):
            most = culprits.get(one.request_id)
            if most is None:
                assert (other.refusal, other.sampled.response_ids.tolist()) == ("", one.sampled.response_ids.tolist())
            else:
                assert f"the model failed at it 2 times: ValueError: odd: {other.request_id}" in other.refusal
                assert most <= len(other.sampled.response_ids) < 20
                assert (
                    other.sampled.response_ids.tolist()
                    == one.sampled.response_ids.tolist()[: len(other.sampled.response_ids)]
                )


def test_what_fails_only_beside_others_is_refused_to_none(
    contract_model: ContractModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [request(f"{index}", [3 + index], max_tokens=12, seed=index + 1) for index in range(7)]
    with serving(contract_model) as harness:
        expected = harness.run(asked)
        decode = Decoder._decode

        def failing(self: Decoder) -> torch.Tensor:
            if self.table.active > 2:
                raise ValueError("too many")
            return decode(self)

        monkeypatch.setattr(Decoder, "_decode", failing)
        for one, other in zip(expected, harness.run(renamed(asked, "again")), strict=True):
            assert (other.refusal, other.sampled.response_ids.tolist()) == ("", one.sampled.response_ids.tolist())


def test_where_no_step_can_be_made_it_is_the_engine_that_has_failed(
    contract_model: ContractModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are prefilled as ever; yet no request is blamed for it."""
    with serving(contract_model) as harness:

        def broken(*_: object) -> torch.Tensor:
            raise ValueError("no kernel")

        monkeypatch.setattr(harness.engine._decoder, "_forward_pass", broken)  # type: ignore[attr-defined]
        harness.engine.submit([request(f"{index}", [3 + index], max_tokens=9) for index in range(9)])
        assert "the model fails at every request: ValueError: no kernel" in str(harness.collector.wait_failure())
        assert not harness.collector.results


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."), True),
        (RuntimeError("shapes cannot be multiplied"), False),
    ],
)
def test_what_is_want_of_memory(error: Exception, memory: bool) -> None:
    assert out_of_memory(error) == memory


def test_who_goes_in_after_a_failure() -> None:
    isolation = FailureIsolation()
    assert isolation.start_limit(3, 5) == 5
    isolation.wait_for_room(2)
    assert [isolation.start_limit(active, 5) for active in (3, 2, 3)] == [0, 5, 5]
    isolation.isolate(2)
    for name in ("a", "b"):
        assert isolation.one_at_a_time
        assert isolation.start_limit(0, 5) == 1
        isolation.record_start([name])
        isolation.record_success([name], [])
        assert isolation.start_limit(1, 5) == 0, f"{name} has not decoded"
        isolation.record_success([], [])
    assert not isolation.one_at_a_time
    assert not isolation.blame("c")
    isolation.record_start(["c"])
    isolation.record_success(["c"], ["c"])
    assert not isolation.blame("c"), "it has passed in between"
    assert isolation.blame("c")
    isolation.forget(["c"])
    assert not isolation.blame("c")


def test_who_entered_when_a_step_failed_is_tried_alone() -> None:
    """Unless it fails without it too: then another one is to blame."""
    isolation = FailureIsolation()
    for others_pass in (True, False):
        isolation.isolate(2)
        assert isolation.start_limit(3, 5) == 1
        isolation.record_start(["a"])
        isolation.suspect_entering()
        assert (isolation.suspect, isolation.start_limit(3, 5)) == ("a", 0)
        if others_pass:
            isolation.record_success([], [])
        isolation.isolate(3)
        assert (isolation.suspect, isolation.start_limit(0, 5)) == (None, 1)
    isolation.record_start(["b"])
    isolation.suspect_entering()
    assert isolation.start_limit(0, 5) == 1, "the others have ended meanwhile"
    isolation.record_start(["c"])
    isolation.suspect_entering()
    isolation.forget(["c"])
    assert (isolation.suspect, isolation.start_limit(2, 5)) == (None, 1)
