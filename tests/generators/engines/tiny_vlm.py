"""Tiny random vision-language models with their processors, as ordinary folders, and images for them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rollmesh.generators.engines.types import GenerationResult
from tests.generators.engines import tiny

# After those of the tokenizer.
IMAGE = tiny.VOCABULARY
_AROUND = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
VOCABULARY = tiny.VOCABULARY + 4
CONTEXT = tiny.CONTEXT
# Image tokens of an image: patches of 14 x 14 in 28 x 28 pixels.
WIDTH = 4
_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<eot>{% endif %}"
)


def picture(seed: int, form: str = "PNG") -> bytes:
    """A random image, encoded."""
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def _text(model_type: str) -> dict[str, Any]:
    size = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": VOCABULARY}
    return {**tiny.BLOCKS, **size, "model_type": model_type, "eos_token_id": tiny.EOS, "tie_word_embeddings": False}


_VISION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _llava(tokenizer: PreTrainedTokenizerFast) -> tuple[PreTrainedConfig, Any, list[int]]:
    """An image becomes image tokens alone."""
    config = LlavaConfig(
        text_config=_text("qwen3"),
        vision_config={**_VISION, "model_type": "clip_vision_model"},
        image_token_index=IMAGE,
        image_seq_length=WIDTH,
        tie_word_embeddings=False,
    )
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    )
    return config, processor, [IMAGE] * WIDTH


def _idefics3(tokenizer: PreTrainedTokenizerFast) -> tuple[PreTrainedConfig, Any, list[int]]:
    """An image becomes image tokens between others."""
    config = Idefics3Config(
        text_config=_text("llama"),
        vision_config=_VISION,
        image_token_id=IMAGE,
        scale_factor=1,
        tie_word_embeddings=False,
        pad_token_id=tiny.PAD,
    )
    edge = {"longest_edge": 28}
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False),
        tokenizer,
        image_seq_len=WIDTH,
        chat_template=_TEMPLATE,
    )
    fake, whole = tokenizer.convert_tokens_to_ids(["<fake_token_around_image>", "<global-img>"])
    return config, processor, [fake, whole, *[IMAGE] * WIDTH, fake]


_KINDS = {"llava": _llava, "idefics3": _idefics3}


class TinyVlm:
    """A vision-language model of 0.5 million parameters, in float32.

    Args:
        folder: for its configuration, tokenizer and processor files; weights are not stored.
        kind: llava, or idefics3, which real engines take on a CPU.

    Attributes:
        wide: tokens that the model sees of an image.
    """

    def __init__(self, folder: Path, kind: str = "llava") -> None:
        self.tokenizer = tiny.train_tokenizer()
        self.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", *_AROUND]})
        self.config, self.processor, self.wide = _KINDS[kind](self.tokenizer)
        self._reference = self.build(self.config, 0)
        self._random: dict[int, dict[str, torch.Tensor]] = {}
        self.folder = tiny.save_folder(folder, self._reference, None)
        self.processor.save_pretrained(folder)

    @staticmethod
    def build(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
        """A seeded random model whose next-token distributions are far from uniform, and depend on its images."""
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(6)
        return model

    def random_weights(self, seed: int) -> dict[str, torch.Tensor]:
        """Under which sequences vary and seldom end; not to be changed in place."""
        if seed not in self._random:
            self._random[seed] = dict(self.build(self.config, seed).state_dict())
        return dict(self._random[seed])

    def log_probs(
        self, weights: dict[str, torch.Tensor], prompt: Sequence[int], images: Sequence[bytes], response: Sequence[int]
    ) -> NDArray[np.float32]:
        """Log-probs of a response's tokens, float32 [len(response)], by transformers' own forward pass.

        That cannot tell image tokens of the response from the prompt's: a token that does not occur stands for them.
        """
        wide = [token for given in prompt for token in (self.wide if given == IMAGE else [given])]
        spare = next(token for token in range(tiny.VOCABULARY) if token not in wide and token not in response)
        self._reference.load_state_dict(weights)
        embedding = self._reference.get_input_embeddings().weight
        embedding[spare] = embedding[IMAGE]
        ids = wide + [spare if token == IMAGE else token for token in response]
        pixels = {}
        if images:
            opened = [Image.open(io.BytesIO(encoded)) for encoded in images]
            found = self.processor.image_processor(opened, return_tensors="pt")
            pixels = {name: found[name] for name in ("pixel_values", "pixel_attention_mask") if name in found}
        with torch.no_grad():
            logits = self._reference(input_ids=torch.tensor([ids]), use_cache=False, **pixels).logits[0]
        every = torch.log_softmax(logits[:-1].float(), -1)
        drawn = torch.tensor(list(response))[:, None]
        log_probs: NDArray[np.float32] = every[-len(response) :].gather(1, drawn)[:, 0].numpy()
        return log_probs

    def check(
        self,
        result: GenerationResult,
        weights: dict[str, torch.Tensor],
        prompt: Sequence[int],
        images: Sequence[bytes],
        tolerance: float,
    ) -> None:
        """Its log-probs are those of one forward pass over the whole."""
        expected = self.log_probs(weights, prompt, images, result.sampled.response_ids.tolist())
        np.testing.assert_allclose(result.sampled.log_probs, expected, atol=tolerance)
