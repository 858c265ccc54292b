"""Specs: what is refused and how, names, the way through JSON, and the count of shared memory."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace

import pytest

from fa3.backward_spec import BACKWARD_CLASSES, BackwardSpec, FinishSpec, PrepareSpec
from fa3.kernel_spec import spec_from_dict
from fa3.presets import PRESETS, shipped_specs
from fa3.spec import MASKS, SHARED_MEMORY_PER_BLOCK, TILE_CLASSES, ForwardSpec, TransposeSpec

SPEC = ForwardSpec(
    dtype="bf16",
    head_dim=128,
    head_dim_v=128,
    mask="causal",
    tile_m=128,
    tile_n=128,
    stages=2,
    warp_specialized=True,
    pingpong=True,
    overlap=True,
    rescale_threshold=8.0,
)


FP8_SPEC = replace(SPEC, dtype="e4m3", out_dtype="bf16", rescale_threshold=0.8)


def spec_of_tiles(head_dim: int, tile_m: int, tile_n: int, stages: int) -> ForwardSpec:
    return replace(SPEC, head_dim=head_dim, head_dim_v=head_dim, tile_m=tile_m, tile_n=tile_n, stages=stages)


# validate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("dtype", ["fp32", "fp64", "bfloat16", ""]),
        ("head_dim", [0, 32, 96, 160, 512]),
        ("mask", ["", "none", "Causal", True]),
        ("tile_m", [0, 32, 96, 320, -64]),
        ("tile_n", [0, 8, 24, 129, 272, -16]),
        ("stages", [0, -1, 9]),
        ("rescale_threshold", [-0.5, 8.5]),
    ],
)
def test_a_field_out_of_range_is_refused_with_its_name_and_value(field, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{field}={re.escape(repr(value))}[:,] "):
            replace(SPEC, **{field: value}).validate()


@pytest.mark.parametrize("head_dim_v", [0, 32, 96, 256, 512])
def test_head_dims_of_no_tile_class_are_refused_with_those_there_are(head_dim_v):
    with pytest.raises(ValueError, match=re.escape(f"head_dim=128, head_dim_v={head_dim_v}: the tile classes are ")):
        replace(SPEC, head_dim_v=head_dim_v).validate()


BLOCKS = {"mask": "blocks", "mask_mod": "m:f"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 1, "warp_specialized": False}, "stages=1: without a producer warp at least 2"),
        ({"stages": 1, "qv": True, "tile_n": 64}, "stages=1: qv needs V of this step and of the one before"),
        ({"tile_m": 64}, "pingpong=True needs at least two consumer warpgroups: tile_m=64"),
        ({"mask": "blocks"}, "mask='blocks': blocks that are cut need a mask_mod"),
        ({**BLOCKS, "tile_m": 64, "pingpong": False}, "tile_m=64, tile_n=128: with block masks tiles are 128 queries"),
        ({**BLOCKS, "tile_m": 192, "tile_n": 64}, "tile_m=192, tile_n=64: with block masks tiles are 128 queries"),
        (
            {**BLOCKS, "tile_n": 48},
            "tile_m=128, tile_n=48: with block masks tiles are 128 queries and a divisor of 128",
        ),
        ({"pack_gqa": True, **BLOCKS}, "pack_gqa=True: goes with no block mask, modification or qv"),
        ({"pack_gqa": True, "score_mod": "m:f"}, "pack_gqa=True: goes with no block mask, modification or qv"),
        ({"pack_gqa": True, "mask_mod": "m:f"}, "pack_gqa=True: goes with no block mask, modification or qv"),
        ({"pack_gqa": True, "qv": True}, "pack_gqa=True: goes with no block mask, modification or qv"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_with_their_names_and_values(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(SPEC, **changes).validate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_dtype": ""}, "out_dtype='': allowed beside e4m3 are fp16, bf16"),
        ({"tile_n": 80}, "tile_n=80: beside e4m3 must be a multiple of 32"),
        ({"pack_gqa": True}, "pack_gqa=True, qv=False: go with no e4m3"),
        ({"qv": True}, "pack_gqa=False, qv=True: go with no e4m3"),
        ({"transpose_stages": 9}, "transpose_stages=9: allowed are 0 to 8"),
        ({"transpose_stages": 2, "warp_specialized": False}, "the producer's warps transpose"),
        ({"key_block": 64}, "key_block=64: must be a multiple of tile_n=128, or 0"),
        ({"promote": -1}, "promote=-1: allowed beside head_dim_v=128 are 0 and up"),
        ({"head_dim": 64, "head_dim_v": 256}, "head_dim=64, head_dim_v=256: the tile classes are"),
    ],
)
def test_fields_of_e4m3_that_no_kernel_has_are_refused_with_their_names_and_values(changes, message):
    FP8_SPEC.validate()
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(FP8_SPEC, **changes).validate()


@pytest.mark.parametrize("change", [{"key_block": 128}, {"transpose_stages": 2}, {"promote": 4}, {"out_dtype": "bf16"}])
def test_16_bit_kernels_have_no_fields_of_e4m3(change):
    (field,) = change
    with pytest.raises(ValueError, match=f"{field}=.*: goes with dtype 'e4m3' alone"):
        replace(SPEC, **change).validate()


def test_tiles_too_large_for_shared_memory_are_refused_with_the_bytes_needed_and_allowed():
    spec = replace(SPEC, stages=4)
    # K and V in four stages, and the one tile that q and out share.
    needed = 2 * (4 * 128 * (128 + 128) + 128 * 128) + 1024
    with pytest.raises(ValueError, match=f"{re.escape(spec.name)} needs {needed} bytes .* at most 232448"):
        spec.validate()


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "fp16"},
        {"tile_n": 16},
        {"tile_n": 256, "stages": 1},
        {"tile_n": 16, "stages": 8},
        {"stages": 1},
        {"warp_specialized": False},
        {"tile_m": 64, "pingpong": False},
        {"tile_m": 256, "tile_n": 16},
        *({"mask": mask} for mask in MASKS if mask != "blocks"),
        *({**BLOCKS, "tile_n": tile_n} for tile_n in (16, 32, 64, 128)),
        *({"head_dim": d, "head_dim_v": dv, "tile_n": 16} for d, dv in TILE_CLASSES),
        {"softcap": True, "score_mod": "m:f", "mask_mod": "m:f", "score_aux": "f1,i3", "mask_aux": "i2"},
        {"qv": True, "tile_n": 64},
        {"qv": True, "tile_n": 64, "score_mod": "m:f", **BLOCKS},
        {"pack_gqa": True, "softcap": True},
        {"rescale_threshold": 0.0},
        {"rescale_threshold": 8.0},
    ],
)
def test_the_ends_of_each_range_and_what_goes_together_are_allowed(changes):
    replace(SPEC, **changes).validate()


# names and dicts ----------------------------------------------------------------------------------


def test_the_name_tells_specs_apart_by_every_field():
    modified = replace(SPEC, score_mod="one:score", mask_mod="one:mask")
    others = {
        "dtype": "fp16",
        "head_dim": 64,
        "head_dim_v": 64,
        "mask": "window",
        "tile_m": 192,
        "tile_n": 64,
        "stages": 3,
        "warp_specialized": False,
        "pingpong": False,
        "overlap": False,
        "rescale_threshold": 0.0,
        "softcap": True,
        "pack_gqa": True,
        "qv": True,
        "score_mod": "other:score",
        "mask_mod": "other:mask",
        "score_aux": "f1",
        "mask_aux": "f1",
    }
    of_e4m3 = {
        "out_dtype": "fp16",
        "key_block": 128,
        "transpose_stages": 2,
        "promote": 4,
        "qk_dtype": "int8",
        "value_blocks": True,
    }
    assert {*others, *of_e4m3} == {field.name for field in dataclasses.fields(ForwardSpec)}
    names = {modified.name, SPEC.name, *(replace(modified, **{field: value}).name for field, value in others.items())}
    assert len(names) == 2 + len(others)
    names = {FP8_SPEC.name, *(replace(FP8_SPEC, **{field: value}).name for field, value in of_e4m3.items())}
    assert len(names) == 1 + len(of_e4m3)


def test_the_name_of_a_plain_spec_says_its_dims_mask_tiles_and_switches():
    assert SPEC.name == "forward_bf16_d128_causal_128x128x2_wpot8"
    serial = replace(SPEC, mask="full", head_dim=192, warp_specialized=False, pingpong=False, overlap=False)
    assert serial.name == "forward_bf16_d192v128_full_128x128x2_serialt8"
    modified = replace(SPEC, softcap=True, qv=True, score_mod="m:f", score_aux="f1,i2", mask_mod="a.b:g")
    assert modified.name == SPEC.name + "_softcap_qv_m:f(f1,i2)_a.b:g"


def test_the_causal_mask_is_one_of_the_masks():
    assert [replace(SPEC, mask=mask).causal for mask in MASKS] == [mask == "causal" for mask in MASKS]


def test_a_spec_comes_back_from_its_dict_through_json():
    for spec in {spec for preset in PRESETS for spec in shipped_specs(preset)}:
        back = spec_from_dict(json.loads(json.dumps(spec.as_dict())))
        assert back == spec
        assert back.as_dict() == spec.as_dict()


def test_reading_a_dict_leaves_it_as_it_was():
    fields = SPEC.as_dict()
    spec_from_dict(fields)
    assert fields == SPEC.as_dict()


def test_the_dict_of_another_kernel_is_refused_by_name():
    with pytest.raises(
        ValueError, match="kernel='sideways': known kernels are 'forward', 'backward', 'prepare', 'finish'"
    ):
        spec_from_dict({**SPEC.as_dict(), "kernel": "sideways"})
    with pytest.raises(ValueError, match=r"not the fields of a BackwardSpec: .*'pingpong'"):
        spec_from_dict({**SPEC.as_dict(), "kernel": "backward"})
    with pytest.raises(ValueError, match="kernel=None"):
        spec_from_dict(dataclasses.asdict(SPEC))


def test_unknown_and_missing_fields_are_refused():
    with pytest.raises(ValueError, match=r"not the fields of a ForwardSpec: .*'swizzle'"):
        spec_from_dict({**SPEC.as_dict(), "swizzle": 3})
    fields = SPEC.as_dict()
    del fields["stages"]
    with pytest.raises(ValueError, match="not the fields of a ForwardSpec"):
        spec_from_dict(fields)


def test_a_spec_of_before_the_options_has_none_of_them():
    fields = SPEC.as_dict()
    for name in ("softcap", "pack_gqa", "qv", "score_mod", "mask_mod", "score_aux", "mask_aux"):
        del fields[name]
    assert spec_from_dict(fields) == SPEC


# threads and shared memory ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile_m", "specialized", "warpgroups", "threads"),
    [(64, False, 1, 128), (64, True, 1, 256), (128, True, 2, 384), (192, False, 3, 384), (192, True, 3, 512)],
)
def test_a_block_has_a_warpgroup_for_64_rows_and_one_more_to_load(tile_m, specialized, warpgroups, threads):
    spec = replace(SPEC, tile_m=tile_m, warp_specialized=specialized)
    assert (spec.consumer_warpgroups, spec.threads) == (warpgroups, threads)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_shipped_spec_fits_in_the_shared_memory_of_a_block(preset):
    for spec in shipped_specs(preset):
        assert 0 <= spec.shared_bytes <= SHARED_MEMORY_PER_BLOCK, spec.name
        # Only the passes before the main ones have no tile.
        assert (spec.shared_bytes == 0) == isinstance(spec, PrepareSpec | TransposeSpec)


@pytest.mark.parametrize(
    ("spec", "out_columns"),
    [
        (spec_of_tiles(128, 192, 80, 3), 128),
        # Half of out has room beside q, and is sent in two parts.
        (spec_of_tiles(256, 128, 64, 2), 128),
        # The largest tiles of head dim 64 that leave room for all, and the next larger ones.
        (spec_of_tiles(64, 192, 176, 4), 64),
        (spec_of_tiles(64, 192, 144, 5), 32),
    ],
)
def test_out_has_a_place_of_its_own_for_as_many_columns_as_there_is_room_for(spec, out_columns):
    spec.validate()
    assert spec.out_has_own_tile
    assert spec.out_columns == out_columns
    tiles = spec.stages * spec.tile_n * (spec.head_dim + spec.head_dim_v) + spec.tile_m * spec.head_dim
    assert spec.shared_bytes == 1024 + 2 * (tiles + spec.tile_m * out_columns)
    more = 1024 + 2 * (tiles + spec.tile_m * 2 * out_columns)
    assert out_columns == spec.head_dim_v or more > SHARED_MEMORY_PER_BLOCK


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(128, 128), (192, 128), (64, 256)])
def test_where_there_is_no_room_out_takes_the_place_of_q_and_the_wider_of_both_counts(head_dim, head_dim_v):
    spec = replace(SPEC, head_dim=head_dim, head_dim_v=head_dim_v, tile_n=16, stages=1)
    while spec.out_has_own_tile:
        spec = replace(spec, tile_n=spec.tile_n + 16)
    assert spec.out_columns == head_dim_v
    tiles = spec.tile_n * (head_dim + head_dim_v) + spec.tile_m * max(head_dim, head_dim_v)
    assert spec.shared_bytes == 1024 + 2 * tiles


def test_packed_rows_of_out_are_never_sent_in_parts():
    seen = set()
    for head_dim, head_dim_v in TILE_CLASSES:
        for tile_n in range(16, 257, 16):
            spec = replace(SPEC, head_dim=head_dim, head_dim_v=head_dim_v, tile_n=tile_n)
            packed = replace(spec, pack_gqa=True)
            if packed.shared_bytes <= SHARED_MEMORY_PER_BLOCK:
                assert packed.out_columns == head_dim_v
                seen.add((packed.out_has_own_tile, spec.out_columns == head_dim_v))
    assert (False, False) in seen, "where another is sent in parts, too"


@pytest.mark.parametrize("kind", TILE_CLASSES, ids=str)
def test_qv_takes_a_tile_as_large_as_that_of_out(kind):
    without = replace(SPEC, head_dim=kind[0], head_dim_v=kind[1], tile_m=64, tile_n=16, stages=2, pingpong=False)
    assert without.out_has_own_tile
    with_qv = replace(without, qv=True)
    assert with_qv.out_has_own_tile
    assert with_qv.shared_bytes - without.shared_bytes == 2 * 64 * kind[1]


# gradients ----------------------------------------------------------------------------------------

BACKWARD = BackwardSpec("bf16", 128, 128, "causal", tile_m=64, tile_n=128, stages=2, stages_dout=2)
PREPARE = PrepareSpec("bf16", 128, tile_m=64)
FINISH = FinishSpec("bf16", 128, tile_m=64)
AROUND = (PREPARE, FINISH)


@pytest.mark.parametrize(
    ("spec", "field", "values"),
    [
        *((spec, "dtype", ["fp32", "bfloat16", ""]) for spec in (BACKWARD, *AROUND)),
        *((spec, "head_dim", [0, 32, 96, 512]) for spec in (BACKWARD, FINISH)),
        (PREPARE, "head_dim_v", [0, 32, 96, 512]),
        (BACKWARD, "mask", ["", "none", "Causal"]),
        (BACKWARD, "tile_m", [0, 32, 96, 192]),
        (BACKWARD, "tile_n", [0, 32, 96, 256]),
        (BACKWARD, "stages", [0, -1, 5]),
        (BACKWARD, "stages_dout", [0, -1, 5]),
        (BACKWARD, "dq_stages", [-1, 3]),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "as_dict") else None,
)
def test_a_field_of_a_gradients_spec_out_of_range_is_refused_with_its_name_and_value(spec, field, values):
    spec.validate()
    for value in values:
        with pytest.raises(ValueError, match=rf"^{field}={re.escape(repr(value))}[:,] "):
            replace(spec, **{field: value}).validate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim_v": 64}, f"head_dim=128, head_dim_v=64: the tile classes are {BACKWARD_CLASSES}"),
        ({"mask": "blocks"}, "mask='blocks': blocks that are cut need a mask_mod"),
        ({"score_mod": "m:f"}, "score_mod='m:f', derivative='': both or neither"),
        ({"derivative": "m:g"}, "score_mod='', derivative='m:g': both or neither"),
        ({"dq_stages": 0, "deterministic": True}, "deterministic=True with dq_stages=0"),
        (
            {"head_dim": 192, "stages": 1, "stages_dout": 1},
            "head_dim=192, tile_m=64: dS has room for 128",
        ),
        (
            {"tile_m": 128, "stages": 3, "stages_dout": 2},
            # K and V; q and dout of several steps; dS of two; LSE, delta and dQ in float32.
            f"needs {2 * (128 * 256 + 128 * 5 * 128 + 2 * 128 * 128) + 4 * 128 * (5 + 128) + 1024} bytes of shared "
            "memory: at most 232448",
        ),
    ],
    ids=str,
)
def test_fields_of_a_backward_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(BACKWARD, **changes).validate()


@pytest.mark.parametrize(
    ("spec", "others"),
    [
        (
            replace(BACKWARD, score_mod="one:score", derivative="one:derivative", mask_mod="one:mask"),
            {
                "dtype": "fp16",
                "head_dim": 64,
                "head_dim_v": 64,
                "mask": "window",
                "tile_m": 128,
                "tile_n": 64,
                "stages": 3,
                "stages_dout": 1,
                "dq_stages": 2,
                "deterministic": True,
                "softcap": True,
                "score_mod": "other:score",
                "derivative": "other:derivative",
                "mask_mod": "other:mask",
                "score_aux": "f1",
                "mask_aux": "f1",
            },
        ),
        (PREPARE, {"dtype": "fp16", "head_dim_v": 64, "tile_m": 128}),
        (FINISH, {"dtype": "fp16", "head_dim": 64, "tile_m": 128}),
    ],
    ids=["backward", "prepare", "finish"],
)
def test_the_name_of_a_gradients_spec_tells_it_apart_by_every_field(spec, others):
    assert set(others) == {field.name for field in dataclasses.fields(spec)}
    names = {spec.name, *(replace(spec, **{field: value}).name for field, value in others.items())}
    assert len(names) == 1 + len(others)


def test_the_names_of_plain_gradients_specs_say_their_dims_mask_and_tiles():
    assert BACKWARD.name == "backward_bf16_d128_causal_64x128x2x2_dq1"
    assert replace(BACKWARD, head_dim=192, deterministic=True).name == (
        "backward_bf16_d192v128_causal_64x128x2x2_dq1_deterministic"
    )
    assert PREPARE.name == "prepare_bf16_v128_64"
    assert FINISH.name == "finish_bf16_d128_64"


@pytest.mark.parametrize(
    ("tile_m", "tile_n", "split_keys", "score_rows", "dq_columns"),
    [(64, 128, True, 64, 64), (128, 128, True, 128, 128), (64, 64, False, 32, 64), (128, 64, False, 64, 128)],
)
def test_the_warpgroups_of_a_backward_split_its_products(tile_m, tile_n, split_keys, score_rows, dq_columns):
    spec = replace(BACKWARD, tile_m=tile_m, tile_n=tile_n)
    assert (spec.split_keys, spec.score_rows, spec.dq_columns) == (split_keys, score_rows, dq_columns)
    # Two that multiply and one that loads; the last pass has no loads of its own.
    assert spec.threads == 384
    assert FINISH.threads == 256
    # Together they hold all scores, 64 keys each, and all of dQ, 64 rows each.
    groups = spec.consumer_warpgroups
    assert groups * 64 * spec.score_rows == tile_m * tile_n
    assert groups * 64 * spec.dq_columns == tile_m * spec.head_dim
