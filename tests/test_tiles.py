"""The tile tables and the sets of specs to compile."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from fa3.backward_spec import BACKWARD_CLASSES, BackwardSpec, FinishSpec, PrepareSpec, QueryGradientSpec
from fa3.cli import compile as compile_command
from fa3.plan import H200, make_spec, plan, why_not
from fa3.presets import PRESETS, shipped_specs
from fa3.spec import BLOCK, SHARED_MEMORY_PER_BLOCK, TILE_CLASSES, ForwardSpec
from fa3.tiles import CANDIDATES, MODIFIED, PACKED, QV, SMALL, TILES, TileChoice
from problems import plain_problems

DTYPES = ("fp16", "bf16")
MASKS = ("full", "causal", "window")
MOD = {"score_mod": "one:score", "score_aux": "f1"}
MASK_MOD = {"mask_mod": "one:mask", "mask_aux": "i2"}


def size(choice: TileChoice) -> tuple[int, int, int]:
    return choice.tile_m, choice.tile_n, choice.stages


# Tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [TILES, SMALL, PACKED, MODIFIED, QV, CANDIDATES])
def test_every_tile_class_is_in_every_table(table):
    assert set(table) == set(TILE_CLASSES)


@pytest.mark.parametrize("kind", TILE_CLASSES, ids=str)
def test_there_are_rows_for_every_key_length_under_every_mask(kind):
    assert set(TILES[kind]) == set(MASKS)
    for rows in TILES[kind].values():
        limits = [limit for limit, _ in rows]
        assert limits == sorted(set(limits))
        assert limits[-1] == math.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", TILE_CLASSES, ids=str)
def test_every_row_of_every_table_is_a_kernel(kind, dtype):
    def validate(choice, masks, **features):
        for mask in masks:
            make_spec(dtype, kind, mask, choice, **features).validate()

    for mask, rows in TILES[kind].items():
        for _, choice in rows:
            validate(choice, [mask])
    for choice in SMALL[kind]:
        validate(choice, ("full", "causal"))
    for choice in PACKED[kind]:
        validate(choice, MASKS, pack_gqa=True)
        validate(choice, MASKS, pack_gqa=True, softcap=True)
    validate(MODIFIED[kind], MASKS, softcap=True)
    validate(MODIFIED[kind], MASKS, softcap=True, **MOD, **MASK_MOD)
    validate(MODIFIED[kind], ["blocks"], softcap=True, **MOD, **MASK_MOD)
    validate(QV[kind], MASKS, qv=True, softcap=True, **MOD, **MASK_MOD)
    if BLOCK % QV[kind].tile_n == 0:
        validate(QV[kind], ["blocks"], qv=True, **MASK_MOD)
    for choice in CANDIDATES[kind]:
        validate(choice, MASKS)


@pytest.mark.parametrize("kind", TILE_CLASSES, ids=str)
def test_every_row_but_candidates_says_why(kind):
    rows = [choice for rows in TILES[kind].values() for _, choice in rows]
    for choice in (*rows, *SMALL[kind], *PACKED[kind], MODIFIED[kind], QV[kind]):
        assert choice.reason


@pytest.mark.parametrize("kind", TILE_CLASSES, ids=str)
def test_costs_are_relative_to_the_tiles_of_long_sequences_which_do_most_in_their_time(kind):
    for mask in ("full", "causal"):
        usual = TILES[kind][mask][-1][1]
        assert usual.cost == 1.0
        for choice in (*SMALL[kind], *PACKED[kind]):
            # Costs are rounded, and a table may prefer one of two that are within 2%.
            assert choice.cost / choice.tile_m >= 0.97 * usual.cost / usual.tile_m
            assert choice.tile_m >= usual.tile_m or choice.cost < usual.cost


@pytest.mark.parametrize("kind", TILE_CLASSES, ids=str)
def test_the_sweep_tries_whatever_the_tables_choose_for_plain_calls(kind):
    tried = {size(choice) for choice in CANDIDATES[kind]}
    assert len(tried) == len(CANDIDATES[kind])
    chosen = {size(choice) for rows in TILES[kind].values() for _, choice in rows}
    assert chosen | {size(choice) for choice in SMALL[kind]} <= tried


# Presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_specs_of_a_preset_are_valid_and_have_names_of_their_own(preset):
    specs = shipped_specs(preset)
    assert specs
    for spec in specs:
        spec.validate()
        assert spec.shared_bytes <= SHARED_MEMORY_PER_BLOCK
    assert len({spec.name for spec in specs}) == len(set(specs)) == len(specs)
    assert specs == shipped_specs(preset), "the order is fixed"


def test_the_command_line_offers_all_presets():
    assert compile_command.PRESETS == PRESETS


def test_the_smoke_preset_is_one_kernel_that_plans_use():
    (spec,) = shipped_specs("smoke")
    assert spec in shipped_specs("forward")


def test_the_preset_of_everything_holds_what_is_shipped_and_stays_small():
    everything = shipped_specs("all")
    for preset in ("smoke", "forward", "backward", "training", "features", "schedule", "fp8"):
        assert set(shipped_specs(preset)) <= set(everything)
    # Compiling takes seconds for each; gradients take three kernels a tile class, and e4m3 has its layouts and scales.
    assert len(everything) <= 384
    assert len(shipped_specs("fp8")) <= 190


def test_the_training_preset_is_forward_and_backward():
    assert set(shipped_specs("training")) == {*shipped_specs("forward"), *shipped_specs("backward")}
    assert {spec.as_dict()["kernel"] for spec in shipped_specs("backward")} == {
        "prepare",
        "backward",
        "backward_dq",
        "finish",
    }


@settings(max_examples=300, deadline=None)
@given(plain_problems())
def test_the_forward_preset_holds_whatever_plain_calls_and_windows_ask_for(problem):
    assert why_not(problem) is None
    assert plan(problem, H200).spec in shipped_specs("forward")


def test_the_forward_preset_has_packed_heads_at_the_usual_head_dims():
    packed = {(spec.dtype, spec.head_dim, spec.mask) for spec in shipped_specs("forward") if spec.pack_gqa}
    assert packed == set(itertools.product(DTYPES, (64, 128), MASKS))


def test_the_features_preset_has_every_option_that_changes_a_kernel():
    specs = shipped_specs("features")
    assert {spec.mask for spec in specs if spec.softcap and spec.head_dim == 128} >= set(MASKS)
    assert {spec.head_dim for spec in specs if spec.mask == "blocks"} == {64, 128, 256}
    assert any(spec.qv and spec.mask == "causal" for spec in specs)
    assert any(spec.qv and spec.head_dim_v == 256 for spec in specs)
    assert any(spec.score_mod and not spec.mask_mod for spec in specs)
    assert any(spec.mask_mod and not spec.score_mod for spec in specs)
    assert any(spec.softcap and spec.score_mod and spec.mask_mod and spec.mask == "window" for spec in specs)


def test_the_preset_for_tests_has_the_options_at_every_usual_head_dim_under_every_mask():
    assert set(shipped_specs("all")) <= set(shipped_specs("tests"))
    specs = [spec for spec in shipped_specs("tests") if isinstance(spec, ForwardSpec)]
    capped = {(spec.head_dim, spec.mask) for spec in specs if spec.softcap and not spec.score_mod}
    assert capped == {*itertools.product((64, 128, 256), MASKS), (64, "blocks"), (128, "blocks")}
    assert {spec.mask for spec in specs if spec.qv} == {"full", "causal"}


def test_the_preset_for_tests_has_gradients_in_a_fixed_order_of_every_tile_class_and_those_of_features():
    specs = [spec for spec in shipped_specs("tests") if isinstance(spec, BackwardSpec)]
    fixed = [spec for spec in specs if spec.deterministic or not spec.dq_stages]
    assert {(spec.head_dim, spec.head_dim_v) for spec in fixed} == set(BACKWARD_CLASSES)
    assert {spec.mask for spec in fixed} == {*MASKS, "blocks"}
    listed = {(spec.head_dim, spec.deterministic or not spec.dq_stages) for spec in specs if spec.mask == "blocks"}
    assert listed == {*itertools.product((64, 128), (False, True)), (256, True)}
    assert any(spec.softcap for spec in specs)
    assert any(spec.score_mod and spec.mask_mod for spec in specs)
    # Whatever they ask for comes with what runs before and after it.
    beside = set(shipped_specs("tests"))
    for spec in specs:
        assert PrepareSpec(spec.dtype, spec.head_dim_v, spec.tile_m) in beside
        if spec.dq_stages:
            assert FinishSpec(spec.dtype, spec.head_dim, spec.tile_m) in beside
    by_queries = {spec.mask for spec in beside if isinstance(spec, QueryGradientSpec)}
    assert by_queries == {spec.mask for spec in specs if not spec.dq_stages} == {*MASKS, "blocks"}


def test_the_schedule_preset_has_the_papers_ablation_every_combination_of_switches_in_fp16_at_128():
    full = make_spec("fp16", 128, "full", TILES[128, 128]["full"][-1][1])
    specs = shipped_specs("schedule")
    for specialized, pingpong, overlap in itertools.product((False, True), repeat=3):
        assert replace(full, warp_specialized=specialized, pingpong=pingpong, overlap=overlap) in specs


@pytest.mark.parametrize("mask", MASKS)
def test_the_schedule_preset_runs_every_mask_without_a_producer_warp(mask):
    assert any(spec.mask == mask and not spec.warp_specialized for spec in shipped_specs("schedule"))


def test_the_schedule_preset_has_each_switch_off_alone_under_a_causal_mask_and_all_off_at_other_head_dims():
    specs = shipped_specs("schedule")
    causal = make_spec("bf16", 128, "causal", TILES[128, 128]["causal"][-1][1])
    for switch in ("warp_specialized", "pingpong", "overlap"):
        assert replace(causal, **{switch: False}) in specs
    for head_dim in (64, 128, 256):
        serial = [spec for spec in specs if not (spec.warp_specialized or spec.pingpong or spec.overlap)]
        assert any(spec.head_dim == head_dim for spec in serial)


def test_the_schedule_preset_has_a_threshold_of_zero_and_a_single_stage():
    assert {0.0, 8.0} == {spec.rescale_threshold for spec in shipped_specs("schedule")}
    assert 1 in {spec.stages for spec in shipped_specs("schedule")}


def test_the_sweep_preset_is_all_candidates_under_all_masks():
    specs = shipped_specs("sweep")
    assert len(specs) == len(MASKS) * sum(len(choices) for choices in CANDIDATES.values())
    assert {(spec.head_dim, spec.head_dim_v, spec.mask) for spec in specs} == {
        (*kind, mask) for kind in TILE_CLASSES for mask in MASKS
    }


def test_an_unknown_preset_is_refused_with_its_name_and_those_there_are():
    with pytest.raises(ValueError, match=f"preset='everything': allowed are {', '.join(PRESETS)}"):
        shipped_specs("everything")
