"""The request to blame for a forward pass that fails, found by the stepper without an engine around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.hf.decode_turn import Stepper
from rollmesh.generators.engines.hf.decoder import Decoder
from rollmesh.generators.engines.hf.model.loading import load_model
from rollmesh.generators.engines.hf.waiting_queue import WaitingQueue
from rollmesh.generators.engines.types import REQUEST_ATTEMPTS, GenerationResult
from tests.generators.engines import tiny
from tests.generators.engines.harness import V1, request

# A token of the request that fails; no other has it.
BAD = 9


class Desk:
    """A stepper with a real decoder of a tiny model."""

    def __init__(self, model: torch.nn.Module, line: WaitingQueue, decoder: Decoder) -> None:
        self.model = model
        self._line = line
        self._decoder = decoder
        self._decoder.mark_serving(V1)

    def run(self) -> dict[str, GenerationResult]:
        """Four requests, to their ends."""
        prompts = {"before": [3, 4], "bad": [5, BAD], "after": [6, 7, 8], "last": [3, 5]}
        asked = [request(name, ids, max_tokens=6, seed=len(ids) + ids[0]) for name, ids in prompts.items()]
        self._line.add(asked)
        stepper, results = Stepper(self._decoder, self._line), {}
        for _ in range(100):
            step = stepper.turn(pinned_only=False)
            stepper.forget([result.request_id for result in step.results])
            results.update((result.request_id, result) for result in step.results)
            if len(results) == len(asked):
                return results
        raise AssertionError(f"only {sorted(results)} have ended")

    def fail(self, when: Callable[[list[list[int]]], bool]) -> list[list[list[int]]]:
        """Forward passes over such tokens raise; returns those that did."""
        forward, failed = self.model.forward, []

        def failing(*arguments: Any, **named: Any) -> Any:
            tokens = named["input_ids"].tolist()
            if when(tokens):
                failed.append(tokens)
                raise RuntimeError("illegal instruction")
            return forward(*arguments, **named)

        self.model.forward = failing  # type: ignore[method-assign]
        return failed


@pytest.fixture
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    torch.set_num_threads(1)
    model = tiny.build_model(tiny.configs()["qwen3"])
    loaded = load_model(tiny.save_folder(tmp_path_factory.mktemp("qwen3"), model, None), dtype="float32", device="cpu")
    loaded.model.load_state_dict(model.state_dict())
    with torch.inference_mode():
        yield Desk(loaded.model, WaitingQueue(), Decoder(loaded, slots=4))


def has_bad(sequences: list[list[int]]) -> bool:
    return any(BAD in ids for ids in sequences)


def test_only_the_request_that_fails_alone_is_refused(desk: Desk) -> None:
    expected = desk.run()
    assert not any(BAD in result.sampled.response_ids for result in expected.values())
    failed = desk.fail(has_bad)
    found = desk.run()
    assert (found["bad"].finish_reason, found["bad"].sampled.response_ids.tolist()) == ("aborted", [])
    assert f"failed at it {REQUEST_ATTEMPTS} times: RuntimeError: illegal instruction" in found["bad"].refusal
    assert [len(tokens) for tokens in failed] == [4, *[1] * REQUEST_ATTEMPTS], "together once, then it alone"
    for name in ("before", "after", "last"):
        assert (found[name].refusal, found[name].finish_reason) == ("", "length")
        assert found[name].sampled.response_ids.tolist() == expected[name].sampled.response_ids.tolist()
        np.testing.assert_allclose(found[name].sampled.log_probs, expected[name].sampled.log_probs, atol=1e-5)


def test_who_passes_the_second_time_is_answered(desk: Desk) -> None:
    expected = desk.run()
    tries: list[int] = []

    def twice(sequences: list[list[int]]) -> bool:
        if has_bad(sequences):
            tries.append(len(sequences))
        return has_bad(sequences) and len(tries) <= REQUEST_ATTEMPTS

    desk.fail(twice)
    found = desk.run()
    assert tries == [4, 1, 1]
    for name, result in found.items():
        assert (result.refusal, result.sampled.response_ids.tolist()) == (
            "",
            expected[name].sampled.response_ids.tolist(),
        )


def test_where_the_model_fails_at_anything_the_engine_has_failed(desk: Desk) -> None:
    desk.fail(lambda _: True)
    with pytest.raises(EngineError, match="the model fails at every request: RuntimeError: illegal instruction"):
        desk.run()
