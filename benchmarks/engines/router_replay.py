"""Router replay: the gap of log-probs between a generator and a learner that round differently, with it and without.

    python -m benchmarks.engines.router_replay docs/moe.md

The real `hf` engine samples in a low precision from random mixtures of experts, and records the experts of each token.
The learner's engine computes the same tokens in float32, once with its own router's choice and once with the
generator's. Its weights are those that the generator holds, rounded likewise. So all that differs is arithmetic. Half a
minute on a CPU.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.learner.generated_tables import fill_page
from benchmarks.learner.tiny_models import VOCABULARY, save_model
from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.types import (
    EngineSettings,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    TokenEvent,
)
from rollmesh.learner.algorithms.aggregation import aggregate
from rollmesh.learner.algorithms.docs_reference import markdown_table
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.registry import create_engine as create_learner
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.config.parallel import RouterSection
from rollmesh.mesh.config.rollout import HfSection
from rollmesh.mesh.trajectory.routing import ROUTED_EXPERTS, readable, split_prompt
from rollmesh.mesh.trajectory.versions import PolicyVersion

# The more layers and experts, the more near ties.
MODELS = {
    "4 layers, 32 experts, 4 chosen": {"num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 4},
    "8 layers, 64 experts, 8 chosen": {"num_hidden_layers": 8, "num_experts": 64, "num_experts_per_tok": 8},
}
PRECISIONS = ("float32", "bfloat16")
_PROMPTS, _PROMPT, _RESPONSE = 64, 8, 40
_WAIT_S = 300.0
_FAR = 0.2
_LOUDER = 8.0


class _Results:
    """Receives the results of an engine."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self.done = threading.Event()
        self.results: dict[str, GenerationResult] = {}
        self.failure: EngineError | None = None

    def on_results(self, results: list[GenerationResult]) -> None:
        self.results |= {result.request_id: result for result in results}
        if len(self.results) == self._expected:
            self.done.set()

    def on_tokens(self, events: list[TokenEvent]) -> None:
        pass

    def on_failure(self, error: EngineError) -> None:
        self.failure = error
        self.done.set()


def sample(folder: Path, precision: str) -> list[TrainSequence]:
    """Responses to random prompts, with the experts of their tokens."""
    rng = np.random.default_rng(0)
    prompts: list[NDArray[np.int32]] = [rng.integers(3, VOCABULARY, _PROMPT).astype(np.int32) for _ in range(_PROMPTS)]
    results = _Results(len(prompts))
    settings = EngineSettings(slots=32, dtype=precision, hf=HfSection(routed_experts=True))
    engine = create_engine("hf", folder, settings, results)
    engine.start()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision))
        engine.update_weights(PolicyVersion(1, 1), model.state_dict().items(), "").result(_WAIT_S)
        sampling = SamplingParams(max_tokens=_RESPONSE)
        engine.submit([GenerationRequest(str(number), ids.tolist(), sampling) for number, ids in enumerate(prompts)])
        if not results.done.wait(_WAIT_S) or results.failure is not None:
            raise results.failure or EngineError("the engine did not answer")
    finally:
        engine.stop()
    return [_sequence(prompt, results.results[str(number)]) for number, prompt in enumerate(prompts)]


def _sequence(prompt: NDArray[np.int32], result: GenerationResult) -> TrainSequence:
    of_prompt, of_response = split_prompt(result.side[ROUTED_EXPERTS], len(prompt))
    sampled = result.sampled
    return TrainSequence(
        prompt,
        sampled.response_ids,
        sampled.response_mask,
        sampled.log_probs,
        1.0,
        prompt_experts=readable(of_prompt, len(prompt)),
        response_experts=readable(of_response, len(sampled) - 1),
    )


def gap(folder: Path, sequences: Sequence[TrainSequence], *, replay: bool) -> tuple[Tensor, dict[str, float]]:
    """Differences of the learner's log-probs, float32 [R], and the metrics of a step."""
    model = ModelSection(path=str(folder), dtype="float32")
    spec = EngineSpec(model, OptimizerSection(lr=1e-6), total_steps=1, router=RouterSection(replay=replay))
    engine = create_learner(spec)
    try:
        batch = pack(sequences)
        (output,) = engine.infer([batch])
        engine.accumulate([batch], _surrogate, engine.global_counts([batch]))
        return output.policy()[0] - batch.tokens.behaviour_log_probs, engine.apply().metrics
    finally:
        engine.close()


def _surrogate(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
    return LossOutput(aggregate(-output.policy()[0], tokens, counts, "token_mean"), Metrics())


def measure(folder: Path, settings: dict[str, int], precision: str) -> list[str]:
    """The cells of a row."""
    save_model(folder, "qwen3_moe", **settings)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer, parameter in model.named_parameters():
            # As in trained models, an expert has a say, and the distribution of a token is not flat.
            if layer.endswith("down_proj") or layer == "lm_head.weight":
                parameter.mul_(_LOUDER)
    # Both sides begin with the same numbers.
    model.to(getattr(torch, precision)).float().save_pretrained(folder)
    sequences = sample(folder, precision)
    cells = []
    for replay in (False, True):
        difference, metrics = gap(folder, sequences, replay=replay)
        if replay:
            cells.insert(0, f"{metrics['router_drift']:.2%}")
        absolute = difference.abs()
        far = float((difference.exp().sub(1).abs() > _FAR).float().mean())
        cells += [f"{float(absolute.mean()):.2g}", f"{float(absolute.max()):.2g}", f"{far:.2%}"]
    return cells


def table() -> str:
    """The table of all models and precisions, as Markdown."""
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for (name, settings), precision in product(MODELS.items(), PRECISIONS):
            rows.append((name, precision, *measure(Path(root) / f"{len(rows)}", settings, precision)))
            print(*rows[-1], sep=" | ", file=sys.stderr)
    heads = ("mean", "largest", "ratio off by 20 %")
    own, replayed = ([f"{head}, {how}" for head in heads] for how in ("own choice", "replayed"))
    return markdown_table(("model", "generator", "drift", *own, *replayed), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    fill_page(arguments, __doc__, "router_replay", table)


if __name__ == "__main__":
    main()
