"""A written folder, opened as its user will open it, and compared with the model that was trained.

Invariant: a folder is called done only if its files say what its weights are. It reads texts and writes turns as
training did, and generation stops at the end that was trained.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.model_files.carried_files import CONFIG_FILE, files_without_code, names_model_code
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.untouched import UntouchedTensors
from rollmesh.learner.model_files.written_settings import name_ends
from rollmesh.learner.written.ends import template_arguments
from rollmesh.mesh.chat.end_tokens import GENERATION_FILE, end_tokens, named_ends
from rollmesh.mesh.chat.template import special_texts
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.trainers.configs import RewardModelConfig, TrainerConfig
from rollmesh.mesh.errors import ChatTemplateError, DataError
from rollmesh.mesh.model_config import read_config
from rollmesh.mesh.tokenizer_files import load_optional_tokenizer

log = logging.getLogger(__name__)
_SHOWN = 3
_CONVERSATION = (
    {"role": "user", "content": "How many are 12 and 345?"},
    {"role": "assistant", "content": "357, I'd say."},
)
# Each is read otherwise by some pair of tokenizers: digits, spaces, accents in two forms, scripts, code, no text.
_TEXTS = (
    "1234567890 3.14",
    "  two  spaces\tand\n\n\nlines ",
    "caf\u00e9 cafe\u0301 \ufb01 \u216b",
    "\u4f60\u597d, \u3053\u3093\u306b\u3061\u306f \u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
    "def f(x):\n    return x**2  # don't",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \u2026 \u00a0end",
    "",
)
_METADATA = frozenset(("transformers_version", "eos_token_id"))


@dataclass(frozen=True, slots=True)
class Expected:
    """All that a written folder has to be.

    Attributes:
        source: folder of the model that was trained.
        dtype: of the weights.
        arguments: of the chat template, in each set that training used.
        classifier: the folder is a sequence classifier, which generates nothing.
    """

    source: Path
    dtype: torch.dtype
    arguments: Sequence[Mapping[str, Any]] = ({},)
    classifier: bool = False

    @classmethod
    def of(cls, config: Config | TrainerConfig) -> Expected:
        """The folders of a run or a training; the model's path is a local folder."""
        return cls(
            Path(config.model.path),
            getattr(torch, config.model.dtype),
            template_arguments(config.data),
            isinstance(config, RewardModelConfig),
        )


def finish_folder(folder: Path, expected: Expected) -> None:
    """Names the trained ends in a written folder, and asks whether it is what was trained.

    Args:
        folder: just written, with all its files.
        expected: of it.

    Raises:
        DataError: something differs; names it.
    """
    tokenizer = load_optional_tokenizer(expected.source)
    config = read_config(expected.source)
    places: int = config.get_text_config().vocab_size
    ends: tuple[int, ...] = ()
    if not expected.classifier:
        found = end_tokens(expected.source, config, tokenizer, expected.arguments)
        probed = () if tokenizer is None else _probed_ends(tokenizer, expected.arguments)
        ends = tuple(dict.fromkeys(token for token in (*found.all, *probed) if token < places))
        try:
            added = name_ends(folder, ends)
        except OSError as error:
            raise DataError(f"cannot write {folder}: {error.strerror or error}", hint="free space there") from error
        if added and tokenizer is not None:
            names = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in added)
            log.info("%s of the written folder also names the end %s: generation stops there", GENERATION_FILE, names)
    if names_model_code(expected.source):
        log.info(
            "%s names code of the model's own, and the written folder does not: the class of transformers was trained",
            expected.source / CONFIG_FILE,
        )
    differences = list(_differences(folder, expected, tokenizer, ends))
    if differences:
        more = f" and {len(differences) - _SHOWN} more" * (len(differences) > _SHOWN)
        raise DataError(
            f"the written folder is not what was trained from {expected.source}: "
            f"{'; '.join(differences[:_SHOWN])}{more}",
            hint="the checkpoint stays; correct the model's folder, and `rollmesh export` writes it again",
        )


def _differences(
    folder: Path, expected: Expected, tokenizer: PreTrainedTokenizerBase | None, ends: Sequence[int]
) -> Iterator[str]:
    """All that is wrong with a folder, in words."""
    if named := files_without_code(folder):
        yield f"{named[0]} names code that is not there"
    yield from _configured(folder, expected)
    yield from _stored(folder, expected)
    if not expected.classifier:
        yield from _generated(folder, expected.source, ends)
    written = load_optional_tokenizer(folder)
    if (tokenizer is None) != (written is None):
        yield "the tokenizer is missing"
    if tokenizer is not None and written is not None:
        yield from _read_alike(tokenizer, written)
        yield from _written_alike(tokenizer, written, expected.arguments)


def _configured(folder: Path, expected: Expected) -> Iterator[str]:
    config, source = read_config(folder), read_config(expected.source)
    if expected.classifier:
        source = source.get_text_config()
    pairs: dict[str, tuple[object, object]] = {
        "model_type": (config.model_type, source.model_type),
        "dtype": (config.dtype, expected.dtype),
    }
    mine, theirs = config.get_text_config(), source.get_text_config()
    for name in ("vocab_size", "tie_word_embeddings", "max_position_embeddings"):
        pairs[name] = getattr(mine, name, None), getattr(theirs, name, None)
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            yield f"{CONFIG_FILE} says {name} {found}, and {wanted} was trained"


def _stored(folder: Path, expected: Expected) -> Iterator[str]:
    """Differences of names and dtypes; the opened model has refused missing weights and other shapes."""
    backbone_only = expected.classifier
    with (
        StoredModel(folder, backbone_only=backbone_only) as written,
        StoredModel(expected.source, backbone_only=backbone_only) as source,
    ):
        found, untouched = written.files.stored, UntouchedTensors(source, expected.dtype)
        wanted = {name: untouched.dtype_of(name, tensor) for name, tensor in found.items()}
        if odd := [name for name, tensor in found.items() if tensor.dtype != wanted[name]]:
            yield f"{odd[0]} is {found[odd[0]].dtype}, and {wanted[odd[0]]} was to be written"
        lost = [] if backbone_only else [name for name in source.needed if name not in found]
        if lost:
            yield f"{len(lost)} tensors of the model are missing, the first is {lost[0]}"


def _generated(folder: Path, source: Path, ends: Sequence[int]) -> Iterator[str]:
    written, own = _generation(folder), _generation(source)
    known = named_ends(folder)
    if missing := [token for token in ends if token not in known]:
        yield f"{GENERATION_FILE} does not name the end token {missing[0]}"
    for name in sorted((written.keys() | own.keys()) - _METADATA):
        if written.get(name) != own.get(name):
            yield f"generation has {name} {written.get(name)}, and the model's folder {own.get(name)}"


def _generation(folder: Path) -> dict[str, Any]:
    """The settings with which `generate()` of transformers would begin, as far as they are not its defaults."""
    from_file = (folder / GENERATION_FILE).is_file()
    name = GENERATION_FILE if from_file else CONFIG_FILE
    try:
        config = GenerationConfig.from_pretrained(
            folder, config_file_name=name, local_files_only=True, _from_model_config=not from_file
        )
    except (OSError, ValueError, TypeError) as error:
        return {"an error": type(error).__name__}
    values: dict[str, Any] = config.to_diff_dict()
    return {key: value for key, value in values.items() if not key.startswith("_")}


def _read_alike(own: PreTrainedTokenizerBase, written: PreTrainedTokenizerBase) -> Iterator[str]:
    for text in _TEXTS:
        if own.encode(text) != written.encode(text):
            yield f"the tokenizer reads {text[:20]!r} otherwise"
            return


def _written_alike(
    own: PreTrainedTokenizerBase, written: PreTrainedTokenizerBase, arguments: Iterable[Mapping[str, Any]]
) -> Iterator[str]:
    """Differences of a conversation: its ids, and the trained ones among them."""
    if own.chat_template != written.chat_template:
        yield "the chat template is another one"
    if any(_conversation(own, kwargs) != _conversation(written, kwargs) for kwargs in arguments):
        yield "a conversation has other tokens than in training"


def _probed_ends(tokenizer: PreTrainedTokenizerBase, arguments: Iterable[Mapping[str, Any]]) -> list[int]:
    """The special tokens that end the trained turn of a conversation."""
    known = tokenizer.get_vocab()
    special = {known[text] for text in special_texts(tokenizer) if text in known}
    last = [trained[-1] for kwargs in arguments if (trained := _conversation(tokenizer, kwargs)[1])]
    return [token for token in last if token in special]


def _conversation(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The ids of a conversation as training writes it, and the trained ones; none where the template writes none."""
    try:
        tokens = ChatEncoder(tokenizer, arguments).encode(_CONVERSATION, [1])
    except ChatTemplateError:
        return [], []
    return tokens.ids.tolist(), tokens.ids[tokens.trained].tolist()
