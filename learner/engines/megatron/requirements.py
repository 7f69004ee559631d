"""Divisions that Megatron-Core allows for a model on a number of ranks; pure, and asked before anything is started.

Invariant: whatever `resolve_sizes` gives divides the ranks, the model's sizes and its layers without rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rollmesh.learner.engines.experts.layers import expert_count
from rollmesh.learner.engines.megatron.parallel import ParallelSizes
from rollmesh.learner.model_files.checks import attention_heads, text_section
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.errors import ConfigError

KEY = "learner.parallel"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a model that a division has to respect; 0: not known.

    Attributes:
        name: in errors.
        heads, kv_heads: of the queries, and groups of keys and values.
        intermediate: width of an MLP.
        moe_intermediate: width of an expert.
        experts: of a layer; 0: it has none, None: not known.
        layers: of the whole model.
        vocabulary: of tokens, without padding; any number can be divided.
    """

    name: str
    heads: int = 0
    kv_heads: int = 0
    intermediate: int = 0
    moe_intermediate: int = 0
    experts: int | None = None
    layers: int = 0
    vocabulary: int = 0

    @classmethod
    def read(cls, name: str, config: Mapping[str, Any]) -> ModelFacts:
        """The facts in a `config.json`, or in a configuration of transformers as a mapping.

        Args:
            name: of the model, for errors.
            config: keys as Hugging Face names them.
        """
        text = text_section(config)

        def size(key: str) -> int:
            # A list has a size for each layer.
            return value if isinstance(value := text.get(key), int) else 0

        experts = expert_count(config)
        width, expert_width = size("intermediate_size"), size("moe_intermediate_size")
        if experts and not expert_width:
            # Mixtral has no other MLPs than those of its experts.
            width, expert_width = 0, width
        return cls(
            name,
            heads=attention_heads(config) or 0,
            kv_heads=size("num_key_value_heads"),
            intermediate=width,
            moe_intermediate=expert_width if experts else 0,
            experts=experts,
            layers=size("num_hidden_layers"),
            vocabulary=size("vocab_size"),
        )


def resolve_sizes(parallel: ParallelSection, ranks: int, model: ModelFacts, *, key: str = KEY) -> ParallelSizes:
    """The sizes of all divisions.

    Args:
        parallel: as configured.
        ranks: processes of the learner.
        model: its sizes; those that are not known are not compared.
        key: of the division in the configuration, for errors.

    Returns:
        The sizes, each with a value; `layers` is empty where the model's number is not known and none is configured.

    Raises:
        ConfigError: names the key, and the nearest value that works.
    """
    if parallel.shards is not None:
        raise ConfigError(
            f"{key}.shards: {parallel.shards} is for engine fsdp2, and this one is megatron",
            hint=f"leave it out, or set {key.removesuffix('parallel')}engine: fsdp2",
        )
    tp, pp, cp, ep = parallel.tp, parallel.pp, parallel.cp, parallel.ep
    of = f"of model {model.name!r}"
    widths = {
        f"the {model.heads} attention heads {of}": model.heads,
        # Where ranks outnumber these groups, Megatron-Core cuts through heads and gathers all projections again.
        f"the {model.kv_heads} groups of keys and values {of}": model.kv_heads,
        f"the width {model.intermediate} of the MLPs {of}": model.intermediate,
        # Experts are then divided as all else is.
        f"the width {model.moe_intermediate} of the experts {of}": model.moe_intermediate if ep == 1 else 0,
        f"the learner's {_ranks(ranks)}": ranks,
    }
    _check_divisor(f"{key}.tp", tp, widths, unit=1)
    left = f"the {_ranks(ranks // tp)} that tp {tp} leaves"
    _check_divisor(f"{key}.pp", pp, {left: ranks // tp}, most=model.layers or ranks, unit=tp)
    layers = _resolve_layers(parallel, ranks // tp, model, key)
    rest = ranks // (tp * pp)
    _check_divisor(f"{key}.cp", cp, {f"the {_ranks(rest)} that tp {tp} and pp {pp} leave": rest}, unit=tp * pp)
    if parallel.dp not in (None, rest // cp):
        raise ConfigError(
            f"{key}.dp: {parallel.dp}, and {_ranks(ranks)} with tp {tp}, pp {pp} and cp {cp} make dp {rest // cp}",
            hint=f"set {key}.dp: {rest // cp}, or leave it out",
        )
    etp = _resolve_experts(parallel, ranks // pp, model, key)
    sequence_parallel = _resolve_sequences(parallel, model, key)
    return ParallelSizes(
        ranks,
        tp=tp,
        pp=pp,
        vpp=parallel.vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        sequence_parallel=sequence_parallel,
        layers=layers,
    )


def even_layers(layers: int, parts: int) -> tuple[int, ...]:
    """The layers of each part, as even as possible.

    The rest goes to the parts in the middle, and then to the first. The first part also has the embedding, and
    the last one the output layer, which costs more.

    Args:
        layers: of the model.
        parts: at most as many.
    """
    least, more = divmod(layers, parts)
    favoured = [*range(1, parts - 1), 0][:more]
    return tuple(least + (part in favoured) for part in range(parts))


def _resolve_layers(parallel: ParallelSection, stages: int, model: ModelFacts, key: str) -> tuple[int, ...]:
    """The layers of each part; `stages` is what `pp` has to divide."""
    pp, vpp = parallel.pp, parallel.vpp
    if vpp > 1 and pp == 1:
        raise ConfigError(
            f"{key}.vpp: {vpp} divides the layers of stages, and {key}.pp is 1",
            hint=f"set {key}.vpp: 1, or {key}.pp to 2 or more",
        )
    parts = pp * vpp
    if model.layers and parts > model.layers:
        _refuse_parts(parallel, stages, model, key)
    given = parallel.layers
    if given is None:
        return even_layers(model.layers, parts) if model.layers else ()
    if len(given) == parts and (not model.layers or sum(given) == model.layers):
        return given
    example = f", for example {list(even_layers(model.layers, parts))}" if model.layers else ""
    what = f"{sum(given)} layers, and model {model.name!r} has {model.layers}"
    if len(given) != parts:
        what = f"the layers of {len(given)} parts, and pp {pp} x vpp {vpp} makes {parts}"
    raise ConfigError(
        f"{key}.layers: {list(given)} are {what}", hint=f"give {parts} numbers that add up{example}; or leave it out"
    )


def _refuse_parts(parallel: ParallelSection, stages: int, model: ModelFacts, key: str) -> NoReturn:
    pp = parallel.pp
    works = f"{key}.vpp: {model.layers // pp}"
    if pp > model.layers:
        works = f"{key}.pp: {max(number for number in _divisors(stages) if number <= model.layers)} and {key}.vpp: 1"
    raise ConfigError(
        f"{key}: pp {pp} x vpp {parallel.vpp} makes {pp * parallel.vpp} parts, and model {model.name!r} has "
        f"{model.layers} layers: each part needs one",
        hint=f"set {works}, the most that works",
    )


def _resolve_experts(parallel: ParallelSection, ranks: int, model: ModelFacts, key: str) -> int:
    """Ranks over which each expert's matrices are divided; `ranks` are those of a stage."""
    tp, ep, etp = parallel.tp, parallel.ep, parallel.etp
    if model.experts == 0:
        for name, value in (("ep", ep), ("etp", etp)):
            if value is not None and value > 1:
                raise ConfigError(
                    f"{key}.{name}: {value} divides experts, and model {model.name!r} has none",
                    hint=f"set {key}.{name}: 1, or leave it out",
                )
    of = f"of model {model.name!r}"
    width = f"the width {model.moe_intermediate} of the experts {of}"
    stage = {f"the {_ranks(ranks)} of a stage": ranks}
    if etp is None:
        etp = tp if ep == 1 else 1
    elif ep == 1 and etp != tp and model.experts:
        # Megatron-Core 0.16.1 would add up gradients of experts over the ranks of dense matrices.
        raise ConfigError(
            f"{key}.etp: {etp} is not tp, which is {tp}, and ep is 1: experts are then divided as all else is",
            hint=f"leave it out, or set {key}.ep: 2 or more",
        )
    _check_divisor(f"{key}.etp", etp, {width: model.moe_intermediate, **stage})
    rest = ranks // etp
    left = f"the {_ranks(rest)} of a stage that etp {etp} leaves"
    least = 1 if etp == tp else 2
    sizes = {f"the {model.experts} experts {of}": model.experts or 0, left: rest}
    undivided = next((name for name, size in sizes.items() if size % ep), None)
    if undivided is not None and math.gcd(*sizes.values()) < least:
        works = f"{key}.etp: 1" if etp > 1 else f"{key}.ep: 1, and leave {key}.etp out"
        raise ConfigError(f"{key}.ep: {ep} does not divide {undivided}, and no other number does", hint=f"set {works}")
    _check_divisor(f"{key}.ep", ep, sizes, least=least)
    return etp


def _resolve_sequences(parallel: ParallelSection, model: ModelFacts, key: str) -> bool:
    """True for sequence parallelism."""
    tp = parallel.tp
    sp = tp if parallel.sp is None else parallel.sp
    if sp not in (1, tp):
        raise ConfigError(
            f"{key}.sp: {sp} with engine megatron is sequence parallelism: 1, or tp, which is {tp}",
            hint=f"leave it out; long sequences are divided by {key}.cp",
        )
    if sp < tp and model.experts:
        raise ConfigError(
            f"{key}.sp: 1, and model {model.name!r} has experts: with tp {tp} its tokens are to be divided too",
            hint=f"set {key}.sp: {tp}, or leave it out",
        )
    return sp > 1


def _check_divisor(
    key: str, value: int, sizes: Mapping[str, int], *, least: int = 1, most: int | None = None, unit: int = 0
) -> None:
    """Refuses a value that does not divide all sizes.

    Args:
        key: of the value.
        value: as configured.
        sizes: by what an error calls them; 0: not known.
        least, most: other values are not proposed.
        unit: ranks that what comes before takes together, where the last size is of ranks: more ranks may help.
    """
    rest = next((name for name, size in sizes.items() if size % value), None)
    if rest is None:
        return
    works = [number for number in _divisors(math.gcd(*sizes.values())) if least <= number <= (most or number)]
    near = min(abs(number - value) for number in works)
    hint = f"set {key}: {' or '.join(str(number) for number in works if abs(number - value) == near)}"
    if unit and rest == list(sizes)[-1]:
        hint = f"{hint}, the nearest that works, or learner.ranks to a multiple of {unit * value}"
    else:
        hint = f"{hint}, the nearest that works"
    raise ConfigError(f"{key}: {value} does not divide {rest}", hint=hint)


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
