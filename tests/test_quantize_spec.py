"""The spec of the quantize kernel."""

import dataclasses
import itertools
import json
from dataclasses import replace

import pytest

from fa3.kernel_spec import spec_from_dict
from fa3.spec import QuantizeSpec

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


@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "transposed"])
def test_whole_warps_share_a_block_and_no_more_than_a_block_can_have(transpose):
    for head_dim, rows in itertools.product(range(16, 257, 16), (64, 96, 128)):
        spec = QuantizeSpec("bf16", head_dim, rows, transpose=transpose)
        spec.validate()
        assert spec.threads % 32 == 0
        assert 32 <= spec.threads <= 1024
        assert spec.working_threads * spec.units * spec.held == rows * head_dim
        assert spec.threads - spec.working_threads == (16 if spec.working_threads % 32 else 0)
        if not transpose:
            # Threads that exchange values are in one warp, and their numbers differ in a bit.
            assert 32 % spec.exchanging == spec.across % spec.exchanging == 0


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
