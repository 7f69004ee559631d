"""Value models: a scalar per trained token, exact under packing, micro-batches, recomputation and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rollmesh.learner.algorithms.value import value_loss
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.mesh.errors import DataError
from tests.learner.engines.models import ARCHITECTURES, make_critic, make_engine, make_model, make_sequences
from tests.learner.engines.test_gradients import assert_same
from tests.learner.engines.training import (
    critic_loss,
    gradients,
    make_batches,
    take_step,
    train_step,
    values,
    weights,
    with_returns,
)

torch.set_num_threads(1)


def add_head(folder, architecture: str, seed: int = 5) -> dict[str, torch.Tensor]:
    """Writes a value head into a model folder, as an exported critic has one."""
    random = torch.Generator().manual_seed(seed)
    size = 32
    head = {
        "value_head.weight": torch.randn(1, size, generator=random) * 0.3,
        "value_head.bias": torch.randn(1, generator=random),
    }
    save_file(load_file(folder / "model.safetensors") | head, folder / "model.safetensors")
    assert architecture in ARCHITECTURES
    return head


def plain_values(folder, head: dict[str, torch.Tensor], sequences: list[TrainSequence]):
    """Values by one eager forward pass per sequence; with the backbone, whose gradients a backward pass leaves."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    linear = nn.Linear(32, 1)
    linear.load_state_dict({name.rpartition(".")[2]: tensor for name, tensor in head.items()})
    found = []
    for sequence in sequences:
        ids = torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.response_ids])).long()
        hidden = model.base_model(ids[None], use_cache=False).last_hidden_state[0]
        # The value before a token stands at the token before it.
        before = linear(hidden)[len(sequence.prompt_ids) - 1 : -1, 0]
        found.append(before[torch.from_numpy(sequence.response_mask.astype(bool))])
    return torch.cat(found), model, linear


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_and_gradients_are_those_of_plain_forward_passes(tmp_path, architecture):
    folder = make_model(tmp_path / "model", architecture)
    head = add_head(folder, architecture)
    sequences = make_sequences(1)
    expected, model, linear = plain_values(folder, head, sequences)
    engine = make_critic(folder)
    batch = with_returns(pack(sequences))
    torch.testing.assert_close(values(engine, batch), expected.detach(), atol=1e-5, rtol=1e-5)

    tokens = batch.tokens
    value_loss(expected, tokens.old_values, tokens.returns)[0].mean().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    wanted |= {f"value_head.{name}": p.grad for name, p in linear.named_parameters()}
    take_step(engine, [batch], critic_loss)
    assert_same(gradients(engine), wanted, 1e-4)


def test_a_new_head_starts_at_zero_and_learns(model_folder):
    engine = make_critic(model_folder)
    (batch,) = make_batches(engine, seed=1, token_budget=1 << 20)
    assert values(engine, batch).abs().max() == 0.0
    losses = [take_step(engine, [batch], critic_loss).metrics["loss"] for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]


def test_there_is_no_vocabulary_to_compute(tmp_path):
    """Neither as a weight nor through a tied embedding: only the backbone and the head are left."""
    engine = make_critic(make_model(tmp_path / "model", "llama"))
    names = weights(engine).keys()
    assert {name for name in names if not name.startswith("model.")} == {"value_head.weight", "value_head.bias"}
    outputs = []
    for module in engine._runner.module.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, output: outputs.append(output.shape[-1]))
    (batch,) = make_batches(engine, seed=1, token_budget=1 << 20)
    values(engine, batch)
    assert 48 not in outputs


def test_bfloat16_keeps_the_head_in_float32(model_folder, tmp_path):
    folder = with_head(model_folder, tmp_path / "model")
    exact, rounded = make_critic(folder), make_critic(folder, param_dtype="bfloat16")
    try:
        inputs = []
        head = rounded._runner.module.get_submodule("value_head")
        head.register_forward_hook(lambda module, given, _: inputs.append((given[0].dtype, module.weight.dtype)))
        batch = pack(make_sequences(1))
        difference = (values(exact, batch) - values(rounded, batch)).abs().max()
        assert 0 < float(difference) < 0.5
        assert inputs == [(torch.float32, torch.float32)]
        train_step(rounded, seed=1, loss=critic_loss)
        assert {tensor.dtype for tensor in weights(rounded).values()} == {torch.float32}
    finally:
        rounded.close()


def test_the_folder_of_a_value_model_is_no_language_model(tmp_path):
    make_critic(make_model(tmp_path / "model", "llama")).export_hf(tmp_path / "exported")
    with pytest.raises(DataError, match=r"lacks weights: lm_head\.weight"):
        make_engine(tmp_path / "exported")


def test_a_reward_model_is_a_start_for_a_critic(model_folder, tmp_path):
    reward_model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1, dtype=torch.float32)
    reward_model.save_pretrained(tmp_path / "reward")
    engine = make_critic(tmp_path / "reward")
    torch.testing.assert_close(weights(engine)["value_head.weight"], reward_model.score.weight.detach())


def test_a_head_of_another_shape_is_refused(model_folder, tmp_path):
    classifier = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=3, dtype=torch.float32)
    classifier.save_pretrained(tmp_path / "classifier")
    with pytest.raises(DataError, match=r"head of shape \[3, 32\]"):
        make_critic(tmp_path / "classifier")


def test_sequences_without_trained_tokens_have_no_values(model_folder):
    sequence = make_sequences(5)[0]
    silent = TrainSequence(
        sequence.prompt_ids, sequence.response_ids, np.zeros_like(sequence.response_mask), sequence.behaviour_log_probs
    )
    engine = make_critic(model_folder)
    assert values(engine, pack([silent])).shape == (0,)


def with_head(folder, target):
    """A copy of a model folder with a head, so that gradients reach the backbone."""
    target.mkdir(parents=True)
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    add_head(target, "qwen3")
    return target
