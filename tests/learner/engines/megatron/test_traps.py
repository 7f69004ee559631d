"""Mistakes of a divided model that no other test would find.

Others make rows of `test_equivalence` differ. `test_checkpoint_matrix` has state without moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.engine_cases import MEMBERS, assert_same, make_sequences, truth
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.megatron import trap_case

torch.set_num_threads(1)

PADDING = 0
EMBEDDING = "model.embed_tokens.weight"


def layout(**parallel: Any) -> EngineLayout:
    return EngineLayout("trapped", 2, "megatron", {"parallel": ParallelSection(**parallel)})


IN_ALL = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "parallel",
    [{"tp": 2}, pytest.param({"tp": 2, "sp": 1}, marks=IN_ALL), pytest.param({"pp": 2}, marks=IN_ALL)],
    ids=str,
)
def test_the_embedding_of_padding_is_not_trained(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path], parallel: dict[str, int]
) -> None:
    """As in transformers, where prompts have that token."""
    sequences = make_sequences(3, 2)
    for number, sequence in enumerate(sequences):
        prompt = sequence.prompt_ids.copy()
        prompt[: 1 + number // MEMBERS] = PADDING
        sequences[number] = replace(sequence, prompt_ids=prompt)
    found = engine_worlds(layout(**parallel)).run(trap_case.gradient, engine_models["dense"], sequences)[0]
    expected = truth(engine_models["dense"], sequences).gradient
    assert_same(found, expected)
    assert not expected[EMBEDDING][PADDING].any()


@pytest.mark.parametrize(
    ("architecture", "parallel"),
    [
        pytest.param("tied", {"tp": 2}, marks=IN_ALL),
        # `test_contract` has the names and values of what leaves its stages.
        pytest.param("tied", {"pp": 2}, marks=IN_ALL),
        pytest.param("experts", {"ep": 2}, marks=IN_ALL),
        ("experts", {"tp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_an_exported_folder_gives_the_same_log_probs_in_transformers(
    engine_worlds: GetWorld,
    engine_models: Mapping[str, Path],
    architecture: str,
    parallel: dict[str, int],
    tmp_path: Path,
) -> None:
    answers = engine_worlds(layout(**parallel)).run(trap_case.export, engine_models[architecture], tmp_path)
    expected = truth(tmp_path, make_sequences(2)).outputs.log_probs
    for found in answers:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_receiver_of_a_delta_has_the_model_without_the_padding_of_its_vocabulary(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path], tmp_path: Path
) -> None:
    answer = engine_worlds(layout(tp=2)).run(trap_case.publish_delta, engine_models["dense"], tmp_path)[0]
    assert answer is not None
    received, own = answer
    assert_same(received, own, 0.0)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(engine_models["dense"]))
    shapes = {name: parameter.shape for name, parameter in plain.named_parameters()}
    assert {name: tensor.shape for name, tensor in received.items()} == shapes


def test_files_that_one_process_finds_broken_are_refused_by_all(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path]
) -> None:
    for parallel in ({"tp": 2}, {"pp": 2}):
        said = engine_worlds(layout(**parallel)).run(trap_case.refuse, engine_models["tied"])
        assert said == ["row 3 is broken"] * 2
