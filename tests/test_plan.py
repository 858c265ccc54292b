"""The plan: which kernel and order a problem gets, and what it costs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fa3 import plan as planning
from fa3.plan import (
    H200,
    L2_SHARE,
    MAX_COLUMNS,
    SMALL_GRID,
    bytes_moved,
    computes,
    flops,
    kernel_of,
    make_spec,
    order_of,
    plan,
    tile_class,
    tile_count,
    usual_tiles,
    visible_pairs,
    why_not,
)
from fa3.presets import shipped_specs
from fa3.problem import max_head_dim_v
from fa3.spec import TILE_CLASSES, ForwardSpec
from fa3.tiles import MODIFIED, PACKED, QV, SMALL, TILES
from problems import any_problems, problem_of, sizes

HEAD_DIMS = (64, 128, 256)


# Tile classes -----------------------------------------------------------------------------------------------------


def test_every_head_dim_of_the_api_gets_the_tile_class_that_holds_it_with_the_least_work():
    for head_dim in range(8, 257, 8):
        for head_dim_v in range(8, max_head_dim_v(head_dim) + 1, 8):
            held = min(head_dim_v, MAX_COLUMNS)
            kind = tile_class(head_dim, head_dim_v)
            holding = [c for c in TILE_CLASSES if c[0] >= head_dim and c[1] >= held]
            assert kind in holding
            assert [c for c in holding if sum(c) <= sum(kind)] == [kind], (head_dim, head_dim_v)


@pytest.mark.parametrize("kind", TILE_CLASSES, ids=str)
def test_every_tile_class_is_somebodys_and_its_own(kind):
    assert tile_class(*kind) == kind
    assert tile_class(kind[0] - 8, kind[1] - 8) == kind


def test_a_wide_v_is_computed_by_the_kernel_of_a_part_of_its_columns():
    for head_dim_v in (264, 384, 512):
        spec = plan(problem_of(head_dim=64, head_dim_v=head_dim_v), H200).spec
        assert (spec.head_dim, spec.head_dim_v) == (64, 256)
        assert computes(spec, problem_of(head_dim=64, head_dim_v=head_dim_v))


# Usual tiles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_left": 100, "window_right": 0}], ids=str)
@pytest.mark.parametrize("kind", TILE_CLASSES, ids=str)
def test_a_problem_gets_the_first_row_whose_limit_its_keys_do_not_exceed(kind, mask):
    name = problem_of(**mask).mask
    lowest = 200
    for limit, choice in TILES[kind][name]:
        longest = lowest + 10**6 if limit == math.inf else int(limit)
        for seqlen_k in (lowest, longest):
            # The number of queries has no say, beyond one, which sees all keys under a causal mask.
            for seqlen_q in (2, 10**5):
                sizes = {"head_dim": kind[0], "head_dim_v": kind[1], "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
                assert usual_tiles(problem_of(**sizes, **mask)) is choice
        lowest = longest + 1


@pytest.mark.parametrize("kind", TILE_CLASSES, ids=str)
def test_options_that_need_registers_or_shared_memory_have_tiles_of_their_own(kind):
    sizes = {"head_dim": kind[0], "head_dim_v": kind[1]}
    for changes in ({"softcap": 5.0}, {"score_mod": "m:f"}, {"mask_mod": "m:f"}):
        assert usual_tiles(problem_of(**sizes, **changes)) is MODIFIED[kind]
        assert usual_tiles(problem_of(**sizes, **changes, qv=True)) is QV[kind]
    blocks = problem_of(**sizes, mask_mod="m:f", block_sparse=True)
    assert usual_tiles(blocks) is MODIFIED[kind]


def test_a_single_query_under_a_causal_mask_is_planned_without_one():
    spec = plan(problem_of(seqlen_q=1, causal=True), H200).spec
    assert spec.mask == "full"
    assert plan(problem_of(seqlen_q=2, causal=True), H200).spec.mask == "causal"


def test_a_window_wider_than_the_sequences_is_planned_without_one():
    assert plan(problem_of(window_left=999, window_right=999), H200).spec.mask == "full"
    assert plan(problem_of(window_left=999, causal=True), H200).spec.mask == "causal"
    assert plan(problem_of(window_left=998), H200).spec.mask == "window"
    assert plan(problem_of(attention_chunk=999), H200).spec.mask == "window"
    assert plan(problem_of(attention_chunk=1000), H200).spec.mask == "full"


# Small grids ------------------------------------------------------------------------------------------------------


def tiles_of(problem, choice, packed=False) -> int:
    rows = problem.seqlen_q * (problem.group_size if packed else 1)
    return math.ceil(rows / choice.tile_m) * (problem.heads_kv if packed else problem.heads_q) * problem.batch


@settings(max_examples=200, deadline=None)
@given(sizes(), st.sampled_from([None, False, True]), st.sampled_from([1, 80, 132]))
def test_a_small_grid_gets_the_tiles_of_the_least_time_and_a_large_one_the_usual(fields, pack_gqa, sm_count):
    problem = problem_of(**fields, pack_gqa=pack_gqa)
    device = replace(H200, sm_count=sm_count)
    kind = tile_class(problem.head_dim, problem.head_dim_v)
    choice, spec = kernel_of(problem, device)
    usual = usual_tiles(problem)
    if pack_gqa and problem.group_size > 1:
        assert spec.pack_gqa
        assert choice in PACKED[kind]
    elif tiles_of(problem, usual) >= SMALL_GRID * sm_count:
        assert (choice, spec.pack_gqa) == (usual, False)
    else:
        candidates = [(usual, False), *((other, False) for other in SMALL[kind])]
        if pack_gqa is None and problem.group_size > 1:
            candidates += [(other, True) for other in PACKED[kind]]
        shipped = shipped_specs("forward")
        times = {
            candidate: math.ceil(tiles_of(problem, *candidate) / sm_count) * candidate[0].cost
            for candidate in candidates
            if make_spec(problem.dtype, kind, "full", candidate[0], pack_gqa=candidate[1]) in shipped
        }
        found = times[choice, spec.pack_gqa]
        assert found == min(times.values())
        if times[usual, False] == found:
            assert choice == usual, "of equals the usual one"


def test_a_grid_that_does_not_fill_the_card_is_cut_into_smaller_tiles():
    # Tiles of 192 queries occupy 48 multiprocessors of 132, those of 64 queries 128.
    problem = problem_of(batch=1, seqlen_q=512, seqlen_k=512, heads_kv=16)
    choice, spec = kernel_of(problem, H200)
    assert usual_tiles(problem).tile_m == 192
    assert choice.tile_m == 64
    assert tile_count(problem, spec) == 128
    # One multiprocessor less than tiles: two rounds of them take longer than one of larger tiles.
    choice, spec = kernel_of(problem, replace(H200, sm_count=127))
    assert choice.tile_m == 128
    assert tile_count(problem, spec) == 64


def test_under_a_causal_mask_a_small_grid_is_cut_too():
    problem = problem_of(batch=1, seqlen_q=512, seqlen_k=512, heads_kv=16, causal=True)
    assert kernel_of(problem, H200)[0].tile_m < usual_tiles(problem).tile_m


@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"score_mod": "m:f"}, {"qv": True}, {"window_left": 9, "heads_kv": 16}], ids=str
)
def test_nobody_waits_for_a_compilation_to_save_a_round(options):
    problem = problem_of(batch=1, seqlen_q=100, **options)
    choice, spec = kernel_of(problem, H200)
    assert choice is usual_tiles(problem)
    assert not spec.pack_gqa


# Packed heads -----------------------------------------------------------------------------------------------------


def test_a_decode_step_packs_the_query_heads_of_a_group_by_itself():
    problem = problem_of(batch=16, seqlen_q=1, seqlen_k=8192, heads_q=32, heads_kv=8)
    spec = plan(problem, H200).spec
    assert spec.pack_gqa
    assert tile_count(problem, spec) == 16 * 8
    assert not plan(replace(problem, pack_gqa=False), H200).spec.pack_gqa
    assert not plan(replace(problem, heads_kv=32), H200).spec.pack_gqa


def test_a_long_sequence_packs_heads_only_when_asked():
    problem = problem_of(seqlen_q=10_000)
    for asked, packed in ((None, False), (False, False), (True, True)):
        assert plan(replace(problem, pack_gqa=asked), H200).spec.pack_gqa == packed


@pytest.mark.parametrize("kind", TILE_CLASSES, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_left": 50}, {"softcap": 5.0}], ids=str)
def test_heads_are_packed_at_every_head_dim_under_every_mask_and_cap_when_asked(kind, options):
    problem = problem_of(head_dim=kind[0], head_dim_v=kind[1], pack_gqa=True, **options)
    choice, spec = kernel_of(problem, H200)
    assert spec.pack_gqa
    assert choice in PACKED[kind]
    spec.validate()
    assert spec.softcap == ("softcap" in options)


@pytest.mark.parametrize(
    "options",
    [
        {"heads_kv": 16},
        {"score_mod": "m:f"},
        {"mask_mod": "m:f"},
        {"mask_mod": "m:f", "block_sparse": True},
        {"qv": True},
    ],
    ids=str,
)
def test_heads_that_cannot_be_packed_are_not_even_when_asked(options):
    spec = plan(problem_of(pack_gqa=True, **options), H200).spec
    assert not spec.pack_gqa
    spec.validate()


# Order ------------------------------------------------------------------------------------------------------------


def orders(**changes: object):
    """The order of a problem with tiles of 128 x 64."""
    problem = problem_of(**changes)
    spec = replace(make_spec(problem.dtype, problem.head_dim, problem.mask, usual_tiles(problem)), tile_m=128)
    return order_of(problem, replace(spec, tile_n=64), H200)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "query_tiles"), [(1, 1), (127, 1), (128, 1), (129, 2), (1280, 10), (1281, 11)])
def test_tiles_cover_the_queries_of_every_head(seqlen_q, query_tiles, causal):
    assert orders(seqlen_q=seqlen_q, batch=3, heads_q=8, causal=causal).tiles == query_tiles * 3 * 8


@pytest.mark.parametrize(("seqlen_q", "row_tiles"), [(1, 1), (16, 1), (17, 2), (100, 7)])
def test_packed_tiles_cover_the_queries_of_every_group(seqlen_q, row_tiles):
    problem = problem_of(seqlen_q=seqlen_q, batch=3, pack_gqa=True)
    spec = kernel_of(problem, H200)[1]
    assert spec.tile_m == 64
    order = order_of(problem, spec, H200)
    assert order.tiles == tile_count(problem, spec) == row_tiles * 3 * 4
    # One head of tiles at a time reads its K and V.
    assert order.section == 1


@pytest.mark.parametrize("causal", [False, True])
def test_there_is_a_block_for_each_multiprocessor_but_none_without_a_tile(causal):
    counts = {}
    for heads in (1, 131, 132, 133, 1000):
        order = orders(seqlen_q=128, batch=1, heads_q=heads, heads_kv=1, causal=causal)
        counts[order.tiles] = order.blocks
    assert counts == {1: 1, 131: 131, 132: 132, 133: 132, 1000: 132}


@pytest.mark.parametrize(("sm_margin", "blocks"), [(0, 132), (1, 131), (100, 32), (131, 1), (132, 1), (10**6, 1)])
def test_as_many_multiprocessors_stay_free_as_were_asked_for(sm_margin, blocks):
    result = plan(problem_of(batch=16, sm_margin=sm_margin), H200)
    assert result.order.blocks == blocks
    assert any(f"{blocks} persistent blocks on {blocks} multiprocessors" in reason for reason in result.reasons)


@pytest.mark.parametrize("mask", [{}, {"window_left": 40, "window_right": 3}, {"attention_chunk": 50}], ids=str)
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(16, 16), (16, 4), (16, 1)])
def test_but_for_a_causal_mask_the_heads_of_one_key_head_run_at_a_time(heads_q, heads_kv, mask):
    for seqlen_k in (100, 1000, 10**6):
        order = orders(heads_q=heads_q, heads_kv=heads_kv, seqlen_k=seqlen_k, **mask)
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
    spec = make_spec("bf16", 128, "causal", usual_tiles(problem))
    # K and V of one head, 8192 keys of 128 columns each, are 4 MiB.
    devices = [replace(H200, l2_bytes=math.ceil(n * 2**20 / L2_SHARE)) for n in (20, 10)]
    assert [order_of(problem, spec, device).section for device in devices] == [5, 2]


@pytest.mark.parametrize("causal", [False, True])
def test_a_problem_without_keys_still_has_an_order(causal):
    order = orders(seqlen_k=0, causal=causal)
    assert order.section >= 1
    assert order.tiles == 8 * 16 * 2


# Plans ------------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(any_problems())
def test_every_plan_is_of_a_kernel_that_exists_and_computes_the_problem(problem):
    assume(why_not(problem) is None)
    result = plan(problem, H200)
    result.spec.validate()
    assert computes(result.spec, problem)
    assert result.order == order_of(problem, result.spec, H200)
    assert 1 <= result.order.blocks <= min(result.order.tiles, H200.sm_count - problem.sm_margin)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"dtype": "fp32"}, ("dtype fp32", "fp16, bf16")),
        ({"dtype": "fp64"}, ("dtype fp64", "fp16, bf16")),
        ({"qv": True, "head_dim": 64, "head_dim_v": 264}, ("qv beside head_dim_v=264", "up to 256")),
        (
            {"qv": True, "block_sparse": True, "mask_mod": "m:f", "head_dim": 256},
            ("qv and block_mask", "head_dim=256", "(192, 128)"),
        ),
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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_reasons_speak_of_the_choices_that_were_made(causal, packed):
    problem = problem_of(causal=causal, seqlen_q=5000, seqlen_k=5000, pack_gqa=packed)
    result = plan(problem, H200)
    spec, order = result.spec, result.order
    tiles, *group, threshold, rounds, last = result.reasons
    assert f"{spec.tile_m} queries x {spec.tile_n} keys in {spec.stages} stages" in tiles
    assert kernel_of(problem, H200)[0].reason in tiles
    assert group == (["the 4 query heads of a K/V head share tiles: fewer tiles"] if packed else [])
    assert f"2**{spec.rescale_threshold:g}" in threshold
    assert f"{order.tiles} tiles for {order.blocks} persistent blocks on 132 multiprocessors" in rounds
    assert f"{order.tiles / 132:.2f} rounds" in rounds
    assert last == order.reason
    assert ("1 head at a time" if order.section == 1 else f"{order.section} heads at a time") in last
    assert ("longest tiles first" in last) == causal


def test_a_plan_holds_the_order_and_cost_of_its_problem():
    problem = problem_of(causal=True, return_lse=True)
    result = plan(problem, H200)
    assert result.order == order_of(problem, result.spec, H200)
    assert (result.flops, result.bytes_moved) == (flops(problem), bytes_moved(problem))


# Which kernels compute a problem ----------------------------------------------------------------------------------

PLAIN = plan(problem_of(), H200).spec


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "fp16"},
        {"head_dim": 256, "head_dim_v": 256},
        {"softcap": True},
        {"qv": True},
        {"score_mod": "m:f"},
        {"mask_mod": "m:f"},
        {"score_aux": "f1"},
        {"mask_aux": "f1"},
        {"mask": "causal"},
        {"mask": "blocks"},
    ],
    ids=str,
)
def test_a_kernel_of_another_kind_does_not_compute_a_problem(changes):
    assert computes(PLAIN, problem_of())
    assert not computes(replace(PLAIN, **changes), problem_of())


@pytest.mark.parametrize(
    ("problem", "masks"),
    [
        (problem_of(), {"full", "window"}),
        (problem_of(causal=True), {"causal", "window"}),
        (problem_of(seqlen_q=1, causal=True), {"full", "causal", "window"}),
        (problem_of(window_left=9), {"window"}),
        (problem_of(window_left=9, causal=True), {"window"}),
        (problem_of(attention_chunk=9, causal=True), {"window"}),
        (problem_of(seqlen_q=1, window_left=9, causal=True), {"window"}),
        (problem_of(window_left=5000, causal=True), {"causal", "window"}),
        (problem_of(window_right=0), {"causal", "window"}),
    ],
    ids=lambda value: "" if isinstance(value, set) else str(value.bounds),
)
def test_kernels_of_other_masks_compute_a_problem_if_they_hide_the_same(problem, masks):
    found = {mask for mask in ("full", "causal", "window", "blocks") if computes(replace(PLAIN, mask=mask), problem)}
    assert found == masks


def test_the_schedule_and_packing_change_no_result():
    for changes in ({"tile_m": 64}, {"tile_n": 64}, {"stages": 2}, {"overlap": False}, {"pack_gqa": True}):
        assert computes(replace(PLAIN, **changes), problem_of(pack_gqa=False))


def test_a_block_mask_is_for_kernels_that_read_one():
    problem = problem_of(mask_mod="m:f", mask_aux=("i2",), block_sparse=True)
    spec: ForwardSpec = plan(problem, H200).spec
    assert (spec.mask, spec.mask_mod, spec.mask_aux) == ("blocks", "m:f", "i2")
    assert computes(spec, problem)
    for mask in ("full", "causal", "window"):
        assert not computes(replace(spec, mask=mask), problem)
    assert not computes(spec, replace(problem, block_sparse=False))


# Cost -------------------------------------------------------------------------------------------------------------


@st.composite
def small_masks(draw: st.DrawFn) -> dict[str, int]:
    side = st.one_of(st.just(-1), st.integers(0, 30))
    return {
        "seqlen_q": draw(st.integers(0, 25)),
        "seqlen_k": draw(st.integers(0, 25)),
        "causal": draw(st.booleans()),
        "window_left": draw(side),
        "window_right": draw(side),
        "attention_chunk": draw(st.integers(0, 30)),
    }


@settings(max_examples=1000, deadline=None)
@given(small_masks())
def test_visible_pairs_are_those_that_mask_window_and_chunk_leave(fields):
    seqlen_q, seqlen_k = fields["seqlen_q"], fields["seqlen_k"]
    left, chunk = fields["window_left"], fields["attention_chunk"]
    right = 0 if fields["causal"] else fields["window_right"]
    count = 0
    for query, key in itertools.product(range(seqlen_q), range(seqlen_k)):
        position = query + seqlen_k - seqlen_q
        inside = (left < 0 or key >= position - left) and (right < 0 or key <= position + right)
        count += inside and (not chunk or key // chunk == position // chunk)
    assert visible_pairs(problem_of(**fields)) == count


@pytest.mark.parametrize("qv", [False, True])
def test_flops_are_two_for_each_column_that_a_pair_is_multiplied_over(qv):
    for causal, seqlen_q, seqlen_k in itertools.product((False, True), (0, 1, 7), (0, 3, 12)):
        problem = problem_of(
            seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=64, head_dim_v=128, causal=causal, qv=qv, pack_gqa=True
        )
        columns = 64 + 128 + (128 if qv else 0)
        assert flops(problem) == 2 * 16 * visible_pairs(problem) * 2 * columns


@pytest.mark.parametrize(("dtype", "element"), [("fp16", 2), ("bf16", 2), ("fp32", 4), ("fp64", 8)])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("with_qv", [False, True])
def test_bytes_moved_are_those_of_every_tensor_once(dtype, element, return_lse, with_qv):
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
        qv=with_qv,
    )
    q, k, v, out = 3 * 5 * 6 * 64, 3 * 7 * 2 * 64, 3 * 7 * 2 * 128, 3 * 5 * 6 * 128
    qv = 3 * 5 * 6 * 128 if with_qv else 0
    lse = 4 * 3 * 6 * 5 if return_lse else 0
    assert bytes_moved(problem) == element * (q + k + v + out + qv) + lse


def test_planning_touches_no_gpu_and_no_tensor():
    assert "torch" not in vars(planning)


def test_more_packed_rows_than_the_kernel_counts_are_not_packed():
    problem = problem_of(seqlen_q=3 * 10**8, heads_q=8, heads_kv=1, pack_gqa=True)
    assert not plan(problem, H200).spec.pack_gqa
    assert plan(replace(problem, seqlen_q=1000), H200).spec.pack_gqa
