"""Attention of int8 q and k and e4m3 v on a Hopper GPU: values against the float64 oracle on the dequantized ones."""

import itertools
import math

import pytest
import torch
from test_fp8_attention import (
    DIMS,
    LENGTHS,
    SHIPPED_KINDS,
    asked,
    assert_accurate,
    assert_quantized_accurate,
    attend,
    quantized,
    tensors,
)

import fa3
from fa3 import mods, quantization
from fa3.quantization import E4M3, dequantize

HEAD_DIMS = (64, 128, 256)
KINDS = tuple(itertools.product(("head", (64, 128), (64, 96)), ("row", "transposed")))


def int8(*sizes, **more):
    return quantized(*sizes, qk_dtype="int8", **more)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_head_dim_and_length_is_accurate(dims, causal):
    for lengths in LENGTHS:
        assert_quantized_accurate(int8(lengths, dims), causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_scales_and_layout_of_v_is_accurate(kind, head_dim, causal):
    block, v_layout = kind
    for lengths in LENGTHS:
        assert_quantized_accurate(int8(lengths, (head_dim, head_dim), block=block, v_layout=v_layout), causal=causal)


@pytest.mark.parametrize("two_level", [None, False, True])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
def test_long_rows_are_accurate_however_outputs_are_added(kind, head_dim, causal, two_level):
    block, v_layout = kind
    x = int8((700, 5000), (head_dim, head_dim), block=block, v_layout=v_layout, batch=1)
    assert_quantized_accurate(x, causal=causal, two_level=two_level)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
def test_query_heads_that_share_keys_on_a_full_card_are_accurate(kind, head_dim):
    block, v_layout = kind
    x = int8((2000, 1500), (head_dim, head_dim), heads=(32, 8), block=block, v_layout=v_layout)
    assert_quantized_accurate(x, causal=True)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_options_are_accurate(head_dim):
    x = int8((300, 400), (head_dim, head_dim))
    sink = torch.tensor([0.0, 3.0, -2.0, -math.inf], device="cuda")
    assert_quantized_accurate(x, window_size=(64, 17))
    assert_quantized_accurate(x, attention_chunk=100, causal=True)
    assert_quantized_accurate(x, softcap=5.0, sink=sink)
    assert_quantized_accurate(x, softmax_scale=0.3, out_dtype=torch.float16)
    assert_quantized_accurate(x, score_mod=mods.alibi(mods.alibi_slopes(4, "cuda")), causal=True)
    ids = torch.randint(0, 3, (2, 400), device="cuda", dtype=torch.int32).sort(1).values
    block_mask = fa3.create_block_mask(mods.document(ids, causal=True), 2, None, 300, 400, device="cuda")
    assert_quantized_accurate(x, block_mask=block_mask)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_integers_of_the_callers_own_with_a_scale_a_head_are_accurate(head_dim):
    q, k = (
        torch.randint(-127, 128, (2, rows, heads, head_dim), device="cuda").to(torch.int8)
        for rows, heads in ((200, 4), (333, 2))
    )
    v = torch.randn(2, 333, 2, head_dim, device="cuda").to(E4M3)
    scales = [(torch.rand(2, 2, device="cuda") + 0.5) / size for size in (70.0, 70.0, 1.0)]
    names = ("q_descale", "k_descale", "v_descale")
    out, lse = asked(fa3.flash_attn_func, q, k, v, return_lse=True, **dict(zip(names, scales, strict=True)))
    of_q = scales[0].repeat_interleave(2, dim=1)
    assert_accurate(out, lse, dequantize(q, of_q), dequantize(k, scales[1]), dequantize(v, scales[2]))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_largest_sums_are_exact(head_dim):
    """All products are 127^2: the scores of the first half of the keys are as large as any, of the others as small."""
    q = torch.full((1, 64, 1, head_dim), 127, dtype=torch.int8, device="cuda")
    k = torch.full((1, 256, 1, head_dim), 127, dtype=torch.int8, device="cuda")
    k[:, 128:] = -127
    v = torch.ones(1, 256, 1, head_dim, device="cuda")
    v[:, 128:] = -1
    scale = 5.0 / (127**2 * head_dim)
    out, lse = asked(fa3.flash_attn_func, q, k, v.to(E4M3), softmax_scale=scale, return_lse=True)
    assert_accurate(out, lse, q.float(), k.float(), v, softmax_scale=scale)


@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
@pytest.mark.parametrize("which", [0, 1], ids=["q", "k"])
def test_what_is_not_finite_is_nan_where_its_block_is_seen_and_nowhere_else(which, kind):
    block, v_layout = kind
    q, k, v = tensors((300, 300), heads=(4, 4))
    (q, k)[which][1, 37, 2, 5] = math.nan
    x = quantization.quantize_qkv(
        quantization.quantize_tensor, q, k, v, block=block, v_layout=v_layout, seed=3, qk_dtype="int8"
    )
    out, lse = attend(x)
    lost = torch.zeros(out.shape[:3], dtype=torch.bool, device="cuda")
    # Of q the rows that share its scale, of k every row of the head.
    lost[1, : block[0] if which == 0 and isinstance(block, tuple) else None, 2] = True
    assert out[lost].isnan().all()
    assert lse.transpose(1, 2)[lost].isnan().all()
    assert out[~lost].isfinite().all()


@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
def test_100_repeats_agree_bitwise(kind):
    block, v_layout = kind
    x = int8((1000, 1500), block=block, v_layout=v_layout)
    first, first_lse = attend(x, causal=True)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        out, lse = fa3.flash_attn_quantized_func(x, causal=True, return_lse=True)
        different += (out != first).sum() + (lse != first_lse).sum()
    assert different.item() == 0


@pytest.mark.parametrize(("head_dim", "ratio"), [(64, 0.8), (128, 0.85), (256, 0.97)])
def test_the_whole_way_from_16_bits_has_a_smaller_error_than_with_e4m3(head_dim, ratio):
    q, k, v = tensors((2000, 2000), (head_dim, head_dim), batch=1)
    exact = fa3.reference(q, k, v)[0]
    errors = {
        name: (asked(fa3.flash_attn_fp8_func, q, k, v, qk_dtype=name) - exact).norm().item()
        for name in ("e4m3", "int8")
    }
    assert errors["int8"] < ratio * errors["e4m3"]
