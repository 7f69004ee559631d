"""Tiny random models of several architectures and a real byte-level BPE tokenizer, as ordinary folders."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 300
CONTEXT = 256
PAD, EOS, EOS_2 = 0, 1, 2
WINDOW = 8

_CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "to be or not to be, that is the question",
    "7 + 35 = 42; the answer is forty-two. Answer: 42",
    "naïve café, Übermut, 東京, 🙂 and 🚀",
]
_SHARED = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": [EOS, EOS_2], "pad_token_id": PAD}
BLOCKS = {
    **_SHARED,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
}


def configs() -> dict[str, PreTrainedConfig]:
    """One small configuration per architecture, by a short name."""
    return {
        "qwen3": Qwen3Config(**{**BLOCKS, "tie_word_embeddings": True}),
        "llama": LlamaConfig(**BLOCKS),
        "mistral": MistralConfig(**{**BLOCKS, "sliding_window": WINDOW}),
        "gemma2": Gemma2Config(**{**BLOCKS, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
        "gemma3": Gemma3TextConfig(
            **{
                **BLOCKS,
                "num_hidden_layers": 3,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            }
        ),
        "gpt2": GPT2Config(**_SHARED, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4),
        "qwen3_moe": Qwen3MoeConfig(
            **{**BLOCKS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        ),
    }


def build_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A seeded random model whose next-token distributions are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.mul_(6)
    return model


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained here: multi-byte characters may be split over tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>", "<eot>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def save_folder(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None) -> Path:
    """Configuration and tokenizer files, no weights: what a generator receives over the mesh."""
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


class ContractModel:
    """The model of the contract's tests: a Qwen3 of 0.4 million parameters that real engines take too, in float32.

    Args:
        folder: for its configuration and tokenizer files; weights are not stored.
        context: longest sequence in tokens.
    """

    def __init__(self, folder: Path, context: int = CONTEXT) -> None:
        size = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": context}
        blocks = {**BLOCKS, **size, "eos_token_id": EOS, "tie_word_embeddings": False}
        self._reference = build_model(Qwen3Config(**blocks))
        self._random: dict[int, dict[str, torch.Tensor]] = {}
        self.tokenizer = train_tokenizer()
        self.folder = save_folder(folder, self._reference, self.tokenizer)

    def random_weights(self, seed: int) -> dict[str, torch.Tensor]:
        """Under which sequences vary and do not end, at any temperature that is used; not to be changed in place."""
        if seed in self._random:
            return dict(self._random[seed])
        weights = dict(build_model(self._reference.config, seed).state_dict())
        # The first number of every hidden state is one; the logit of the end token alone reads it.
        for name, tensor in weights.items():
            if "o_proj" in name or "down_proj" in name:
                tensor[0] = 0
            elif "embed_tokens" in name:
                tensor[:, 0] = 1
            elif "lm_head" in name:
                tensor[:, 0] = 0
                tensor[EOS] = 0
                tensor[EOS, 0] = -1000
        self._random[seed] = weights
        return dict(weights)

    def constant_weights(self, token: int) -> dict[str, torch.Tensor]:
        """Under which every token drawn is `token`."""
        weights = {name: torch.ones_like(tensor) for name, tensor in self._reference.state_dict().items()}
        for name, tensor in weights.items():
            # Without the blocks' outputs the last hidden state is all ones, and the head alone decides.
            if "o_proj" in name or "down_proj" in name or "lm_head" in name:
                tensor.zero_()
        weights["lm_head.weight"][token] = 1.0
        return weights

    def logits(self, weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
        """Float32 [len(ids), vocabulary] of transformers' own forward pass."""
        self._reference.load_state_dict(weights)
        with torch.no_grad():
            logits: torch.Tensor = self._reference(torch.tensor([ids]), use_cache=False).logits[0]
        return logits.float()
