"""The plan of quantization."""

import itertools
from typing import Any

import pytest

from fa3.plan import H200
from fa3.quantization import default_block
from fa3.quantize_plan import MAX_BATCH, MAX_ROW_BLOCKS, plan_quantize, quantize_specs

CALL: dict[str, Any] = dict(  # noqa: C408 - as a call is written
    dtype="bf16",
    batch=2,
    seqlen=8192,
    heads=16,
    head_dim=128,
    rows=128,
    rotate=True,
    rope="",
    interleaved=False,
    transpose=False,
    facts=H200,
)


@pytest.mark.parametrize("change", [{}, {"head_dim": 256}, {"transpose": True, "rotate": False}])
def test_a_thread_block_has_one_head_without_a_rotary_embedding(change):
    planned = plan_quantize(**{**CALL, **change})
    assert planned.heads_per_block == 1
    assert planned.amax is None


@pytest.mark.parametrize(
    ("batch", "seqlen", "heads", "expected"),
    [
        (4, 8192, 16, 16),
        # 17 heads take 2 thread blocks, of 9 and 8 rather than 16 and 1.
        (4, 8192, 17, 9),
        (8, 8192, 2, 2),
        # 264 thread blocks are two for each of 132 multiprocessors: two for each of 66 blocks of rows, with 2 groups of
        # heads.
        (1, 128 * 66, 16, 8),
        # Nine tenths of them will do.
        (1, 128 * 60, 16, 8),
        (1, 128 * 59, 16, 6),
        (1, 128 * 33, 16, 4),
        (1, 128 * 8, 16, 1),
        (1, 128, 16, 1),
    ],
)
def test_a_rotary_embedding_serves_16_heads_or_fewer_so_that_no_multiprocessor_idles(batch, seqlen, heads, expected):
    planned = plan_quantize(**{**CALL, "rope": "fp32", "batch": batch, "seqlen": seqlen, "heads": heads})
    assert H200.sm_count == 132
    assert planned.heads_per_block == expected


def test_small_thread_blocks_have_fewer_heads():
    planned = plan_quantize(**{**CALL, "rope": "fp32", "batch": 4, "seqlen": 8192, "heads": 16, "rows": 96})
    assert planned.heads_per_block == 4


def test_a_scale_of_a_whole_head_takes_two_passes():
    planned = plan_quantize(**{**CALL, "rows": "head", "transpose": True, "rotate": False, "head_dim": 256})
    assert (planned.amax.scales, planned.spec.scales) == ("amax", "given")
    assert (planned.amax.transpose, planned.spec.transpose) == (False, True)


def test_of_two_passes_the_one_that_makes_scales_rounds_them_up():
    planned = plan_quantize(**{**CALL, "rows": "head", "rotate": False}, power_of_two=True)
    assert (planned.amax.power_of_two, planned.spec.power_of_two) == (False, True)


def test_more_rows_or_sequences_than_a_grid_has_are_refused_by_name():
    call = {**CALL, "head_dim": 64}
    plan_quantize(**{**call, "seqlen": 128 * MAX_ROW_BLOCKS, "batch": MAX_BATCH})
    with pytest.raises(ValueError, match="seqlen=8388481: at most 8388480"):
        plan_quantize(**{**call, "seqlen": 128 * MAX_ROW_BLOCKS + 1})
    # Of more columns two thread blocks share 128 rows, where an amax is found too.
    for change in ({}, {"rows": "head", "rotate": False, "transpose": True}):
        plan_quantize(**{**CALL, **change, "seqlen": 128 * (MAX_ROW_BLOCKS // 2)})
        with pytest.raises(ValueError, match="seqlen=4194177: at most 4194176"):
            plan_quantize(**{**CALL, **change, "seqlen": 128 * (MAX_ROW_BLOCKS // 2) + 1})
    with pytest.raises(ValueError, match="batch=65536: at most 65535"):
        plan_quantize(**{**CALL, "batch": MAX_BATCH + 1})


def test_few_kernels_ship_and_a_plan_finds_them():
    specs = list(quantize_specs())
    assert len(specs) == len(set(specs)) <= 80
    for spec in specs:
        spec.validate()
    for head_dim in (64, 96, 128, 192, 256):
        of_q, of_k = default_block(head_dim)
        of_v: dict[str, Any] = {"rows": "head"}
        for rows, change in (
            *(
                (rows, change)
                for rows in (of_q, of_k)
                for change in ({"rotate": True}, {"rotate": True, "rope": "fp32"})
            ),
            *((of_k, change) for change in (of_v, of_v | {"transpose": True})),
        ):
            call = {**CALL, "rotate": False, "head_dim": head_dim, "rows": rows, **change}
            assert plan_quantize(**call).spec in specs
    for head_dim in (64, 128, 256):
        for rows, rope in itertools.product(default_block(head_dim), ("", "fp32")):
            call = {**CALL, "head_dim": head_dim, "rows": rows, "rotate": True, "rope": rope}
            assert plan_quantize(**call, out="int8").spec in specs
        for change in ({}, {"rotate": False}, {"rotate": False, "transpose": True}):
            planned = plan_quantize(**{**CALL, "head_dim": head_dim, "rows": "head", **change})
            assert {planned.spec, planned.amax} <= set(specs)
