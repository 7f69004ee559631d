"""Divisions that Megatron-Core allows: what passes is consistent, what does not names the key and what works."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rollmesh.learner.engines.megatron.parallel import ParallelSizes
from rollmesh.learner.engines.megatron.requirements import ModelFacts, even_layers, resolve_sizes
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.errors import ConfigError

DENSE = ModelFacts("dense", heads=12, kv_heads=4, intermediate=96, experts=0, layers=6)
EXPERTS = replace(DENSE, name="experts", moe_intermediate=24, experts=8)
UNKNOWN = ModelFacts("hub")

numbers = st.sampled_from([1, 1, 2, 3, 4])
sections = st.builds(
    ParallelSection,
    **dict.fromkeys(("tp", "pp", "vpp", "cp", "ep"), numbers),
    **dict.fromkeys(("sp", "dp", "etp"), st.none() | numbers),
)


def corrected(parallel: ParallelSection, ranks: int, model: ModelFacts) -> tuple[ParallelSection, ParallelSizes]:
    """The division that follows from a section where each error's hint is taken, one key after the other."""
    for _ in range(12):
        try:
            return parallel, resolve_sizes(parallel, ranks, model)
        except ConfigError as error:
            key = re.match(r"learner\.parallel\.(\w+): ", error.message)
            hint = str(error.hint)
            values: dict[str, Any] = dict(re.findall(r"learner\.parallel\.(\w+): (\d+)", hint))
            if hint.startswith("leave it out"):
                assert key is not None
                values = {key[1]: None}
            assert any(getattr(parallel, name) != value for name, value in values.items())
            parallel = ParallelSection(**(parallel.model_dump() | values))
    pytest.fail(f"hints do not lead to a division: {parallel}")


@example(ParallelSection(ep=3, etp=4), 12, EXPERTS)
@given(sections, st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24]), st.sampled_from([DENSE, EXPERTS, UNKNOWN]))
def test_what_passes_divides_ranks_sizes_and_layers(given_: ParallelSection, ranks: int, model: ModelFacts) -> None:
    """And hints lead there."""
    parallel, sizes = corrected(given_, ranks, model)
    assert sizes.processes == ranks == sizes.tp * sizes.pp * sizes.cp * sizes.dp
    assert ranks == sizes.etp * sizes.ep * sizes.pp * sizes.edp
    places = [sizes.place_of(process) for process in range(ranks)]
    assert len(set(places)) == ranks
    assert Counter((place.tp, place.cp, place.dp, place.pp) for place in places).most_common(1)[0][1] == 1
    assert Counter((place.etp, place.ep, place.edp, place.pp) for place in places).most_common(1)[0][1] == 1
    for size in (model.heads, model.kv_heads, model.intermediate):
        assert size % sizes.tp == 0
    assert (model.experts or 0) % sizes.ep == model.moe_intermediate % sizes.etp == 0
    assert sizes.sequence_parallel == (sizes.tp > 1 and parallel.sp != 1)
    assert sizes.sequence_parallel or sizes.tp == 1 or not model.experts
    if model.layers:
        parts = [sizes.layers_of(stage, part) for stage in range(sizes.pp) for part in range(sizes.vpp)]
        assert all(parts)
        assert sorted(layer for part in parts for layer in part) == list(range(model.layers))


@given(st.integers(1, 40), st.integers(1, 16))
def test_layers_are_even_and_the_ends_have_the_fewer(layers: int, parts: int) -> None:
    assume(parts <= layers)
    found = even_layers(layers, parts)
    assert (len(found), sum(found)) == (parts, layers)
    assert max(found) - min(found) <= 1
    assert found[-1] == min(found)
    assert found[0] == min(found) or min((*found[1:-1], max(found))) == max(found)


@pytest.mark.parametrize(
    ("layers", "parts", "expected"), [(5, 2, (3, 2)), (5, 4, (1, 2, 1, 1)), (7, 4, (2, 2, 2, 1)), (8, 4, (2, 2, 2, 2))]
)
def test_layers_of_parts(layers: int, parts: int, expected: tuple[int, ...]) -> None:
    assert even_layers(layers, parts) == expected


@pytest.mark.parametrize(
    ("values", "ranks", "model", "said", "hint"),
    [
        (
            {"tp": 3},
            12,
            replace(DENSE, heads=4),
            ".tp: 3 does not divide the 4 attention heads of model 'dense'",
            "2 or 4",
        ),
        ({"tp": 3}, 12, DENSE, ".tp: 3 does not divide the 4 groups of keys and values", "2 or 4"),
        ({"tp": 4}, 4, replace(DENSE, kv_heads=2), ".tp: 4 does not divide the 2 groups of keys and values", "tp: 2,"),
        ({"tp": 4}, 4, replace(DENSE, intermediate=98), ".tp: 4 does not divide the width 98 of the MLPs", "tp: 2,"),
        ({"tp": 4}, 6, DENSE, ".tp: 4 does not divide the learner's 6 ranks", "tp: 2, the nearest that works, or"),
        (
            {"tp": 2, "pp": 2},
            2,
            DENSE,
            ".pp: 2 does not divide the 1 rank that tp 2 leaves",
            "pp: 1, the nearest that works, or learner.ranks to a multiple of 4",
        ),
        (
            {"tp": 2, "pp": 3},
            8,
            DENSE,
            ".pp: 3 does not divide the 4 ranks that tp 2 leaves",
            "pp: 2 or 4, the nearest",
        ),
        ({"pp": 3}, 8, replace(DENSE, layers=2), ".pp: 3 does not divide the 8 ranks", "pp: 2, the nearest"),
        (
            {"pp": 8},
            8,
            DENSE,
            ": pp 8 x vpp 1 makes 8 parts, and model 'dense' has 6 layers",
            "pp: 4 and learner.parallel.vpp: 1",
        ),
        ({"pp": 2, "vpp": 4}, 8, DENSE, ": pp 2 x vpp 4 makes 8 parts", "set learner.parallel.vpp: 3, the most"),
        ({"vpp": 2}, 8, DENSE, ".vpp: 2 divides the layers of stages, and learner.parallel.pp is 1", "pp to 2 or more"),
        ({"pp": 2, "layers": (3, 2)}, 2, DENSE, ".layers: [3, 2] are 5 layers, and model 'dense' has 6", "[3, 3]"),
        (
            {"pp": 2, "layers": (2, 2, 2)},
            2,
            DENSE,
            ".layers: [2, 2, 2] are the layers of 3 parts, and pp 2 x vpp 1",
            "[3, 3]",
        ),
        ({"tp": 2, "cp": 3}, 8, DENSE, ".cp: 3 does not divide the 4 ranks that tp 2 and pp 1 leave", "2 or 4"),
        ({"tp": 2, "dp": 2}, 8, DENSE, ".dp: 2, and 8 ranks with tp 2, pp 1 and cp 1 make dp 4", "dp: 4,"),
        (
            {"tp": 4, "sp": 2},
            8,
            DENSE,
            ".sp: 2 with engine megatron is sequence parallelism: 1, or tp, which is 4",
            ".cp",
        ),
        ({"sp": 2}, 8, DENSE, ".sp: 2 with engine megatron", "learner.parallel.cp"),
        ({"tp": 2, "sp": 1}, 8, EXPERTS, ".sp: 1, and model 'experts' has experts", "sp: 2, or leave it out"),
        ({"ep": 2}, 8, DENSE, ".ep: 2 divides experts, and model 'dense' has none", "ep: 1"),
        ({"etp": 2}, 8, DENSE, ".etp: 2 divides experts, and model 'dense' has none", "etp: 1"),
        ({"ep": 3}, 12, EXPERTS, ".ep: 3 does not divide the 8 experts of model 'experts'", "2 or 4"),
        ({"ep": 8, "pp": 2}, 8, EXPERTS, ".ep: 8 does not divide the 4 ranks of a stage that etp 1 leaves", "ep: 4,"),
        ({"etp": 16, "ep": 2}, 32, EXPERTS, ".etp: 16 does not divide the width 24 of the experts", "etp: 8,"),
        (
            {"etp": 2},
            8,
            EXPERTS,
            ".etp: 2 is not tp, which is 1, and ep is 1",
            "leave it out, or set learner.parallel.ep",
        ),
        (
            {"tp": 4},
            4,
            replace(EXPERTS, moe_intermediate=6),
            ".tp: 4 does not divide the width 6 of the experts",
            "tp: 2,",
        ),
        ({"etp": 4, "ep": 4}, 8, EXPERTS, ".ep: 4 does not divide the 2 ranks of a stage that etp 4 leaves", "ep: 2,"),
        (
            {"tp": 2, "ep": 2, "etp": 4},
            4,
            EXPERTS,
            ".ep: 2 does not divide the 1 rank of a stage that etp 4 leaves, and no other number does",
            "learner.parallel.etp: 1",
        ),
        ({"shards": 2}, 8, DENSE, ".shards: 2 is for engine fsdp2, and this one is megatron", "learner.engine: fsdp2"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_works(
    values: dict[str, Any], ranks: int, model: ModelFacts, said: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_sizes(ParallelSection(**values), ranks, model)
    assert refused.value.message.startswith(f"learner.parallel{said}")
    assert hint in str(refused.value.hint)


def test_the_key_of_a_role_is_named() -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_sizes(ParallelSection(shards=2), 8, DENSE, key="learner.roles.critic.parallel")
    assert refused.value.message.startswith("learner.roles.critic.parallel.shards: 2")
    assert str(refused.value.hint).endswith("learner.roles.critic.engine: fsdp2")


def test_given_layers_and_sequences_are_taken() -> None:
    sizes = resolve_sizes(ParallelSection(tp=2, pp=2, vpp=2, sp=1, layers=(1, 2, 2, 1), dp=2), 8, DENSE)
    assert (sizes.layers, sizes.sequence_parallel, sizes.dp) == ((1, 2, 2, 1), False, 2)
    assert resolve_sizes(ParallelSection(tp=2, etp=2, ep=2), 8, EXPERTS).sequence_parallel
    assert [resolve_sizes(ParallelSection(tp=2, ep=ep), 8, EXPERTS).etp for ep in (1, 2)] == [2, 1]
    assert resolve_sizes(ParallelSection(pp=2, ep=4), 8, UNKNOWN).layers == ()


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        (
            {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 8, "num_hidden_layers": 3},
            ModelFacts("m", heads=4, kv_heads=2, intermediate=8, experts=0, layers=3),
        ),
        (
            {"intermediate_size": 8, "num_local_experts": 4, "vocab_size": 11},
            ModelFacts("m", moe_intermediate=8, experts=4, vocabulary=11),
        ),
        (
            {"text_config": {"intermediate_size": 8, "moe_intermediate_size": 2, "num_experts": 4}},
            ModelFacts("m", intermediate=8, moe_intermediate=2, experts=4),
        ),
        (
            {"intermediate_size": [8, 4], "moe_intermediate_size": 2, "n_routed_experts": 4},
            ModelFacts("m", moe_intermediate=2, experts=4),
        ),
        ({"moe_intermediate_size": 2, "num_experts": 0}, ModelFacts("m", experts=0)),
    ],
)
def test_facts_are_read_from_a_config(config: dict[str, Any], facts: ModelFacts) -> None:
    assert ModelFacts.read("m", config) == facts


@pytest.mark.parametrize(
    ("keys", "experts"),
    [({}, 8), ({"mlp_only_layers": [0]}, 8), ({"mlp_only_layers": [0, 1]}, 0), ({"decoder_sparse_step": 3}, 0)],
)
def test_a_model_of_which_all_layers_are_dense_has_no_experts(keys: dict[str, Any], experts: int) -> None:
    config = {"num_experts": 8, "num_hidden_layers": 2, "moe_intermediate_size": 24, **keys}
    assert ModelFacts.read("mixture", config).experts == experts
