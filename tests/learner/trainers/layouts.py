"""Trainings in the processes of one layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.trainers.example_loader import ExampleLoader
from rollmesh.learner.trainers.loop import LoopRules, TrainingLoop
from rollmesh.learner.trainers.objectives.interface import Preparation
from rollmesh.learner.trainers.objectives.registry import build_objective
from rollmesh.learner.trainers.rows import held_out_rows, training_rows
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.tokenizer_files import load_tokenizer
from rollmesh.testing.engine_cases import make_spec
from rollmesh.testing.worlds import Harness
from rollmesh.trainers import read_trainer_config

STEPS, PER_STEP = 2, 10


def losses(
    harness: Harness, command: str, model: Path, rows: Path, cache: Path, keys: dict[str, Any], token_budget: int
) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step, and of the held-out rows at the end, on the leader; collective."""
    torch.set_num_threads(1)
    config = read_trainer_config(command, {"model": {"path": str(model)}, "data": {"train": str(rows)}, **keys})
    objective = build_objective(config, ChatEncoder(load_tokenizer(model)))
    engine = harness.make(make_spec(model, head_bias=False, lora=config.learner.lora), objective.model_type)
    loader = ExampleLoader(engine.world)
    data = config.data.model_copy(update={"eval": config.data.train})
    train = training_rows(data, objective.form, seed=1, epochs=None)
    parts = Preparation(engine, loader)
    train = objective.prepare(parts, train, STEPS, cache)
    held_out = {
        label: objective.prepare(parts, own, own.steps(PER_STEP) or 0, cache.with_name(f"eval-{cache.name}"))
        for label, own in held_out_rows(data, objective.form, None).items()
    }
    found: list[tuple[float, float]] = []

    def report(_step: int, record: Any) -> None:
        found.append((record["actor/loss"], record["actor/grad_norm"]))
        if "eval/loss" in record:
            found.append((record["eval/loss"], 0.0))

    rules = LoopRules(STEPS, PER_STEP, token_budget)
    TrainingLoop(engine, objective.loss, loader, train, rules, report, held_out=held_out).run()
    loader.close()
    return found


def refusals(harness: Harness, model: Path, rows: Path) -> str:
    """The error of rows that one process alone cannot read; collective."""
    given = {"model": {"path": str(model)}, "data": {"train": str(rows), "max_tokens": 24, "on_long": "refuse"}}
    config = read_trainer_config("rm", given)
    objective = build_objective(config, ChatEncoder(load_tokenizer(model)))
    engine = harness.make(make_spec(model, head_bias=False), objective.model_type)
    loader = ExampleLoader(engine.world)
    source = training_rows(config.data, objective.form, seed=0, epochs=1).source
    try:
        loader.take(loader.begin(source, range(len(source))))
    except DataError as error:
        return error.message
    finally:
        loader.close()
    return ""
