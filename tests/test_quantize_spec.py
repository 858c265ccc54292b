"""The spec of the quantize kernel."""

import dataclasses
import itertools
import json
from dataclasses import replace

import pytest

from fa3.kernel_spec import spec_from_dict
from fa3.spec import SHARED_MEMORY_PER_BLOCK, QuantizeSpec

SPEC = QuantizeSpec("bf16", 128)


def test_it_survives_the_way_through_json():
    spec = replace(SPEC, rotate=True, rope="fp32", interleaved=True)
    assert spec_from_dict(json.loads(json.dumps(spec.as_dict()))) == spec


def test_its_name_tells_it_apart_by_every_field():
    others = {
        "dtype": "fp16",
        "head_dim": 64,
        "rows": 64,
        "rotate": True,
        "rope": "same",
        "interleaved": True,
        "transpose": True,
        "scales": "given",
        "power_of_two": True,
        "out": "int8",
    }
    assert set(others) == {field.name for field in dataclasses.fields(QuantizeSpec)}
    names = {SPEC.name, *(replace(SPEC, **{field: value}).name for field, value in others.items())}
    assert len(names) == 1 + len(others)
    assert replace(SPEC, rotate=True, rope="fp32").name == "quantize_bf16_d128_128_block_rotate_ropefp32"


@pytest.mark.parametrize("rope", ["", "fp32"], ids=["plain", "rope"])
def test_whole_warps_share_a_block_and_no_more_than_a_block_can_have(rope):
    for head_dim, rows, transpose in itertools.product(range(16, 257, 16), (64, 96, 128), (False, True)):
        if transpose and rope:
            continue
        spec = QuantizeSpec("bf16", head_dim, rows, rope=rope, transpose=transpose)
        spec.validate()
        assert spec.threads % 32 == 0
        assert 32 <= spec.threads <= 1024
        assert spec.split * spec.working_threads * spec.units * spec.held == rows * head_dim
        assert 0 <= spec.threads - spec.working_threads < 32
        if not transpose:
            # Threads that exchange values are in one warp, and their numbers differ in a bit.
            assert 32 % spec.exchanging == spec.across % spec.exchanging == 0
        assert spec.shared_bytes <= SHARED_MEMORY_PER_BLOCK


def test_thread_blocks_that_share_rows_are_no_more_than_any_gpu_has_in_a_cluster():
    for head_dim, rows, rope in itertools.product(range(16, 257, 16), (64, 96, 128), ("", "fp32")):
        spec = QuantizeSpec("bf16", head_dim, rows, rope=rope)
        assert spec.threads <= spec.most_threads
        assert spec.cluster == spec.split <= 8
        assert rows % (spec.split * spec.units) == 0
        # A word for each warp of the cluster, of this head and of the next.
        assert spec.cluster * spec.threads // 32 <= spec.warp_values
        assert 8 * spec.warp_values <= spec.shared_bytes
        # Where an amax comes from a pass of its own, thread blocks tell each other nothing.
        assert replace(spec, scales="given").cluster == replace(spec, scales="amax").cluster == 1
    assert QuantizeSpec("bf16", 256, rope="fp32").cluster == QuantizeSpec("bf16", 256, 64).cluster == 2
    assert QuantizeSpec("bf16", 128, 96, rope="fp32").cluster == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "fp32"}, "dtype='fp32': allowed are 'fp16', 'bf16'"),
        ({"head_dim": 72}, "head_dim=72: must be a multiple of 16 from 16 to 256"),
        ({"head_dim": 272}, "head_dim=272"),
        ({"rows": 32}, "rows=32: allowed are 64, 96, 128"),
        ({"rope": "bf16"}, "rope='bf16': allowed are '', 'fp32', 'same'"),
        ({"scales": "head"}, "scales='head': allowed are 'block', 'amax', 'given'"),
        ({"interleaved": True}, "interleaved=True: .* but rope=''"),
        ({"transpose": True, "rotate": True}, "transpose=True: V is neither rotated"),
        ({"transpose": True, "rope": "same"}, "transpose=True: V is neither rotated"),
        ({"transpose": True, "scales": "amax"}, "transpose=True with scales='amax'"),
        ({"out": "bf16"}, "out='bf16': allowed are 'e4m3', 'int8'"),
        ({"out": "int8", "transpose": True}, "out='int8', transpose=True, .* of v, which becomes 'e4m3'"),
        ({"out": "int8", "power_of_two": True}, "out='int8', .*power_of_two=True: .* of v, which becomes 'e4m3'"),
        ({"power_of_two": True, "scales": "amax"}, "power_of_two=True with scales='amax'"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **change).validate()
