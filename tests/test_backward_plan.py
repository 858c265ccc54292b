"""The plan of gradients: tile classes, shared memory, the order of the key tiles, counts, and what has no kernels."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis.strategies import booleans

from fa3.backward_plan import (
    BACKWARD_MODIFIED,
    BACKWARD_TILES,
    BUSY,
    EVEN_ROUNDS,
    backward_class,
    backward_flops,
    backward_order,
    backward_specs,
    backward_tiles,
    group_parts,
    make_backward_specs,
    plan_backward,
    why_no_backward,
)
from fa3.backward_spec import BACKWARD_CLASSES, BackwardSpec, FinishSpec, PrepareSpec, QueryGradientSpec
from fa3.cli import explain
from fa3.plan import H200, flops, visible_pairs
from fa3.presets import shipped_specs
from fa3.problem import Problem
from fa3.spec import BLOCK, ELEMENT_BYTES, SHARED_MEMORY_PER_BLOCK
from problems import any_problems, plain_problems, problem_of

MASKS = ("full", "causal", "window")
OF_A_MASK = {"full": {}, "causal": {"causal": True}, "window": {"window_left": 77}}

#: Registers of a thread that consumes, and what of them the main loop needs beside its accumulators.
CONSUMER_REGISTERS, OTHER_REGISTERS = 240, 40


# Tile classes and tables ------------------------------------------------------------------------------------------


def test_every_head_dim_of_the_api_gets_the_class_that_holds_it_with_the_least_work():
    for head_dim, head_dim_v in itertools.product(range(8, 257, 8), repeat=2):
        kind = backward_class(head_dim, head_dim_v)
        assert kind[0] >= head_dim
        assert kind[1] >= head_dim_v
        holding = [c for c in BACKWARD_CLASSES if c[0] >= head_dim and c[1] >= head_dim_v]
        assert sum(kind) == min(map(sum, holding))


@pytest.mark.parametrize("head_dim_v", [264, 512])
def test_wide_values_are_computed_in_parts_of_the_widest_class(head_dim_v):
    assert backward_class(64, head_dim_v) == (64, 256)
    assert backward_class(72, head_dim_v) == (256, 256)


def test_every_class_has_tiles_with_a_reason():
    assert set(BACKWARD_TILES) == set(BACKWARD_MODIFIED) == set(BACKWARD_CLASSES)
    for kind, modified in itertools.product(BACKWARD_CLASSES, (False, True)):
        assert backward_tiles(kind, modified).reason


@pytest.mark.parametrize("modified", [False, True], ids=["plain", "modified"])
@pytest.mark.parametrize("kind", BACKWARD_CLASSES, ids=str)
@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_every_class_fits_shared_memory_and_registers(dtype, kind, modified):
    for mask, deterministic in itertools.product(MASKS, (False, True)):
        tiles = backward_tiles(kind, modified)
        specs = make_backward_specs(dtype, kind, mask, tiles, deterministic=deterministic, softcap=modified)
        for spec in specs:
            spec.validate()
            assert spec.shared_bytes <= SHARED_MEMORY_PER_BLOCK
        _, main, _ = specs
        share = 1 if main.split_keys else main.consumer_warpgroups
        # Float32 accumulators of 64 rows take half as many registers of a thread as they have columns.
        gradients = (main.head_dim + main.head_dim_v) // share // 2
        assert gradients + main.score_rows // 2 + OTHER_REGISTERS <= CONSUMER_REGISTERS


def test_the_three_kernels_agree_on_dtype_columns_and_rows():
    for kind, mask in itertools.product(BACKWARD_CLASSES, MASKS):
        prepare, main, finish = make_backward_specs("bf16", kind, mask, backward_tiles(kind))
        assert (prepare.dtype, prepare.head_dim_v, prepare.tile_m) == (main.dtype, main.head_dim_v, main.tile_m)
        assert (finish.dtype, finish.head_dim) == (main.dtype, main.head_dim)
        # What makes dQ by queries has rows of its own.
        assert (finish.tile_m == main.tile_m) == isinstance(finish, FinishSpec)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("kind", BACKWARD_CLASSES, ids=str)
def test_a_block_mask_has_kernels_whose_tiles_divide_its_blocks(kind, softcap, deterministic):
    options = {"block_sparse": True, "mask_mod": "m:f", "mask_aux": ("i2",), "softcap": softcap}
    problem = problem_of(head_dim=kind[0], head_dim_v=kind[1], **options)
    assert why_no_backward(problem) is None
    planned = plan_backward(problem, H200, deterministic=deterministic)
    for spec in (planned.main, planned.finish):
        spec.validate()
        if not isinstance(spec, FinishSpec):
            assert (spec.mask, spec.mask_mod, spec.mask_aux) == ("blocks", "m:f", "i2")
            assert BLOCK % spec.tile_m == BLOCK % spec.tile_n == 0
    assert planned.main.deterministic == (deterministic and planned.main.dq_stages > 0)
    plain = plan_backward(problem_of(head_dim=kind[0], head_dim_v=kind[1], softcap=softcap), H200)
    assert (planned.main.tile_m, planned.main.tile_n) == (plain.main.tile_m, plain.main.tile_n)


# Plans ------------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(any_problems())
def test_every_plan_is_of_kernels_that_exist_and_compute_the_problem(problem):
    assume(why_no_backward(problem) is None)
    for deterministic in (False, True):
        result = plan_backward(problem, H200, "one:derivative", deterministic)
        for spec in (result.prepare, result.main, result.finish):
            spec.validate()
        main = result.main
        columns = problem.head_dim + (problem.head_dim_v if problem.qv else 0)
        assert (main.dtype, main.softcap) == (problem.dtype, problem.softcap > 0)
        assert main.mask == problem.mask
        assert main.head_dim >= columns
        assert main.head_dim_v >= min(problem.head_dim_v, 256)
        assert (main.score_mod, main.mask_mod) == (problem.score_mod, problem.mask_mod)
        assert (main.score_aux, main.mask_aux) == (",".join(problem.score_aux), ",".join(problem.mask_aux))
        assert main.derivative == ("one:derivative" if problem.score_mod else "")
        assert main.deterministic == (deterministic and main.dq_stages > 0)
        assert result.parts == group_parts(problem, main, H200)
        assert result.order == backward_order(problem, main, H200, result.parts)
        assert result.flops == backward_flops(problem)


@settings(max_examples=300, deadline=None)
@given(plain_problems())
def test_the_backward_preset_holds_whatever_gradients_of_plain_calls_and_windows_ask_for(problem):
    planned = plan_backward(problem, H200)
    assert {planned.prepare, planned.main, planned.finish} <= set(shipped_specs("backward"))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", BACKWARD_CLASSES, ids=str)
def test_the_preset_for_tests_holds_those_in_a_fixed_order(kind, mask):
    problem = problem_of(head_dim=kind[0], head_dim_v=kind[1], **OF_A_MASK[mask])
    planned = plan_backward(problem, H200, deterministic=True)
    assert {planned.prepare, planned.main, planned.finish} <= set(shipped_specs("tests"))


def test_the_preset_for_tests_holds_those_of_the_usual_features_as_they_are_planned():
    alibi = {"score_mod": "fa3.kernels.mods:alibi", "score_aux": ("f1",)}
    bias = {"score_mod": "fa3.kernels.mods:relative_bias", "score_aux": ("f2",)}
    prefix = {"mask_mod": "fa3.kernels.mods:prefix_lm", "mask_aux": ("i1",)}
    for changes in (
        {"head_dim": 64, "causal": True, "softcap": 9.0},
        {"softcap": 9.0},
        {"head_dim": 256, "softcap": 9.0},
        {"head_dim": 64, "causal": True, **alibi},
        {"causal": True, **alibi},
        {**bias, **prefix},
        {"window_left": 9, "softcap": 9.0, **bias, **prefix},
    ):
        planned = plan_backward(problem_of(**changes), H200, "fa3.kernels.mods:additive")
        assert {planned.prepare, planned.main, planned.finish} <= set(shipped_specs("tests")), changes


def test_the_specs_of_all_gradients_are_of_every_kind_for_every_dtype_class_and_mask():
    specs = list(backward_specs())
    mains = [spec for spec in specs if type(spec) is BackwardSpec]
    kinds = {(spec.dtype, spec.head_dim, spec.head_dim_v, spec.mask) for spec in mains}
    assert kinds == {(dtype, *kind, mask) for dtype in ELEMENT_BYTES for kind in BACKWARD_CLASSES for mask in MASKS}
    assert {type(spec) for spec in specs} == {PrepareSpec, BackwardSpec, FinishSpec, QueryGradientSpec}
    assert not any(spec.modified for spec in mains)


@settings(max_examples=200, deadline=None)
@given(plain_problems(), booleans())
def test_everybody_has_the_kernels_for_the_gradients_of_plain_calls(problem, deterministic):
    assume(problem.dtype in ELEMENT_BYTES)
    planned = plan_backward(problem, H200, deterministic=deterministic)
    assert {planned.prepare, planned.main, planned.finish} <= set(shipped_specs("backward"))


def test_a_fixed_order_is_another_main_kernel_and_nothing_else():
    either = [plan_backward(problem_of(causal=True), H200, deterministic=fixed) for fixed in (False, True)]
    assert [planned.main.deterministic for planned in either] == [False, True]
    assert either[0].prepare == either[1].prepare
    assert either[0].finish == either[1].finish
    assert either[0].order == either[1].order


def test_reasons_speak_of_the_choices_that_were_made():
    planned = plan_backward(problem_of(causal=True), H200)
    tiles, parts, order = planned.reasons
    main = planned.main
    assert f"{main.tile_m} queries x {main.tile_n} keys in {main.stages} stages" in tiles
    assert BACKWARD_TILES[128, 128].reason in tiles
    assert planned.parts > 1
    assert f"the 4 query heads of a K/V head in {planned.parts} parts" in parts
    assert order == planned.order.reason
    assert f"{planned.order.tiles} tiles of keys for {planned.order.blocks} persistent blocks" in order


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"dtype": "fp32"}, ("dtype fp32", "fp16, bf16")),
        ({"qv": True, "head_dim": 64, "head_dim_v": 200}, ("qv beside head_dim=64, head_dim_v=200", "256 in all")),
    ],
)
def test_a_problem_without_kernels_says_what_is_missing_and_what_there_is(changes, parts):
    problem = problem_of(**changes)
    message = why_no_backward(problem)
    assert message is not None
    for part in parts:
        assert part in message
    with pytest.raises(NotImplementedError) as caught:
        plan_backward(problem, H200)
    assert str(caught.value) == message


def test_qv_has_kernels_as_long_as_its_columns_and_those_of_q_fit_together():
    assert why_no_backward(problem_of(qv=True, head_dim=64, head_dim_v=192)) is None
    main = plan_backward(problem_of(qv=True, head_dim=64, head_dim_v=128), H200).main
    assert (main.head_dim, main.head_dim_v) == (192, 128)


# Order ------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(plain_problems())
def test_every_key_tile_of_every_head_is_a_tile_of_work_and_blocks_are_no_more_than_those(problem):
    planned = plan_backward(problem, H200)
    order, tile_n = planned.order, planned.main.tile_n
    per_head = math.ceil(problem.seqlen_k / tile_n)
    heads = problem.heads_kv * problem.batch * planned.parts
    assert order.tiles == per_head * heads
    assert order.levels == per_head, "a head's keys are done before the next section's turn"
    assert 1 <= order.section <= heads
    assert 1 <= order.blocks <= min(order.tiles, max(1, H200.sm_count - problem.sm_margin))


@settings(max_examples=200, deadline=None)
@given(plain_problems())
def test_the_query_heads_of_a_key_head_come_in_as_few_parts_as_fill_the_card(problem):
    planned = plan_backward(problem, H200)
    tiles = planned.order.tiles // planned.parts
    assert problem.group_size % planned.parts == 0, "parts are alike"
    multiprocessors = max(1, H200.sm_count - problem.sm_margin)

    def is_enough(parts):
        rounds = tiles * parts / multiprocessors
        return rounds >= BUSY * math.ceil(rounds) if problem.mask == "full" else rounds >= EVEN_ROUNDS

    divisors = [n for n in range(1, problem.group_size + 1) if problem.group_size % n == 0]
    enough = [n for n in divisors if is_enough(n)]
    assert planned.parts == enough[0] if enough else planned.parts in divisors


def test_tiles_of_equal_length_that_just_fill_the_card_stay_whole():
    shared = {"heads_q": 32, "heads_kv": 8, "seqlen_q": 2048, "seqlen_k": 2048, "batch": 1}
    assert plan_backward(problem_of(**shared), H200).parts == 1, "128 tiles for 132 multiprocessors"
    assert plan_backward(problem_of(**shared, causal=True), H200).parts == 4, "half of them are short"
    assert plan_backward(problem_of(**(shared | {"heads_q": 0, "heads_kv": 0})), H200).parts == 1


def test_heads_that_share_no_keys_and_long_sequences_have_one_part():
    assert plan_backward(problem_of(seqlen_k=1, heads_q=4, heads_kv=4), H200).parts == 1
    assert plan_backward(problem_of(seqlen_k=100_000), H200).parts == 1
    assert plan_backward(problem_of(batch=1, seqlen_k=1, heads_q=12, heads_kv=1), H200).parts == 12


def test_heads_run_side_by_side_as_long_as_l2_holds_what_they_read_and_add_to():
    sections = set()
    for seqlen in (512, 4096, 16384, 65536):
        problem = problem_of(seqlen_q=seqlen, seqlen_k=seqlen, heads_q=32, heads_kv=32, batch=4)
        main = plan_backward(problem, H200).main
        section = backward_order(problem, main, H200).section
        # q, dout and the float32 sums of dQ.
        head_bytes = seqlen * (2 * 128 + 2 * 128 + 4 * 128)
        enough = math.ceil(H200.sm_count / math.ceil(seqlen / main.tile_n))
        assert section * head_bytes <= H200.l2_bytes or section == enough
        sections.add(section)
    assert len(sections) > 2


@pytest.mark.parametrize("changes", [{"seqlen_k": 0}, {"seqlen_q": 0}, {"batch": 0}, {"heads_q": 0, "heads_kv": 0}])
def test_an_empty_problem_has_an_order_that_can_be_divided_by(changes):
    order = plan_backward(problem_of(**changes), H200).order
    assert order.section >= 1
    assert order.levels >= 1
    assert order.blocks >= 1


def test_free_multiprocessors_are_left_free():
    problem = problem_of(seqlen_k=50_000, sm_margin=32)
    assert plan_backward(problem, H200).order.blocks == H200.sm_count - 32
    assert plan_backward(problem, replace(H200, sm_count=16)).order.blocks == 1


# Counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
def test_five_products_are_two_and_a_half_times_those_of_the_forward(mask):
    problem = problem_of(**OF_A_MASK[mask])
    assert backward_flops(problem) == 2.5 * flops(problem)


def test_each_product_counts_its_own_columns():
    problem = problem_of(head_dim=64, head_dim_v=192)
    pairs = 2.0 * problem.batch * problem.heads_q * visible_pairs(problem)
    # Scores, dQ and dK; dP and dV.
    assert backward_flops(problem) == pairs * (3 * 64 + 2 * 192)
    assert backward_flops(replace(problem, qv=True)) == pairs * (3 * (64 + 192) + 2 * 192)


def test_explain_names_the_kernels_of_gradients_or_says_why_there_are_none():
    problem = Problem(2, 4096, 4096, 16, 16, 128, 128, "bf16", 0.1, causal=True)
    said = explain.explanation(problem)["gradients"]
    planned = plan_backward(problem, H200)
    assert said["plan"] == [planned.prepare.name, planned.main.name, planned.finish.name]
    assert said["flops"] == planned.flops
    for change, word in (({"dtype": "fp32"}, "fp32"), ({"score_mod": "mine:changed"}, "mine:changed")):
        said = explain.explanation(replace(problem, **change))["gradients"]
        assert said["plan"] is None
        assert word in said["no_plan"]
