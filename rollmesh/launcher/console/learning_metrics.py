"""The metrics of learning in a training step, in short words: the same in the live view and in plain lines."""

from __future__ import annotations

from collections.abc import Iterator

from rollmesh.report.metrics import Record, metric_value

# Words, metric, and the form of its value. The first of those with the same words is shown.
_MODEL = (
    ("loss", "actor/loss", ".4f"),
    ("entropy", "actor/entropy", ".3g"),
    ("KL to reference", "actor/reference_kl", ".2g"),
    ("KL to reference", "actor/kl_loss", ".2g"),
    ("KL", "actor/k3_kl", ".2g"),
    ("clipped", "actor/pg_clipfrac", ".1%"),
    ("grad norm", "actor/grad_norm", ".3g"),
)
_RESPONSES = (
    ("length", "response_length/mean", ".1f"),
    ("cut off", "response_length/clip_ratio", ".0%"),
    ("zero variance", "frac_reward_zero_std", ".0%"),
    ("staleness", "staleness/mean", ".2f"),
)


def model_parts(record: Record) -> list[str]:
    """Loss, entropy, KL, clip share and gradient norm, as far as the record has them."""
    return list(_parts(record, _MODEL))


def response_parts(record: Record) -> list[str]:
    """Length, share of cut responses, share of groups whose rewards are all equal, and staleness."""
    return list(_parts(record, _RESPONSES))


def _parts(record: Record, metrics: tuple[tuple[str, str, str], ...]) -> Iterator[str]:
    shown = set()
    for words, name, form in metrics:
        value = metric_value(record, name)
        if value is not None and words not in shown:
            shown.add(words)
            yield f"{words} {value:{form}}"
