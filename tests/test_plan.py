"""The plan: which tiles and order a problem gets, what it costs, and the sets of specs to compile."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from fa3.plan import (
    H200,
    L2_SHARE,
    PRESETS,
    TILES,
    bytes_moved,
    flops,
    make_spec,
    order_of,
    plan,
    shipped_specs,
    tiles_of,
    why_not,
)
from fa3.problem import Problem
from fa3.spec import SHARED_MEMORY_PER_BLOCK

HEAD_DIMS = (64, 128, 256)


def problem_of(**changes: object) -> Problem:
    fields: dict[str, object] = {
        "batch": 2,
        "seqlen_q": 1000,
        "seqlen_k": 1000,
        "heads_q": 16,
        "heads_kv": 4,
        "head_dim": 128,
        "head_dim_v": 128,
        "dtype": "bf16",
        "softmax_scale": 0.1,
        **changes,
    }
    if "head_dim" in changes:
        fields["head_dim_v"] = changes.get("head_dim_v", changes["head_dim"])
    return Problem(**fields)


def orders(**changes: object):
    """The order of a problem with tiles of 128 x 64."""
    problem = problem_of(**changes)
    spec = replace(make_spec(problem.dtype, problem.head_dim, problem.causal, tiles_of(problem)), tile_m=128, tile_n=64)
    return order_of(problem, spec, H200)


# tiles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_tile_table_has_rows_for_every_key_length(head_dim, causal):
    limits = [limit for limit, _ in TILES[head_dim, causal]]
    assert limits == sorted(set(limits))
    assert limits[-1] == math.inf


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_problem_gets_the_first_row_whose_limit_its_keys_do_not_exceed(head_dim, causal):
    rows = TILES[head_dim, causal]
    lowest = 0
    for limit, choice in rows:
        longest = lowest + 10**6 if limit == math.inf else int(limit)
        for seqlen_k in (lowest, longest):
            # The number of queries has no say.
            for seqlen_q in (1, 10**5):
                assert (
                    tiles_of(problem_of(head_dim=head_dim, causal=causal, seqlen_q=seqlen_q, seqlen_k=seqlen_k))
                    is choice
                )
        lowest = longest + 1


# order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "query_tiles"), [(1, 1), (127, 1), (128, 1), (129, 2), (1280, 10), (1281, 11)])
def test_tiles_cover_the_queries_of_every_head(seqlen_q, query_tiles, causal):
    assert orders(seqlen_q=seqlen_q, batch=3, heads_q=8, causal=causal).tiles == query_tiles * 3 * 8


@pytest.mark.parametrize("causal", [False, True])
def test_there_is_a_block_for_each_multiprocessor_but_none_without_a_tile(causal):
    counts = {}
    for heads in (1, 131, 132, 133, 1000):
        order = orders(seqlen_q=128, batch=1, heads_q=heads, heads_kv=1, causal=causal)
        counts[order.tiles] = order.blocks
    assert counts == {1: 1, 131: 131, 132: 132, 133: 132, 1000: 132}


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(16, 16), (16, 4), (16, 1)])
def test_without_a_mask_the_heads_of_one_key_head_run_at_a_time(heads_q, heads_kv):
    for seqlen_k in (1, 1000, 10**6):
        order = orders(heads_q=heads_q, heads_kv=heads_kv, seqlen_k=seqlen_k, causal=False)
        assert order.section == heads_q // heads_kv


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(16, 16), (16, 4), (16, 1), (15, 5)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_under_a_causal_mask_as_many_heads_run_as_have_their_keys_and_values_in_l2(head_dim, heads_q, heads_kv):
    batch, group = 3, heads_q // heads_kv
    seen = set()
    for seqlen_k in (1, 512, 4096, 16384, 65536, 10**7):
        order = orders(
            head_dim=head_dim, batch=batch, heads_q=heads_q, heads_kv=heads_kv, seqlen_k=seqlen_k, causal=True
        )
        key_heads, rest = divmod(order.section, group)
        assert rest == 0, "heads that share keys stay together"
        assert 1 <= key_heads <= batch * heads_kv
        bytes_of_key_head = 2 * seqlen_k * 2 * head_dim
        allowed = L2_SHARE * H200.l2_bytes
        assert key_heads * bytes_of_key_head <= allowed or key_heads == 1
        assert (key_heads + 1) * bytes_of_key_head > allowed or key_heads == batch * heads_kv
        seen.add(key_heads)
    assert {1, batch * heads_kv} <= seen


def test_a_smaller_l2_takes_fewer_heads():
    problem = problem_of(seqlen_k=8192, heads_q=32, heads_kv=32, causal=True)
    spec = make_spec("bf16", 128, True, tiles_of(problem))
    # K and V of one head, 8192 keys of 128 columns each, are 4 MiB.
    devices = [replace(H200, l2_bytes=math.ceil(n * 2**20 / L2_SHARE)) for n in (20, 10)]
    assert [order_of(problem, spec, device).section for device in devices] == [5, 2]


@pytest.mark.parametrize("causal", [False, True])
def test_a_problem_without_keys_still_has_an_order(causal):
    order = orders(seqlen_k=0, causal=causal)
    assert order.section >= 1
    assert order.tiles == 8 * 16 * 2


# cost ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_flops_count_every_pair_of_a_query_and_a_key_that_it_sees(causal):
    for seqlen_q, seqlen_k in itertools.product((0, 1, 2, 3, 7, 12), repeat=2):
        problem = problem_of(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=64, head_dim_v=128, causal=causal)
        pairs = sum(
            not causal or key <= query + seqlen_k - seqlen_q for query in range(seqlen_q) for key in range(seqlen_k)
        )
        # A multiply and an add for each column, of q and k and of v.
        assert flops(problem) == 2 * 16 * pairs * (2 * 64 + 2 * 128), (seqlen_q, seqlen_k)


@pytest.mark.parametrize(("dtype", "element"), [("fp16", 2), ("bf16", 2), ("fp32", 4), ("fp64", 8)])
@pytest.mark.parametrize("return_lse", [False, True])
def test_bytes_moved_are_those_of_every_tensor_once(dtype, element, return_lse):
    problem = problem_of(
        batch=3,
        seqlen_q=5,
        seqlen_k=7,
        heads_q=6,
        heads_kv=2,
        head_dim=64,
        head_dim_v=128,
        dtype=dtype,
        return_lse=return_lse,
    )
    q, k, v, out = 3 * 5 * 6 * 64, 3 * 7 * 2 * 64, 3 * 7 * 2 * 128, 3 * 5 * 6 * 128
    lse = 4 * 3 * 6 * 5 if return_lse else 0
    assert bytes_moved(problem) == element * (q + k + v + out) + lse


# plan ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"dtype": "fp32"}, ("dtype fp32", "fp16, bf16")),
        ({"dtype": "fp64"}, ("dtype fp64", "fp16, bf16")),
        ({"head_dim": 96}, ("head_dim=96", "64, 128, 256")),
        ({"head_dim": 8}, ("head_dim=8:", "64, 128, 256")),
        ({"head_dim": 64, "head_dim_v": 128}, ("head_dim_v=128, head_dim=64", "equal")),
        ({"head_dim": 128, "head_dim_v": 64}, ("head_dim_v=64, head_dim=128", "equal")),
    ],
)
def test_a_problem_without_a_kernel_says_what_is_missing_and_what_there_is(changes, parts):
    problem = problem_of(**changes)
    message = why_not(problem)
    assert message is not None
    for part in parts:
        assert part in message
    with pytest.raises(NotImplementedError) as caught:
        plan(problem, H200)
    assert str(caught.value) == message


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_plans_choose_a_shipped_spec_that_fits_the_problem(dtype, head_dim, causal):
    shipped = shipped_specs("forward")
    for seqlen_k in (0, 1, 512, 4096, 4097, 10**6):
        problem = problem_of(dtype=dtype, head_dim=head_dim, causal=causal, seqlen_k=seqlen_k)
        assert why_not(problem) is None
        spec = plan(problem, H200).spec
        assert spec in shipped
        assert (spec.dtype, spec.head_dim, spec.head_dim_v, spec.causal) == (dtype, head_dim, head_dim, causal)
        assert spec.shared_bytes <= SHARED_MEMORY_PER_BLOCK


@pytest.mark.parametrize("causal", [False, True])
def test_reasons_speak_of_the_choices_that_were_made(causal):
    problem = problem_of(causal=causal, seqlen_q=5000, seqlen_k=5000)
    result = plan(problem, H200)
    choice, spec, order = tiles_of(problem), result.spec, result.order
    tiles, threshold, rounds, last = result.reasons
    assert f"{spec.tile_m} queries x {spec.tile_n} keys in {spec.stages} stages" in tiles
    assert choice.reason in tiles
    assert f"2**{spec.rescale_threshold:g}" in threshold
    assert f"{order.tiles} tiles for {order.blocks} persistent blocks on 132 multiprocessors" in rounds
    assert f"{order.tiles / 132:.2f} rounds" in rounds
    assert last == order.reason
    assert f"{order.section} heads at a time" in last
    assert ("longest tiles first" in last) == causal


def test_a_plan_holds_the_order_and_cost_of_its_problem():
    problem = problem_of(causal=True, return_lse=True)
    result = plan(problem, H200)
    assert result.order == order_of(problem, result.spec, H200)
    assert (result.flops, result.bytes_moved) == (flops(problem), bytes_moved(problem))


# presets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_specs_of_a_preset_are_valid_and_have_names_of_their_own(preset):
    specs = shipped_specs(preset)
    assert specs
    for spec in specs:
        spec.validate()
    assert len({spec.name for spec in specs}) == len(specs)
    assert specs == shipped_specs(preset), "the order is fixed"


def test_the_smoke_preset_is_one_kernel_that_plans_use():
    (spec,) = shipped_specs("smoke")
    assert spec in shipped_specs("forward")


def test_the_preset_of_everything_holds_all_others_and_stays_small():
    everything = shipped_specs("all")
    assert set(everything) == set().union(*(shipped_specs(preset) for preset in PRESETS))
    # Compiling takes seconds for each.
    assert len(everything) <= 120


@pytest.mark.parametrize("causal", [False, True])
def test_the_schedule_preset_has_every_combination_of_switches_at_head_dim_128(causal):
    full = make_spec("bf16", 128, causal, TILES[128, causal][-1][1])
    specs = shipped_specs("schedule")
    for specialized, pingpong, overlap in itertools.product((False, True), repeat=3):
        assert replace(full, warp_specialized=specialized, pingpong=pingpong, overlap=overlap) in specs
    assert replace(full, rescale_threshold=0.0) in specs


@pytest.mark.parametrize("switch", ["warp_specialized", "pingpong", "overlap"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_schedule_preset_has_each_switch_off_alone(head_dim, causal, switch):
    full = make_spec("bf16", head_dim, causal, TILES[head_dim, causal][-1][1])
    assert replace(full, **{switch: False}) in shipped_specs("schedule")


def test_an_unknown_preset_is_refused_with_its_name_and_those_there_are():
    with pytest.raises(ValueError, match="preset='everything': allowed are smoke, forward, schedule, all"):
        shipped_specs("everything")
