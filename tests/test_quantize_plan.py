"""The plan of quantization."""

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


def test_a_thread_block_has_one_head_where_others_load_meanwhile():
    planned = plan_quantize(**CALL)
    assert planned.heads_per_block == 1
    assert not planned.spec.ahead
    assert planned.amax is None


@pytest.mark.parametrize("change", [{"rope": "fp32"}, {"head_dim": 256}])
def test_else_it_has_several_and_every_multiprocessor_enough_blocks(change):
    planned = plan_quantize(**{**CALL, **change})
    assert planned.spec.ahead
    assert planned.heads_per_block > 1
    assert 128 * -(-16 // planned.heads_per_block) >= 4 * H200.sm_count
    short = plan_quantize(**{**CALL, **change, "seqlen": 128, "batch": 1})
    assert short.heads_per_block == 1


def test_a_scale_of_a_whole_head_takes_two_passes():
    planned = plan_quantize(**{**CALL, "rows": "head", "transpose": True, "rotate": False, "head_dim": 256})
    assert (planned.amax.scales, planned.spec.scales) == ("amax", "given")
    assert (planned.amax.transpose, planned.spec.transpose) == (False, True)


def test_of_two_passes_the_one_that_makes_scales_rounds_them_up():
    planned = plan_quantize(**{**CALL, "rows": "head", "rotate": False}, power_of_two=True)
    assert (planned.amax.power_of_two, planned.spec.power_of_two) == (False, True)


def test_more_rows_or_sequences_than_a_grid_has_are_refused_by_name():
    plan_quantize(**{**CALL, "seqlen": 128 * MAX_ROW_BLOCKS, "batch": MAX_BATCH})
    with pytest.raises(ValueError, match="seqlen=8388481: at most 8388480"):
        plan_quantize(**{**CALL, "seqlen": 128 * MAX_ROW_BLOCKS + 1})
    with pytest.raises(ValueError, match="batch=65536: at most 65535"):
        plan_quantize(**{**CALL, "batch": MAX_BATCH + 1})


def test_few_kernels_ship_and_a_plan_finds_them():
    specs = list(quantize_specs())
    assert len(specs) == len(set(specs)) <= 48
    for spec in specs:
        spec.validate()
    for head_dim in (64, 96, 128, 192, 256):
        of_q, of_k = default_block(head_dim)
        # Scales of blocks of V are powers of two.
        of_v: dict[str, Any] = {"power_of_two": True}
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
        for change in ({}, {"rotate": False}, {"rotate": False, "transpose": True}):
            planned = plan_quantize(**{**CALL, "head_dim": head_dim, "rows": "head", **change})
            assert {planned.spec, planned.amax} <= set(specs)
