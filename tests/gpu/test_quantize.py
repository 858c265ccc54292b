"""The quantize kernel on a GPU against its definition in PyTorch."""

import itertools
import math

import pytest
import torch

from fa3 import quantization
from fa3.backends import hopper, hopper_quantize
from fa3.compiler.store import default_store
from fa3.errors import FA3Error
from fa3.spec import TransposeSpec

HEAD_DIMS = tuple(range(16, 257, 16))
DTYPES = (torch.bfloat16, torch.float16)


def quantize(x, **options):
    """The kernel's answer, or a skip where it is neither in the store nor can be compiled: few of these ship."""
    from fa3.compiler.target import dsl_installed

    try:
        return hopper_quantize.quantize_tensor(x, **options)
    except FA3Error:
        if dsl_installed():
            raise
        pytest.skip("a kernel is not in the store, and no compiler here")


def random(batch, seqlen, heads, head_dim, dtype=torch.bfloat16, gaps=0):
    """Rows with outliers in some columns; with ``gaps`` NaN between the heads, which nobody may read."""
    whole = torch.full((batch, seqlen, heads + gaps, head_dim), math.nan, device="cuda", dtype=dtype)
    x = whole[:, :, :heads]
    x.copy_(torch.randn(x.shape, device="cuda") * torch.logspace(-2, 2, head_dim, device="cuda"))
    return x


def angles(positions, head_dim, dtype):
    """cos and sin of many rotations."""
    angle = torch.rand(positions, head_dim // 2, device="cuda") * 7
    return angle.cos().to(dtype), angle.sin().to(dtype)


def both(x, **options):
    """The kernel's e4m3 and scales, in memory that held NaN, and the definition's."""
    expected = quantization.quantize_tensor(x, **options)
    poison = [torch.full(t.shape, 0x7F, dtype=torch.uint8, device="cuda") for t in expected[:1] * 3]
    poison += [torch.full(expected[1].shape, math.nan, device="cuda") for _ in range(3)]
    del poison
    return (*quantize(x, **options), *expected)


def assert_same(values, scale, expected, expected_scale):
    """Bit for bit, but for zeros of either sign and NaN."""
    assert values.dtype == expected.dtype
    assert values.shape == expected.shape
    assert scale.shape == expected_scale.shape
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def assert_close(values, scale, expected, expected_scale):
    """Within two units of the last place of a scale, and one of e4m3 or int8: products and sums may be fused."""
    assert values.shape == expected.shape
    torch.testing.assert_close(scale, expected_scale, rtol=2 * torch.finfo(torch.float32).eps, atol=0)
    difference = (values.float() - expected.float()).abs()
    allowed = 1.0 if values.dtype is torch.int8 else expected.float().abs() / 8 + 2.0**-9
    assert (difference <= allowed).all()
    assert (difference > 0).float().mean() < 1e-3


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("rows", [64, 96, 128, "head", "tensor"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_and_kind_of_scale(head_dim, rows, rotate):
    for dtype in DTYPES if head_dim in (48, 64, 128, 256) else DTYPES[:1]:
        x = random(2, 333, 3, head_dim, dtype, gaps=1)
        assert_same(*both(x, rows=rows, rotate=rotate, seed=7))


@pytest.mark.parametrize("rows", [64, 96, 128, "head", "tensor"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_v_transposed(head_dim, rows):
    for dtype, seqlen in itertools.product(DTYPES if head_dim in (64, 128) else DTYPES[:1], (1, 16, 127, 400)):
        assert_same(*both(random(2, seqlen, 2, head_dim, dtype, gaps=1), rows=rows, transpose=True))


@pytest.mark.parametrize("seqlen", [1, 2, 63, 64, 65, 127, 128, 129, 1000])
def test_odd_lengths(seqlen):
    for head_dim in (64, 96, 128, 256):
        assert_same(*both(random(3, seqlen, 5, head_dim), rows=128, rotate=True))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("same", [False, True], ids=["fp32", "same"])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 96, 128, 192, 256])
def test_rotary_embedding(head_dim, same, interleaved):
    for dtype, rows in itertools.product(DTYPES, (64, 96, 128, "head")):
        x = random(2, 300, 5, head_dim, dtype, gaps=2)
        rope = angles(411, head_dim, dtype if same else torch.float32)
        options = {"rows": rows, "rope": rope, "interleaved": interleaved, "first_position": 111}
        assert_close(*both(x, rotate=True, seed=1, **options))
        if rows == 128:
            assert_close(*both(x, **options))


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("rows", [64, 96, 128, "head", "tensor"])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 192, 208, 256])
def test_int8_of_every_way_to_cut_a_row_and_kind_of_scale(head_dim, rows, rotate):
    for dtype in DTYPES if head_dim == 128 else DTYPES[:1]:
        x = random(2, 333, 3, head_dim, dtype, gaps=1)
        assert_same(*both(x, rows=rows, rotate=rotate, seed=7, out="int8"))


def test_halves_of_a_step_of_int8_go_to_the_even_neighbour():
    x = (torch.randint(-254, 255, (2, 128, 3, 64), device="cuda") / 2).bfloat16()
    x[:, ::64, :, 0] = 127.0
    values, _, expected, _ = both(x, rows=64, out="int8")
    assert torch.equal(values, expected)
    assert torch.equal(values, x.float().round().to(torch.int8))


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e30, 1e37])
def test_tiny_and_huge_values_in_int8(size):
    x = (torch.randn(1, 200, 2, 128, device="cuda") * size).bfloat16()
    assert_same(*both(x, rows=64, rotate=size < 1e37, out="int8"))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_rotary_embedding_in_int8(head_dim, interleaved):
    x, rope = random(2, 300, 5, head_dim, gaps=2), angles(411, head_dim, torch.float32)
    options = {"rope": rope, "interleaved": interleaved, "first_position": 111, "out": "int8"}
    for rows in (96, "head"):
        assert_close(*both(x, rows=rows, rotate=True, seed=1, **options))


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_the_scale_of_its_block_of_int8_nan_and_no_other(what, rotate):
    x = random(2, 333, 3, 128)
    x[1, 100, 2, 77] = what
    for rows, lost in ((64, 1), (96, 1), (128, 1), ("head", 1), ("tensor", 6)):
        values, scale, expected, expected_scale = both(x, rows=rows, rotate=rotate, out="int8")
        assert scale.isnan().sum() == lost
        # Integers without a scale mean nothing.
        of_rows = rows if isinstance(rows, int) else 0
        nothing = quantization.dequantize(torch.zeros_like(expected), expected_scale, of_rows).isnan()
        assert_same(values.masked_fill(nothing, 0), scale, expected.masked_fill(nothing, 0), expected_scale)


def test_many_heads_to_a_thread_block_agree_with_one():
    x = random(4, 2048, 47, 128)
    rope = angles(2048, 128, torch.float32)
    assert_close(*both(x, rows=128, rotate=True, rope=rope))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_what_is_not_finite_and_zeros(head_dim, rotate):
    x = random(1, 512, 2, head_dim)
    x[0, 3, 0, 5], x[0, 4, 1, 1], x[0, 200, 0, 9], x[0, 201, 0, 0] = math.inf, math.nan, -math.inf, math.nan
    x[0, 256:384] = 0.0
    x[0, 384:, 0] = math.inf
    for rows in (64, 96, 128, "head", "tensor"):
        assert_same(*both(x, rows=rows, rotate=rotate))
        if not rotate:
            assert_same(*both(x, rows=rows, transpose=True))


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-10, 1e30, 1e37])
def test_tiny_and_huge_values(size):
    x = (torch.randn(1, 200, 2, 128, device="cuda") * size).bfloat16()
    assert_same(*both(x, rows=64, rotate=True))


def test_inputs_that_cannot_be_read_16_bytes_at_a_time_are_copied():
    flat = torch.randn(2 * 100 * 3 * 64 + 1, device="cuda").bfloat16()
    assert_same(*both(flat[1:].view(2, 100, 3, 64), rows=64, rotate=True))
    wide = torch.randn(2, 100, 3, 66, device="cuda").bfloat16()
    assert_same(*both(wide[..., :64], rows=64, rotate=True))
    assert_same(*both(torch.randn(2, 3, 64, 100, device="cuda").bfloat16().permute(0, 3, 1, 2), rows=128))


@pytest.mark.parametrize("rows", [128, "head", "tensor"])
def test_nothing_gives_nothing(rows):
    for shape in ((2, 0, 3, 64), (0, 10, 3, 64), (2, 10, 0, 64)):
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        assert_same(*both(x, rows=rows, rotate=True))
        assert_same(*both(x, rows=rows, transpose=True))


@pytest.mark.parametrize(
    ("seqlen", "head_dim"), [(1, 256), (17, 16), (127, 208), (129, 64), (1000, 256), (2048, 144)], ids=str
)
def test_v_in_rows_is_transposed_byte_by_byte(seqlen, head_dim):
    function = default_store().load(TransposeSpec())
    bits = torch.randint(0, 256, (2, seqlen, 3, head_dim + 16), device="cuda", dtype=torch.uint8)
    values = bits.view(quantization.E4M3)
    # Contiguous, with gaps between the heads, and at an address that must be copied.
    for v in (values[..., :head_dim].contiguous(), values[..., :head_dim], values[..., 1 : head_dim + 1]):
        assert torch.equal(
            hopper._transposed(function, v).view(torch.uint8), quantization.transposed(v).view(torch.uint8)
        )


def test_a_hundred_repeats_agree_bitwise():
    x = random(2, 1000, 8, 256)
    first, first_scale = quantize(x, rows=128, rotate=True)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        values, scale = quantize(x, rows=128, rotate=True)
        different += (values.view(torch.uint8) != first.view(torch.uint8)).sum() + (scale != first_scale).sum()
    assert different.item() == 0
