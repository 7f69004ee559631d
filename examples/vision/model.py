"""A tiny vision-language model of the class of Idefics3, with its processor, saved as an ordinary folder.

An image of 32 by 32 pixels becomes 16 tokens, one for each patch of 8 by 8, between three tokens that frame them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, Idefics3Config, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from examples.demo.model import build_tokenizer
from examples.vision.pictures import COLORS, MARK, NUMBERS, SIDE

_PATCH = 8
# Heads of 32: vLLM has no kernel for narrower ones on a CPU.
_HIDDEN, _LAYERS, _HEADS = 64, 2, 2
_FRAME = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


def write_model(folder: Path, seed: int) -> int:
    """Writes a freshly initialized model and its processor; returns the number of parameters."""
    tokenizer = build_tokenizer("1234?", pieces=[*NUMBERS, *COLORS, "number", "color", MARK, *_FRAME])
    edge = {"longest_edge": SIDE}
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False),
        tokenizer,
        image_seq_len=(SIDE // _PATCH) ** 2,
    )
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": _HIDDEN,
            "intermediate_size": 4 * _HIDDEN,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _HEADS,
            "head_dim": _HIDDEN // _HEADS,
            "max_position_embeddings": 64,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
            "initializer_range": 0.1,
            "tie_word_embeddings": False,
        },
        vision_config={
            "hidden_size": _HIDDEN,
            "intermediate_size": 2 * _HIDDEN,
            "num_hidden_layers": 1,
            "num_attention_heads": _HEADS,
            "image_size": SIDE,
            "patch_size": _PATCH,
            "initializer_range": 0.1,
        },
        image_token_id=tokenizer.convert_tokens_to_ids(MARK),
        scale_factor=1,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).to(torch.float32)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
