"""Quantization to e4m3 in PyTorch: the transform, signs, scales, rounding and the order of V^T."""

import copy
import io
import itertools
import math
import pickle
from dataclasses import replace
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa3
from fa3 import quantization
from fa3.e4m3 import KEY_OF_SLOT, LARGEST_AMAX, SMALLEST_AMAX
from fa3.quantization import (
    QuantizedQKV,
    dequantize,
    hadamard,
    hadamard_block,
    quantize_tensor,
    rope_rows,
    round_up_amax,
    rows_of_transposed,
    sign_words,
    signs,
    to_e4m3,
    transposed,
)

HEAD_DIMS = range(16, 257, 16)
BLOCKS = {
    16: 16,
    32: 32,
    48: 16,
    64: 64,
    80: 16,
    96: 32,
    112: 16,
    128: 128,
    144: 16,
    160: 32,
    192: 64,
    224: 32,
    256: 256,
}
ROWS = [64, 128, "head", "tensor"]


def bits(x):
    return x.view(torch.uint8)


def rows_of_scales(rows):
    return rows if isinstance(rows, int) else 0


# Signs and the transform --------------------------------------------------------------------------------------------


def test_signs_are_what_they_always_were():
    """Kernels get them as words, and tensors quantized by one version meet those of another."""
    assert sign_words(0, 128)[:4] == (1488440128, 134611120, -736605845, -1419875233)
    assert sign_words(0, 128)[4:] == (0, 0, 0, 0)
    assert signs(0, 16).tolist() == [1 - 2 * (1488440128 >> i & 1) for i in range(16)]


@pytest.mark.parametrize("head_dim", [16, 80, 256])
def test_signs_are_the_bits_of_the_words(head_dim):
    words = [word % 2**32 for word in sign_words(2**31 - 1, head_dim)]
    assert signs(2**31 - 1, head_dim).tolist() == [1.0 - 2 * (words[i // 32] >> i % 32 & 1) for i in range(head_dim)]
    assert all(-(2**31) <= word < 2**31 for word in sign_words(2**31 - 1, head_dim))


def test_signs_of_many_seeds_are_balanced_and_uncorrelated():
    drawn = torch.stack([signs(seed, 256) for seed in range(400)])
    assert drawn.mean().abs() < 0.02
    assert (drawn.mean(0).abs() < 0.25).all()
    assert ((drawn @ drawn.T / 256).fill_diagonal_(0).abs() < 0.4).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_transform_is_a_hadamard_matrix_in_blocks(head_dim):
    matrix = hadamard(torch.eye(head_dim))
    block = hadamard_block(head_dim)
    assert block == BLOCKS.get(head_dim, 16)
    assert torch.equal(matrix @ matrix.T, block * torch.eye(head_dim))
    assert ((matrix != 0).sum(0) == block).all()
    assert (matrix.abs() <= 1).all()


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_of_a_power_of_two_it_is_sylvesters_matrix(head_dim):
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    expected = reduce(torch.kron, [two] * int(math.log2(head_dim)))
    assert torch.equal(hadamard(torch.eye(head_dim)), expected)


@pytest.mark.parametrize("head_dim", [48, 64, 96, 192, 256])
def test_butterflies_go_by_stride_within_the_elements_that_a_block_mixes(head_dim):
    """The same sums in the same order, one number at a time."""
    x = torch.randn(head_dim)
    held = 32 if head_dim % 32 == 0 else 16
    threads = head_dim // held
    exchanging = next(w for w in (16, 8, 4, 2, 1) if threads % w == 0)
    groups = threads // exchanging

    def place(c, g, w, b):
        return ((c * groups + g) * exchanging + w) * 8 + b

    expected = x.clone()
    for axis, size in ((3, 8), (2, exchanging), (0, held // 8)):
        stride = 1
        while stride < size:
            before = expected.clone()
            for c in range(held // 8):
                for g in range(groups):
                    for w in range(exchanging):
                        for b in range(8):
                            index = [c, g, w, b]
                            upper = index[axis] & stride
                            index[axis] ^= stride
                            own, other = before[place(c, g, w, b)], before[place(*index)]
                            expected[place(c, g, w, b)] = other - own if upper else own + other
            stride *= 2
    assert torch.equal(hadamard(x), expected)


@given(head_dim=st.sampled_from(list(HEAD_DIMS)), seed=st.integers(0, 2**31 - 1))
@settings(max_examples=30, deadline=None)
def test_scores_do_not_change(head_dim, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 5, head_dim, dtype=torch.float64, generator=generator)
    rotated_q, rotated_k = (hadamard(x * signs(seed, head_dim)) for x in (q, k))
    torch.testing.assert_close(rotated_q @ rotated_k.T / hadamard_block(head_dim), q @ k.T)


# Rotary embedding ---------------------------------------------------------------------------------------------------


def rope_of(positions, head_dim, dtype=torch.float32):
    angles = torch.arange(positions)[:, None] * 100.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_each_pair_by_the_angle_of_its_position(interleaved):
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64)
    cos, sin = rope_of(20, 16, torch.float64)
    rotated = rope_rows(x, (cos, sin), interleaved, first_position=7)
    for pair in range(8):
        one, other = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 8)
        turn = torch.complex(cos, sin)[7:12, pair][None, :, None]
        expected = torch.complex(x[..., one], x[..., other]) * turn
        torch.testing.assert_close(torch.complex(rotated[..., one], rotated[..., other]), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_transposed_rope_is_the_gradient_of_rope(interleaved):
    x = torch.randn(1, 4, 2, 16, dtype=torch.float64, requires_grad=True)
    rope = torch.randn(9, 8).double(), torch.randn(9, 8).double()
    gradient = torch.randn(1, 4, 2, 16, dtype=torch.float64)
    (expected,) = torch.autograd.grad(rope_rows(x, rope, interleaved, 3), x, gradient)
    torch.testing.assert_close(rope_rows(gradient, rope, interleaved, 3, transposed=True), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rope_comes_before_the_signs_and_is_not_rounded_in_between(dtype):
    x = torch.randn(2, 70, 2, 64).bfloat16()
    rope = rope_of(80, 64, dtype)
    values, scale = quantize_tensor(x, rows=64, rotate=True, seed=5, rope=rope, first_position=10)
    expected = quantize_tensor(rope_rows(x.float(), rope, False, 10), rows=64, rotate=True, seed=5)
    assert torch.equal(bits(values), bits(expected[0]))
    assert torch.equal(scale, expected[1])


# Scales and rounding ------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw):
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 300)), draw(st.integers(1, 3)), 16 * draw(st.integers(1, 16))]
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return (torch.randn(shape, generator=generator) * draw(st.sampled_from([1e-3, 1.0, 30.0]))).to(dtype)


@given(tensors(), st.sampled_from(ROWS), st.booleans())
@settings(max_examples=40, deadline=None)
def test_dequantized_values_are_within_half_a_step_of_e4m3(x, rows, rotate):
    values, scale = quantize_tensor(x, rows=rows, rotate=rotate, seed=7)
    head_dim = x.shape[-1]
    expected = x.double()
    if rotate:
        expected = hadamard(expected * signs(7, head_dim)) / math.sqrt(hadamard_block(head_dim))
    error = (dequantize(values, scale, rows_of_scales(rows)).double() - expected).abs()
    # A mantissa of 3 bits: half a step is 1/16 of the value, or 2^-10 of the scale below the smallest normal number.
    least = dequantize(torch.ones_like(x, dtype=torch.float32), scale, rows_of_scales(rows)) * 2**-10
    assert (error <= expected.abs() / 16 * (1 + 1e-5) + least * (1 + 1e-5)).all()


@given(tensors(), st.sampled_from(ROWS), st.booleans())
@settings(max_examples=30, deadline=None)
def test_shapes_and_memory_are_those_that_kernels_read(x, rows, rotate):
    batch, seqlen, heads, _ = x.shape
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    values, scale = quantize_tensor(strided, rows=rows, rotate=rotate)
    again, same = quantize_tensor(x, rows=rows, rotate=rotate)
    assert torch.equal(bits(values), bits(again))
    assert torch.equal(scale, same)
    assert (values.shape, values.dtype) == (x.shape, torch.float8_e4m3fn)
    assert values.is_contiguous()
    blocks = (-(-seqlen // rows),) if isinstance(rows, int) else ()
    assert (tuple(scale.shape), scale.dtype) == ((batch, heads, *blocks), torch.float32)
    assert scale.is_contiguous() or rows == "tensor"


def test_a_scale_is_that_of_the_largest_value_that_shares_it():
    x = torch.zeros(2, 300, 2, 32)
    x[0, 5, 0, 3], x[0, 64, 0, 4], x[0, 299, 1, 0], x[1, 130, 0, 9] = 1.0, -8.0, 16.0, 4.0
    factor = torch.tensor(1 / 448)
    none = SMALLEST_AMAX * factor

    def scales(rows):
        return quantize_tensor(x, rows=rows)[1]

    assert torch.equal(scales(64)[0, 0], torch.stack([factor, 8 * factor, none, none, none]))
    assert torch.equal(scales(128)[0, 0], torch.stack([8 * factor, none, none]))
    assert torch.equal(scales(128)[1, 0], torch.stack([none, 4 * factor, none]))
    assert torch.equal(
        scales("head"), torch.stack([torch.stack([8 * factor, 16 * factor]), torch.stack([4 * factor, none])])
    )
    assert torch.equal(scales("tensor"), (16 * factor).expand(2, 2))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rotate", [False, True])
def test_the_largest_value_of_a_block_becomes_448_or_comes_into_the_last_doubling_below(rotate, power_of_two):
    x = torch.randn(2, 256, 3, 64) * torch.logspace(-3, 3, 6).view(1, 1, 3, 2).repeat(1, 1, 1, 32)
    values, _ = quantize_tensor(x, rows=128, rotate=rotate, power_of_two=power_of_two)
    largest = values.float().abs().view(2, 2, 128, 3, 64).amax(dim=(2, 4))
    assert ((largest >= (224 if power_of_two else 448)) & (largest <= 448)).all()
    assert largest.unique().numel() > 1 or not power_of_two


@given(st.floats(0.0, 3 * 2.0**126, width=32))
def test_an_amax_is_rounded_up_to_a_power_of_two_times_448(amax):
    amax = max(amax, SMALLEST_AMAX)
    rounded = round_up_amax(torch.tensor([amax])).item()
    assert math.frexp(rounded)[0] == 0.875
    assert min(amax, LARGEST_AMAX) <= rounded < 2 * amax


@pytest.mark.parametrize("v_layout", ["row", "transposed"])
def test_scales_of_blocks_of_v_are_powers_of_two(v_layout):
    v = torch.randn(3, 500, 4, 16) * torch.rand(3, 500, 4, 1)
    scale = quantization.quantize_qkv(quantize_tensor, v, v, v, block=(64, 64), v_layout=v_layout).v_scale
    assert (scale.frexp().mantissa == 0.5).all()
    assert (scale / scale.amax(dim=-1, keepdim=True)).unique().numel() > 1


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("rotate", [False, True])
def test_what_is_not_finite_becomes_nan_and_changes_nothing_else(rows, rotate):
    x = torch.randn(1, 200, 2, 64)
    spoiled = x.clone()
    spoiled[0, 70, 1, 3], spoiled[0, 71, 0, 0], spoiled[0, 72, 0, 0] = torch.nan, torch.inf, -torch.inf
    kept = x.clone()
    # In a rotated row every element is a sum with that which is not finite.
    for row, head, column in ((70, 1, 3), (71, 0, 0), (72, 0, 0)):
        kept[0, row, head, slice(None) if rotate else column] = 0.0
    values, scale = quantize_tensor(spoiled, rows=rows, rotate=rotate)
    expected, expected_scale = quantize_tensor(kept, rows=rows, rotate=rotate)
    assert torch.equal(scale, expected_scale)
    lost = values.isnan()
    assert lost.sum() == (3 * 64 if rotate else 3)
    assert (bits(values)[lost] == 0x7F).all()
    assert torch.equal(bits(values)[~lost], bits(expected)[~lost])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, SMALLEST_AMAX / 2, SMALLEST_AMAX, 1e30, 1e36])
@pytest.mark.parametrize("rotate", [False, True])
def test_finite_values_of_any_size_stay_finite_and_near(rows, size, rotate):
    x = torch.randn(1, 130, 1, 32).clamp(-1, 1) * size
    values, scale = quantize_tensor(x, rows=rows, rotate=rotate)
    back = dequantize(values, scale, rows_of_scales(rows))
    assert back.isfinite().all()
    expected = (hadamard(x.double() * signs(0, 32)) / math.sqrt(32)) if rotate else x.double()
    # Below the smallest amax, steps do not get smaller.
    step = max(expected.abs().max().item(), SMALLEST_AMAX) / 448 / 2**10
    assert ((back - expected).abs() <= expected.abs() / 16 * 1.001 + 1.001 * step).all()


def test_a_block_of_zeros_never_has_the_largest_scale():
    """The kernel compares the scale of a block of V to the largest: what a scale of 1 would be, P would not reach."""
    v = torch.randn(1, 256, 1, 64) * 1e-3
    v[:, 128:] = 0.0
    scale = quantize_tensor(v, rows=128)[1]
    assert scale[0, 0, 1] < scale[0, 0, 0]
    q_scale = k_scale = quantize_tensor(torch.zeros(1, 1, 1, 256), rows=64, rotate=True)[1]
    assert (q_scale * k_scale / 16).item() > torch.finfo(torch.float32).tiny


def test_values_above_what_sums_may_reach_become_nan_only_where_they_are_rotated():
    x = torch.full((1, 4, 1, 16), 3e38)
    for power_of_two in (False, True):
        assert quantize_tensor(x, rows="head", power_of_two=power_of_two)[0].float().eq(448).all()
    assert quantize_tensor(x, rows="head", rotate=True)[0].isnan().any()


def test_conversion_rounds_to_nearest_even_and_saturates():
    x = torch.tensor([17.0, 18.0, 19.0, 20.9, 447.0, 464.1, 1e30, -1e30, 2**-10, 1.1 * 2**-10, -(2**-9)])
    expected = [16.0, 18.0, 20.0, 20.0, 448.0, 448.0, 448.0, -448.0, 0.0, 2**-9, -(2**-9)]
    assert to_e4m3(x).float().tolist() == expected


def test_the_inverse_is_one_division():
    """Not the rounded reciprocal times 448, which differs in the last bit for many an amax."""
    amax = torch.rand(1000, 1, 1, 1) * 10 + 0.1
    x = torch.cat([amax, amax * torch.rand(1000, 1, 1, 15)], dim=-1)
    values, scale = quantize_tensor(x, rows="head")
    inverse = (448.0 / amax.double()).float()
    assert torch.equal(values.float(), to_e4m3(x * inverse).float())
    assert torch.equal(scale, amax[:, 0, 0] * torch.tensor(1 / 448.0))


def test_with_scales_that_are_powers_of_two_values_are_rounded_once():
    x = torch.rand(1000, 1, 1, 16) * torch.logspace(-8, 8, 1000).view(-1, 1, 1, 1)
    values, scale = quantize_tensor(x, rows="head", power_of_two=True)
    assert torch.equal(values.float(), to_e4m3((x.double() / scale.double()[..., None, None]).float()).float())


@pytest.mark.parametrize("rows", ROWS)
def test_no_rows_at_all_have_scales_too(rows):
    values, scale = quantize_tensor(torch.randn(2, 0, 3, 16), rows=rows)
    assert values.shape == (2, 0, 3, 16)
    assert scale.shape == ((2, 3, 0) if isinstance(rows, int) else (2, 3))
    assert scale.isfinite().all()


# V^T ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen", [1, 15, 16, 17, 100])
def test_transposed_values_hold_keys_in_the_order_of_the_slots(seqlen):
    v = to_e4m3(torch.randn(2, seqlen, 3, 32))
    slots = bits(transposed(v))
    assert slots.shape == (2, 3, 32, -(-seqlen // 16) * 16)
    for slot in range(slots.shape[-1]):
        thread, place = slot % 16 // 4, slot % 4
        key = slot // 16 * 16 + 2 * thread + (place if place < 2 else 8 + place - 2)
        expected = bits(v)[:, key] if key < seqlen else torch.zeros(2, 3, 32, dtype=torch.uint8)
        assert torch.equal(slots[..., slot], expected)
    assert torch.equal(bits(rows_of_transposed(transposed(v), seqlen)), bits(v))


def test_the_order_of_slots_is_a_permutation():
    assert sorted(KEY_OF_SLOT) == list(range(16))
    assert KEY_OF_SLOT[:8] == (0, 1, 8, 9, 2, 3, 10, 11)


@pytest.mark.parametrize("rows", ROWS)
def test_a_transposed_tensor_is_the_quantized_one_transposed(rows):
    v = torch.randn(2, 77, 2, 48)
    values, scale = quantize_tensor(v, rows=rows)
    turned, same = quantize_tensor(v, rows=rows, transpose=True)
    assert torch.equal(bits(turned), bits(transposed(values)))
    assert turned.is_contiguous()
    assert torch.equal(scale, same)


# q, k and v together ------------------------------------------------------------------------------------------------


def quantized(block=(128, 64), v_layout="row", seed=3, head_dim=32, seqlen_k=150):
    q, k, v = torch.randn(2, 90, 4, head_dim), torch.randn(2, seqlen_k, 2, head_dim), torch.randn(2, seqlen_k, 2, 48)
    return (q, k, v), quantization.quantize_qkv(quantize_tensor, q, k, v, None, False, seed, block, v_layout)


@pytest.mark.parametrize("block", [(128, 64), (64, 128), "head", "tensor"], ids=str)
@pytest.mark.parametrize("v_layout", ["row", "transposed"])
@pytest.mark.parametrize("seed", [None, 3])
def test_dequantized_q_k_and_v_are_near_what_they_were(block, v_layout, seed):
    (q, k, v), x = quantized(block, v_layout, seed)
    assert (x.head_dim, x.head_dim_v, x.seqlen_q, x.seqlen_k, x.incoherent) == (32, 48, 90, 150, seed is not None)
    q_back, k_back, v_back = x.dequantize()
    if seed is not None:
        q_back, k_back = (hadamard(y) * signs(seed, 32) / math.sqrt(32) for y in (q_back, k_back))
    for one, other in ((q_back, q), (k_back, k), (v_back, v)):
        assert one.dtype is torch.float32
        assert (one - other).norm() < 0.04 * other.norm()


def test_the_largest_scale_of_v_is_kept_where_there_are_many():
    x = quantized()[1]
    assert torch.equal(x.v_scale_max, x.v_scale.amax(-1))
    assert quantized("head")[1].v_scale_max is None


@pytest.mark.parametrize("v_layout", ["row", "transposed"])
def test_queries_meet_the_keys_of_another(v_layout):
    one, other = quantized()[1], quantized(block=(64, 128), v_layout=v_layout, seqlen_k=200)[1]
    both = one.with_keys_of(other)
    assert (both.block, both.v_layout, both.seqlen_q, both.seqlen_k) == ((128, 128), v_layout, 90, 200)
    for mine, expected in zip(both.dequantize(), (one.dequantize()[0], *other.dequantize()[1:]), strict=True):
        assert torch.equal(mine, expected)
    assert quantized("tensor")[1].with_keys_of(quantized("head")[1]).block == "head"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 4}, r"^seed=3 of the queries, seed=4 of the keys"),
        ({"seed": None}, r"^seed=3 of the queries, seed=None of the keys"),
        ({"head_dim": 64}, r"^head_dim is 32 of the queries, 64 of the keys"),
        ({"block": "head"}, r"^block=\(128, 64\) of the queries, 'head' of the keys"),
    ],
    ids=str,
)
def test_queries_and_keys_that_do_not_belong_together_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        quantized()[1].with_keys_of(quantized(**changes)[1])


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": lambda x: x.q.float()}, TypeError, r"^q has dtype torch\.float32: must be torch\.float8_e4m3fn"),
        ({"v": lambda x: x.v[0]}, ValueError, r"^v has shape \(150, 2, 48\): must have 4 dims"),
        ({"k": lambda x: x.k[..., :16]}, ValueError, r"^k has shape \(2, 150, 2, 16\): must be \(2, 150, 2, 32\)"),
        ({"v": lambda x: x.v[:, :140]}, ValueError, r"^v has shape \(2, 140, 2, 48\)"),
        ({"v_layout": lambda x: "transposed"}, ValueError, r"^v has shape \(2, 150, 2, 48\): must be \(2, 2, 2, 160\)"),
        ({"v_layout": lambda x: "column"}, ValueError, r"^v_layout='column': allowed are 'row' and 'transposed'"),
        ({"block": lambda x: (128, 32)}, ValueError, r"^block=\(128, 32\): allowed are"),
        ({"block": lambda x: "row"}, ValueError, r"^block='row': allowed are"),
        ({"block": lambda x: "head"}, ValueError, r"^q_scale has shape \(2, 4, 1\): must be \(2, 4\)"),
        ({"k_scale": lambda x: x.k_scale.double()}, TypeError, r"^k_scale has dtype torch\.float64"),
        ({"v_scale": lambda x: x.v_scale.to("meta")}, ValueError, r"^v_scale is on device meta, q on cpu"),
        (
            {"v_scale_max": lambda x: None},
            TypeError,
            r"^v_scale_max must be a torch\.Tensor of shape \(2, 2\), not None",
        ),
        ({"q": lambda x: None}, TypeError, r"^q must be a torch\.Tensor, not NoneType"),
        ({"block": lambda x: [128, 64]}, TypeError, r"^block=\[128, 64\]: must be .* a tuple, not list"),
        ({"block": lambda x: None}, TypeError, r"^block=None: must be .*, not NoneType"),
        ({"block": lambda x: (128.0, 64.0)}, ValueError, r"^block=\(128\.0, 64\.0\): allowed are"),
        ({"seed": lambda x: 2**31}, ValueError, r"^seed=2147483648: allowed are 0 to 2147483647, and None"),
        ({"seed": lambda x: True}, TypeError, r"^seed=True: must be an int or None, not bool"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_parts_that_do_not_fit_are_named(changes, error, words):
    x = quantized()[1]
    names = ("q", "k", "v", "q_scale", "k_scale", "v_scale", "v_scale_max", "block", "v_layout", "seed")
    parts = {name: getattr(x, name) for name in names}
    parts |= {name: change(x) for name, change in changes.items()}
    with pytest.raises(error, match=words):
        QuantizedQKV(**parts)


def test_all_blocks_of_v_may_have_the_scale_of_their_head():
    q, k, v = (torch.randn(2, 300, 2, 32) * torch.arange(1, 301)[:, None, None] for _ in range(3))
    for v_layout, v_of_head in itertools.product(("row", "transposed"), (False, True)):
        x = quantization.quantize_qkv(quantize_tensor, q, k, v, block=(64, 96), v_layout=v_layout, v_of_head=v_of_head)
        of_head, scale = quantize_tensor(v, rows="head", transpose=v_layout == "transposed")
        assert x.v_scale.shape == (2, 2, 4)
        assert (x.v_scale == x.v_scale[..., :1]).all().item() is v_of_head
        assert torch.equal(x.v_scale_max, x.v_scale.amax(-1))
        if v_of_head:
            assert torch.equal(x.v_scale_max, scale)
            assert torch.equal(x.v.view(torch.uint8), of_head.view(torch.uint8))


def test_a_block_of_v_a_million_times_as_large_as_the_others_leaves_them_alone():
    """With a scale for each block its ratio would take all range from the probabilities of rows that cannot see it."""
    q, k, v = (torch.randn(1, 256, 1, 64) for _ in range(3))
    v[:, 200] *= 2.0**12
    out = fa3.flash_attn_fp8_func(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True).float()
    expected = fa3.reference(q, k, v, causal=True)[0].float()
    error = (out - expected)[:, :200]
    assert error.norm() < 0.15 * expected[:, :200].norm()


def test_a_largest_scale_of_v_is_refused_where_there_are_no_blocks():
    x = quantized("head")[1]
    with pytest.raises(ValueError, match=r"^v_scale_max is given beside block='head'"):
        replace(x, v_scale_max=x.v_scale)


def test_keys_are_those_of_something_quantized():
    with pytest.raises(TypeError, match=r"^other must be a fa3\.QuantizedQKV, not tuple"):
        quantized()[1].with_keys_of(())


def _saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    with torch.serialization.safe_globals([QuantizedQKV]):
        return torch.load(file, weights_only=True)


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, _saved])
@pytest.mark.parametrize("block", [(128, 64), "tensor"])
def test_a_copy_by_pickle_or_torch_save_is_the_same(block, copied):
    x = quantized(block, v_layout="transposed")[1]
    y = copied(x)
    assert (y.block, y.v_layout, y.seed, y.v.dtype) == (x.block, x.v_layout, x.seed, torch.float8_e4m3fn)
    for mine, expected in zip(y.dequantize(), x.dequantize(), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("block", [(128, 64), "head"])
def test_all_tensors_move_together(block):
    x = quantized(block)[1]
    y = x.to("meta")
    moved = [value for value in vars(y).values() if isinstance(value, torch.Tensor)]
    assert len(moved) == (7 if isinstance(block, tuple) else 6)
    assert {value.device.type for value in moved} == {"meta"}
    assert (y.block, y.seed) == (x.block, x.seed)
