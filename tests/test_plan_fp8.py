"""The plan of e4m3: its tile tables, which kernel a problem gets, and what it says of it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from fa3.fp8_tiles import FP8_SMALL, FP8_TILES, fp8_rows
from fa3.plan import (
    H200,
    TWO_LEVEL_KEYS,
    bytes_moved,
    computes,
    flops,
    fp8_specs,
    kernel_of,
    make_spec,
    order_of,
    plan,
    tensor_flops_per_clock,
    transposes_before,
    usual_tiles,
    why_not,
)
from fa3.problem import Problem
from fa3.quantization import default_block
from fa3.spec import BLOCK, FP8_CLASSES, TransposeSpec
from problems import problem_of

MOD = {"score_mod": "one:score", "score_aux": "f1"}
MASK_MOD = {"mask_mod": "one:mask", "mask_aux": "i2"}
LAYOUTS = tuple(itertools.product((False, True), (0, 64, 96, 128)))
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window_left": 100}}


def fp8_problem(**changes) -> Problem:
    """As `problem_of`, in e4m3; with ``key_block`` q has blocks of 128."""
    blocks = changes.pop("key_block", 0)
    of_q = 128 if blocks else 0
    return problem_of(**{"dtype": "e4m3", "out_dtype": "bf16", "q_block": of_q, "k_block": blocks, **changes})


# Tables -----------------------------------------------------------------------------------------------------------


def test_every_tile_class_is_in_every_table():
    assert set(FP8_TILES) == set(FP8_SMALL) == set(FP8_CLASSES)


@pytest.mark.parametrize("kind", FP8_CLASSES, ids=str)
def test_every_use_has_tiles_that_are_a_kernel(kind):
    for mask, modified, (transposed, key_block) in itertools.product((*MASKS, "blocks"), (False, True), LAYOUTS):
        for add in (False, True):
            rows = fp8_rows(kind, mask, modified, key_block, transposed, add)
            assert rows[-1][0] == math.inf
            for _, choice in rows:
                assert choice.reason
                assert bool(choice.promote) is add
                assert bool(choice.transpose_stages) is not transposed
                features = {"key_block": key_block, **(MASK_MOD if mask == "blocks" else {})}
                make_spec("e4m3", kind, mask, choice, **features).validate()
                if modified:
                    make_spec("e4m3", kind, mask, choice, softcap=True, **MOD, **{**MASK_MOD, **features}).validate()
                    assert choice.tile_m == BLOCK
    for choice in FP8_SMALL[kind]:
        make_spec("e4m3", kind, "causal", choice, key_block=default_block(kind[0])[1]).validate()


def test_a_row_may_be_for_keys_up_to_a_length(monkeypatch):
    from fa3 import fp8_tiles

    rows = fp8_tiles._rows("1024:192x64x4/2 192x96x3/2+4", "why")
    assert [limit for limit, _ in rows] == [1024, math.inf]
    first, second = (choice for _, choice in rows)
    assert (first.tile_m, first.tile_n, first.stages, first.transpose_stages, first.promote) == (192, 64, 4, 2, 0)
    assert (second.tile_n, second.stages, second.promote) == (96, 3, 4)
    monkeypatch.setitem(FP8_TILES[128, 128], "full", (rows, rows))
    assert usual_tiles(fp8_problem(seqlen_k=1024)) is first
    assert usual_tiles(fp8_problem(seqlen_k=1025)) is second


# Kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FP8_CLASSES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_the_kernel_of_a_problem_computes_it(kind, mask):
    for (transposed, key_block), two_level, seqlen_k in itertools.product(LAYOUTS, (None, False, True), (300, 9000)):
        problem = fp8_problem(
            head_dim=kind[0], head_dim_v=kind[1], seqlen_q=300, seqlen_k=seqlen_k, key_block=key_block,
            v_transposed=transposed, two_level=two_level, **MASKS[mask],
        )  # fmt: skip
        assert why_not(problem) is None
        spec = plan(problem, H200).spec
        spec.validate()
        assert computes(spec, problem)
        assert (spec.dtype, spec.out_dtype, spec.mask) == ("e4m3", "bf16", mask)
        assert (spec.key_block, bool(spec.transpose_stages)) == (key_block, not transposed)
        assert not spec.pack_gqa
        added = two_level or (two_level is None and seqlen_k > TWO_LEVEL_KEYS)
        assert bool(spec.promote) == bool(added)


def test_a_reference_moves_before_probabilities_outgrow_the_largest_number():
    spec = plan(fp8_problem(), H200).spec
    assert 256 * 2**spec.rescale_threshold < 448
    assert plan(problem_of(), H200).spec.rescale_threshold == 8.0


def test_narrow_heads_beside_wide_values_are_padded_to_a_class_of_e4m3():
    spec = plan(fp8_problem(head_dim=64, head_dim_v=256), H200).spec
    assert (spec.head_dim, spec.head_dim_v) == (256, 256)
    spec = plan(fp8_problem(head_dim=144, head_dim_v=80), H200).spec
    assert (spec.head_dim, spec.head_dim_v) == (192, 128)


def test_options_have_tiles_of_two_warpgroups_whose_keys_divide_a_block():
    for changes in ({"softcap": 5.0}, {"score_mod": "m:f"}, {"mask_mod": "m:f", "block_sparse": True}):
        for key_block in (0, 64, 128):
            problem = fp8_problem(**changes, key_block=key_block)
            spec = plan(problem, H200).spec
            assert spec.tile_m == BLOCK
            assert BLOCK % spec.tile_n == 0
            assert key_block % spec.tile_n == 0
            assert computes(spec, problem)


def test_out_in_fp16_is_another_kernel():
    problem = fp8_problem(out_dtype="fp16", seqlen_q=8000)
    spec = plan(problem, H200).spec
    assert spec.out_dtype == "fp16"
    assert computes(spec, problem)
    assert not computes(spec, fp8_problem(seqlen_q=8000))


@pytest.mark.parametrize(
    "change",
    [
        {"v_transposed": True},
        {"key_block": 128},
        {"out_dtype": "fp16"},
        {"two_level": True},
    ],
    ids=str,
)
def test_the_kernel_of_another_layout_is_refused(change):
    spec = plan(fp8_problem(), H200).spec
    assert computes(spec, fp8_problem())
    assert not computes(spec, fp8_problem(**change))


def test_a_kernel_that_adds_in_float32_is_refused_where_that_is_not_wanted():
    spec = plan(fp8_problem(two_level=True), H200).spec
    assert computes(spec, fp8_problem())
    assert not computes(spec, fp8_problem(two_level=False))


def test_16_bit_kernels_and_those_of_e4m3_do_not_stand_in_for_each_other():
    assert not computes(plan(fp8_problem(), H200).spec, problem_of())
    assert not computes(plan(problem_of(), H200).spec, fp8_problem())


def test_packed_heads_are_never_chosen():
    for pack_gqa in (None, False, True):
        assert not plan(fp8_problem(seqlen_q=1, pack_gqa=pack_gqa), H200).spec.pack_gqa


@pytest.mark.parametrize("kind", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(("transposed", "blocks"), [(False, False), (True, False), (True, True)])
def test_few_tiles_get_smaller_ones_that_ship(kind, transposed, blocks):
    key_block = default_block(kind[0])[1] if blocks else 0
    problem = fp8_problem(
        batch=1, seqlen_q=512, heads_q=16, head_dim=kind[0], key_block=key_block, v_transposed=transposed
    )
    choice, spec = kernel_of(problem, H200)
    assert choice is FP8_SMALL[kind][transposed]
    assert spec in set(fp8_specs())
    assert kernel_of(replace(problem, seqlen_q=16_000), H200)[0] is usual_tiles(problem)
    # Of fp16 none ship.
    assert kernel_of(replace(problem, out_dtype="fp16"), H200)[0] is usual_tiles(problem)


# Reasons and costs ------------------------------------------------------------------------------------------------


def reasons(**changes) -> str:
    return "\n".join(plan(fp8_problem(**changes), H200).reasons)


def test_reasons_say_how_v_comes_and_how_outputs_are_added():
    assert "spare warps of the producer transpose it, 2 tiles ahead" in reasons()
    assert "v comes transposed" in reasons(v_transposed=True)
    assert "added in float32 every 4 key tiles, as asked" in reasons(two_level=True)
    assert "added in float32 every 4 key tiles, 5000 keys" in reasons(seqlen_k=5000)
    assert "tensor cores add outputs, with 14 bits or so, as asked" in reasons(seqlen_k=5000, two_level=False)
    assert "with 14 bits or so, 1000 keys" in reasons()
    assert "every key tile, in 4 parts of their columns, as asked" in reasons(two_level=True, head_dim=256)
    assert "over 2**0.8" in reasons()
    assert "tensor cores" not in "\n".join(plan(problem_of(), H200).reasons)


def test_bytes_are_one_for_an_element_of_q_k_and_v_and_two_of_out():
    problem = fp8_problem(return_lse=True)
    elements = 2 * 1000 * 128
    assert bytes_moved(problem) == elements * (16 + 4 + 4) + 2 * elements * 16 + 4 * 2 * 1000 * 16
    assert flops(problem) == flops(problem_of())


def test_twice_the_flops_of_a_clock_leave_less_time_to_read_keys_again():
    assert tensor_flops_per_clock(H200, "e4m3") == 2 * tensor_flops_per_clock(H200, "bf16")
    problem = fp8_problem(seqlen_q=16_384, seqlen_k=16_384, causal=True)
    wide = replace(problem, dtype="bf16", out_dtype="")
    spec = plan(problem, H200).spec
    # Bytes are halved too: as many phases, over tiles of as many rows.
    assert order_of(problem, spec, H200).levels == order_of(wide, spec, H200).levels


@pytest.mark.parametrize("v_blocks", [False, True])
def test_v_may_have_a_scale_for_each_block_of_k_or_one_a_head(v_blocks):
    problem = fp8_problem(key_block=128, v_blocks=v_blocks)
    spec = plan(problem, H200).spec
    assert (spec.key_block, spec.value_blocks) == (128, v_blocks)
    assert computes(spec, problem)
    assert not computes(spec, replace(problem, v_blocks=not v_blocks))
    assert ("vscales" in spec.name) is v_blocks


def test_blocks_of_v_are_those_of_k():
    with pytest.raises(ValueError, match=r"^v_blocks=True beside k_block=0: blocks of v are those of k"):
        fp8_problem(v_blocks=True)
    spec = plan(fp8_problem(), H200).spec
    with pytest.raises(ValueError, match=r"^value_blocks=True beside key_block=0: blocks of v are those of k"):
        replace(spec, value_blocks=True).validate()


@pytest.mark.parametrize(
    ("mask", "adds"),
    [
        ({}, True),
        ({"causal": True}, True),
        ({"window_left": 100}, True),
        ({"window_left": 100, "window_right": 0}, False),
        ({"window_left": 2047, "window_right": 0}, False),
        ({"window_left": 2000, "window_right": 48}, True),
        ({"attention_chunk": 1024}, False),
        ({"attention_chunk": 4096}, True),
    ],
    ids=str,
)
def test_windows_and_chunks_that_show_few_keys_need_no_float32_sums(mask, adds):
    problem = fp8_problem(seqlen_q=9000, seqlen_k=9000, **mask)
    assert TWO_LEVEL_KEYS == 2048
    assert bool(plan(problem, H200).spec.promote) is adds


# A pass that transposes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, True),
        ({"head_dim": 208, "head_dim_v": 208}, True),
        ({"key_block": 128}, True),
        ({"causal": True}, True),
        ({"seqlen_q": 1500}, False),
        ({"causal": True, "seqlen_q": 3000, "seqlen_k": 3000}, False),
        ({"window_left": 1000, "window_right": 0}, False),
        ({"seqlen_q": 600, "heads_q": 32, "heads_kv": 8}, True),
        ({"v_transposed": True}, False),
        ({"head_dim": 192, "head_dim_v": 192}, False),
        ({"softcap": 10.0}, False),
        (MOD, False),
        ({"batch": 1, "heads_q": 1, "heads_kv": 1, "seqlen_k": 2048, "seqlen_q": 2048}, False),
        ({"batch": 70_000, "seqlen_k": 2048, "seqlen_q": 2048}, False),
        ({"seqlen_k": 0}, False),
    ],
    ids=str,
)
def test_v_of_wide_heads_is_transposed_before_where_many_queries_see_each_key(changes, passes):
    sizes = {"batch": 4, "seqlen_q": 4096, "seqlen_k": 4096, "heads_q": 8, "heads_kv": 8}
    problem = fp8_problem(**{**sizes, "head_dim": 256, "head_dim_v": 256, **changes})
    assert transposes_before(problem) is passes
    planned = plan(problem, H200)
    assert planned.transpose == (TransposeSpec() if passes else None)
    if passes:
        after = plan(replace(problem, v_transposed=True), H200)
        assert (planned.spec, planned.order) == (after.spec, after.order)
        assert "a pass of its own transposes it" in planned.reasons[0]
        assert sum("v comes" in reason for reason in planned.reasons) == 1
    else:
        assert problem.v_transposed != bool(planned.spec.transpose_stages)


def test_sixteen_bits_need_no_transposition():
    assert not transposes_before(problem_of(head_dim=256, head_dim_v=256, seqlen_q=8192, seqlen_k=8192))


@pytest.mark.parametrize(("kind", "turns"), [((64, 64), False), ((128, 128), True), ((256, 256), False)], ids=str)
def test_warpgroups_take_turns_where_that_is_faster(kind, turns):
    usual, added = (fp8_rows(kind, "full", False, 0, True, add)[-1][1] for add in (False, True))
    assert make_spec("e4m3", kind, "full", usual).pingpong is turns
    assert make_spec("e4m3", kind, "full", added).pingpong is (turns or kind[1] > 128)
    assert not make_spec("e4m3", kind, "window", usual).pingpong


# What ships -------------------------------------------------------------------------------------------------------


def test_shipped_kernels_are_few_and_valid_and_what_plans_ask_for():
    specs = list(fp8_specs())
    assert len(specs) == len(set(specs)) <= 114
    for spec in specs:
        spec.validate()
        assert spec.out_dtype == "bf16"
    shipped = set(specs)
    for kind, mask, two_level in itertools.product(FP8_CLASSES, ("full", "causal"), (False, True)):
        common = kind in ((64, 64), (128, 128), (256, 256))
        for transposed, key_block in (
            itertools.product((False, True), (0, default_block(kind[0], two_level)[1])) if common else ((False, 0),)
        ):
            if two_level and not common:
                continue
            problem = fp8_problem(
                head_dim=kind[0], head_dim_v=kind[1], seqlen_q=9000, seqlen_k=9000, key_block=key_block,
                v_transposed=transposed, two_level=two_level, **MASKS[mask],
            )  # fmt: skip
            assert plan(problem, H200).spec in shipped
    for head_dim, transposed in itertools.product((64, 128), (False, True)):
        problem = fp8_problem(head_dim=head_dim, v_transposed=transposed, **MASKS["window"])
        assert plan(problem, H200).spec in shipped
