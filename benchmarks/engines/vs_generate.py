"""Generation alone: transformers' `model.generate` and the hf engine, in turn, on the same weights.

Needs: nothing but the package; one core that is otherwise idle. Prints medians, spread and ratios for two regimes:

- `fixed`: every response has the same length, so that batching by itself decides nothing;
- `tails`: responses end at the end token with geometric lengths, capped. `generate` waits for the longest of each
  batch, the engine refills a slot as soon as it is free.

The engine also returns log-probs and version stamps, which `generate` does not compute. Ratios are given of wall time
and of processor time; the latter is the one to read where the machine was not quiet.

    python -m benchmarks.engines.vs_generate --json generation.json
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.interface import EngineListener, InferenceEngine
from rollmesh.generators.engines.types import (
    EngineSettings,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    TokenEvent,
)
from rollmesh.mesh.trajectory.versions import PolicyVersion

_VOCABULARY, _EOS, _PAD = 50, 1, 0
_PROMPT_TOKENS, _PER_PROMPT = 8, 8


@dataclass(frozen=True)
class Regime:
    """One workload: `sequences` responses, `batch` at a time, ended by the end token or at `max_tokens`."""

    name: str
    sequences: int
    batch: int
    max_tokens: int
    ends: bool


@dataclass(frozen=True)
class Timing:
    """Seconds, processor seconds and sampled tokens of one pass over a workload."""

    seconds: float
    cpu_seconds: float
    tokens: int


def build_model(hidden: int, layers: int, *, ends: bool) -> PreTrainedModel:
    """A Qwen3 architecture with seeded random weights: near-uniform draws, so that lengths are geometric."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_EOS if ends else None,
        pad_token_id=_PAD,
    )
    return Qwen3ForCausalLM(config).eval()


class Results(EngineListener):
    """A queue of what the engine says."""

    def __init__(self) -> None:
        self._queue: queue.Queue[list[GenerationResult] | EngineError] = queue.Queue()

    def on_results(self, results: list[GenerationResult]) -> None:
        self._queue.put(results)

    def on_tokens(self, events: list[TokenEvent]) -> None:
        raise AssertionError(f"{len(events)} events without a request")

    def on_failure(self, error: EngineError) -> None:
        self._queue.put(error)

    def get(self) -> list[GenerationResult]:
        """The results of one step; raises where the engine has failed."""
        batch = self._queue.get(timeout=300)
        if isinstance(batch, EngineError):
            raise batch
        return batch


def prompts(sequences: int) -> list[list[int]]:
    """One prompt per response; `_PER_PROMPT` neighbours share theirs."""
    draws = torch.Generator().manual_seed(1)
    unique = torch.randint(2, _VOCABULARY, (sequences // _PER_PROMPT, _PROMPT_TOKENS), generator=draws).tolist()
    return [ids for ids in unique for _ in range(_PER_PROMPT)]


def run_generate(model: PreTrainedModel, regime: Regime) -> Timing:
    """`model.generate`, batch after batch."""
    rows = prompts(regime.sequences)
    tokens = 0
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(rows), regime.batch):
        ids = torch.tensor(rows[start : start + regime.batch])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=regime.max_tokens,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            pad_token_id=_PAD,
        )
        response = output[:, ids.shape[1] :]
        if regime.ends:
            ended = response == _EOS
            lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, response.shape[1])
            tokens += int(lengths.sum())
        else:
            tokens += response.numel()
    return Timing(time.perf_counter() - begin, time.process_time() - begin_cpu, tokens)


def run_engine(engine: InferenceEngine, results: Results, regime: Regime) -> Timing:
    """The engine, with all requests queued at once."""
    sampling = SamplingParams(max_tokens=regime.max_tokens)
    requests = [GenerationRequest(str(index), ids, sampling) for index, ids in enumerate(prompts(regime.sequences))]
    tokens = finished = 0
    begin, begin_cpu = time.perf_counter(), time.process_time()
    engine.submit(requests)
    while finished < len(requests):
        batch = results.get()
        finished += len(batch)
        tokens += sum(len(result.sampled.response_ids) for result in batch)
    return Timing(time.perf_counter() - begin, time.process_time() - begin_cpu, tokens)


def compare(regime: Regime, *, hidden: int, layers: int, repeats: int) -> dict[str, object]:
    """Alternating passes; medians, spread and ratio of samples per second."""
    model = build_model(hidden, layers, ends=regime.ends)
    results = Results()
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        engine = create_engine("hf", Path(folder), EngineSettings(slots=regime.batch), results)
    engine.start()
    try:
        engine.update_weights(PolicyVersion(1, 0), model.state_dict().items(), "benchmark").result(60)
        run_generate(model, regime)
        run_engine(engine, results, regime)
        pairs = [(run_generate(model, regime), run_engine(engine, results, regime)) for _ in range(repeats)]
    finally:
        engine.stop()
    generate, ours = zip(*pairs, strict=True)
    # Lengths are drawn again in each pass: the engine's sequences per second are compared at equal tokens.
    ratios = [(a.seconds / a.tokens) / (b.seconds / b.tokens) for a, b in pairs]
    cpu_ratios = [(a.cpu_seconds / a.tokens) / (b.cpu_seconds / b.tokens) for a, b in pairs]
    return {
        "regime": asdict(regime),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "generate": _summary(generate, regime),
        "engine": _summary(ours, regime),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "cpu_ratio_median": statistics.median(cpu_ratios),
        "cpu_ratio_min": min(cpu_ratios),
        "cpu_ratio_max": max(cpu_ratios),
    }


def _summary(timings: tuple[Timing, ...], regime: Regime) -> dict[str, float]:
    seconds = [timing.seconds for timing in timings]
    return {
        "seconds_median": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "cpu_seconds_median": statistics.median(timing.cpu_seconds for timing in timings),
        "samples_per_s": regime.sequences / statistics.median(seconds),
        "tokens_per_s": statistics.median(timing.tokens / timing.seconds for timing in timings),
        "mean_length": statistics.mean(timing.tokens / regime.sequences for timing in timings),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--regime", choices=["fixed", "tails", "all"], default="all")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    regimes = [
        Regime("fixed", sequences=256, batch=64, max_tokens=16, ends=False),
        Regime("tails", sequences=512, batch=64, max_tokens=512, ends=True),
    ]
    report = []
    for regime in regimes:
        if arguments.regime not in (regime.name, "all"):
            continue
        result = compare(regime, hidden=arguments.hidden, layers=arguments.layers, repeats=arguments.repeats)
        report.append(result)
        print(f"{regime.name}: {result['parameters']} parameters, {arguments.threads} thread(s)")
        for side in ("generate", "engine"):
            values = result[side]
            assert isinstance(values, dict)
            print(
                f"  {side:9} {values['samples_per_s']:8.1f} samples/s  {values['tokens_per_s']:9.0f} tokens/s  "
                f"{values['seconds_median']:.3f} s ({values['seconds_min']:.3f}-{values['seconds_max']:.3f})  "
                f"mean length {values['mean_length']:.1f}"
            )
        for label, key in (("wall", "ratio"), ("processor", "cpu_ratio")):
            print(
                f"  ratio of {label} time: {result[f'{key}_median']:.2f} "
                f"({result[f'{key}_min']:.2f}-{result[f'{key}_max']:.2f})"
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
