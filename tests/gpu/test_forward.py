"""The hopper backend on a Hopper GPU: values against the float64 oracle."""

import math
import random

import pytest
import torch

import fa3
from fa3 import presets
from fa3.backends import hopper
from oracle_gradients import assert_gradients_accurate

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
HEADS = ((2, 2), (6, 2), (4, 1), (3, 3), (8, 2))

_random = random.Random(20)
LENGTHS = [
    (1, 1),
    (1, 128),
    (3, 799),
    (64, 127),
    (113, 203),
    (239, 1),
    (1023, 1024),
    (2048, 2048),
    (4224, 4224),
    *((_random.randint(1, 1500), _random.randint(1, 1500)) for _ in range(7)),
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_all_lengths_are_accurate(lengths, dtype, head_dim, causal, make, attend, assert_accurate):
    heads = HEADS[(lengths[0] + head_dim // 64) % len(HEADS)]
    q, k, v = make(2, *lengths, *heads, head_dim, dtype)
    assert_accurate(*attend(q, k, v, causal=causal), q, k, v, causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", [(1, 1), (7, 7), (8, 4), (12, 4), (16, 1), (40, 8)], ids=str)
@pytest.mark.parametrize("batch", [1, 5])
def test_query_heads_that_share_keys_are_accurate(batch, heads, causal, make, attend, assert_accurate):
    q, k, v = make(batch, 200, 333, *heads)
    assert_accurate(*attend(q, k, v, causal=causal), q, k, v, causal=causal)


@pytest.mark.parametrize("spec", presets.shipped_specs("schedule"), ids=lambda spec: spec.name)
def test_every_schedule_switch_off_and_on_is_accurate(spec, make, attend, assert_accurate):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[spec.dtype]

    def function(q, k, v, softmax_scale, causal, return_lse):
        return hopper.forward_with_spec(spec, q, k, v, softmax_scale, return_lse=return_lse)

    for lengths in ((1, 1), (3, 799), (113, 203), (239, 1), (300, 100), (1023, 1024)):
        q, k, v = make(2, *lengths, 6, 2, spec.head_dim, dtype)
        out, lse = attend(q, k, v, causal=spec.causal, function=function)
        assert_accurate(out, lse, q, k, v, causal=spec.causal)


@pytest.mark.parametrize("softmax_scale", [1e-3, 0.5, 1])
def test_the_softmax_scale_is_applied(softmax_scale, make, attend, assert_accurate):
    q, k, v = make(2, 130, 260)
    assert_accurate(*attend(q, k, v, softmax_scale), q, k, v, softmax_scale)


def test_the_lse_is_made_only_when_wanted_and_out_does_not_depend_on_it(make):
    q, k, v = make(2, 300, 500)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    alone = fa3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out, alone)
    assert lse.shape == (2, 4, 300)


def test_tiled_on_the_same_gpu_is_a_second_opinion(make, monkeypatch):
    q, k, v = make(2, 700, 900)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    monkeypatch.setenv("FA3_BACKEND", "tiled")
    tiled_out, tiled_lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out, tiled_out, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse, tiled_lse, rtol=0, atol=1e-3)


# Rows without keys, empty problems ----------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(129, 1), (500, 130), (1000, 64), (257, 256)])
def test_rows_without_keys_are_0_and_minus_infinity(seqlen_q, seqlen_k, head_dim, make, attend, assert_accurate):
    q, k, v = make(2, seqlen_q, seqlen_k, head_dim=head_dim)
    out, lse = attend(q, k, v, causal=True)
    first = seqlen_q - seqlen_k
    assert (out[:, :first] == 0).all()
    assert (lse[:, :, :first] == -math.inf).all()
    assert_accurate(out, lse, q, k, v, causal=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_without_any_key_everything_is_0_and_minus_infinity(causal, make, attend):
    out, lse = attend(*make(2, 77, 0), causal=causal)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"heads_q": 0}])
def test_empty_problems_have_empty_results(sizes, make):
    q, k, v = make(**sizes)
    out, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert out.is_cuda


# Hard numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_all_negative_scores_are_accurate(head_dim, causal, make, attend, assert_accurate):
    q, k, v = make(1, 200, 300, head_dim=head_dim)
    q, k = q.abs(), -k.abs() - 0.5
    assert_accurate(*attend(q, k, v, causal=causal), q, k, v, causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("sign", [-1, 0, 1], ids=["negative", "both", "positive"])
def test_scores_of_ten_thousand_are_accurate(sign, head_dim, dtype, causal, make, attend, assert_accurate):
    q, k, v = make(1, 150, 400, head_dim=head_dim, dtype=dtype)
    if sign:
        q, k = q.abs(), k.abs() * sign
    largest = (q[0].float().transpose(0, 1) @ k[0].float().permute(1, 2, 0).repeat_interleave(2, 0)).abs().max().item()
    softmax_scale = 1e4 / largest
    out, lse = attend(q, k, v, softmax_scale, causal)
    assert_accurate(out, lse, q, k, v, softmax_scale, causal)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_growing_scores_move_the_softmax_reference_at_every_tile(head_dim, make, attend, assert_accurate):
    q, k, v = make(1, 100, 2000, 1, 1, head_dim)
    k = (k.float() * 0.1 + torch.linspace(-3, 3, 2000, device="cuda")[None, :, None, None]).to(k.dtype)
    for up in (1, -1):
        q_up = (q.float() * 0.1 + up).to(q.dtype)
        assert_accurate(*attend(q_up, k, v, 0.3), q_up, k, v, 0.3)


def bad_values(dtype):
    """NaN of both signs and infinity of both signs, as bits: conversions may drop the sign of a NaN."""
    exponent = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[dtype]
    quiet = {torch.bfloat16: 0x40, torch.float16: 0x200}[dtype]
    positive = {"nan": exponent | quiet, "inf": exponent}
    # A 16-bit pattern with the sign bit set is a negative int16.
    patterns = positive | {f"-{name}": bits - 0x8000 for name, bits in positive.items()}
    return {name: torch.tensor([bits], dtype=torch.int16).view(dtype)[0] for name, bits in patterns.items()}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bad", ["nan", "-nan", "inf", "-inf"])
def test_a_bad_query_row_spoils_no_other(bad, head_dim, dtype, causal, make, attend, assert_accurate):
    q, k, v = make(2, 140, 300, head_dim=head_dim, dtype=dtype)
    clean = q.clone()
    rows = torch.ones(q.shape[:3], dtype=torch.bool, device="cuda")
    for row, head in ((0, 0), (37, 1), (77, 3), (139, 2)):
        q[1, row, head, row % 8] = bad_values(dtype)[bad]
        rows[1, row, head] = False
    out, lse = attend(q, k, v, causal=causal)
    assert_accurate(out, lse, clean, k, v, causal=causal, rows=rows)
    if "nan" in bad:
        assert out[~rows].isnan().all()
        assert lse.mT[~rows].isnan().all()


# Layouts ------------------------------------------------------------------------------------------------------------


def packed_qkv(make):
    qkv = torch.randn(2, 150, 3, 4, 128, device="cuda").bfloat16()
    return qkv.unbind(2)


def packed_heads(make):
    qkv = torch.randn(2, 150, 4 + 2 + 2, 128, device="cuda").bfloat16()
    return qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:]


def heads_before_rows(make):
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in make(2, 150, 260))


def rows_before_batch(make):
    return tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in make(3, 150, 260))


def expanded_batch(make):
    q, k, v = make(3, 150, 260)
    return q, k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1)


def expanded_heads(make):
    q, k, v = make(2, 150, 260, 4, 1)
    return q, k.expand(-1, -1, 4, -1), v.expand(-1, -1, 4, -1)


def expanded_rows(make):
    q, k, v = make(2, 150, 260)
    return q[:, :1].expand(-1, 150, -1, -1), k[:, :1].expand(-1, 260, -1, -1), v


def everything_expanded(make):
    q, k, v = make(1, 1, 1, 1, 1)
    return q.expand(2, 150, 4, -1), k.expand(2, 260, 2, -1), v.expand(2, 260, 2, -1)


def odd_strides_of_size_1(make):
    q, k, v = make(1, 150, 260, 1, 1)

    def odd(x):
        return x.as_strided(x.shape, (3, 128, 5, 1))

    return odd(q), odd(k), odd(v)


def one_row_with_an_odd_stride(make):
    q, k, v = make(2, 1, 1)
    return tuple(x.as_strided(x.shape, (x.stride(0), 7, x.stride(2), 1)) for x in (q, k, v))


def aligned_slices_of_wide_rows(make):
    return tuple(torch.randn(2, 150, 4, 160, device="cuda").bfloat16()[..., 8:136] for _ in range(3))


def unaligned_slices_of_wide_rows(make):
    return tuple(torch.randn(2, 150, 4, 131, device="cuda").bfloat16()[..., 1:129] for _ in range(3))


def unaligned_offsets(make):
    def shifted(x):
        room = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape)
        return room.copy_(x)

    q, k, v = make(2, 150, 260)
    return shifted(q), shifted(k), shifted(v)


def only_the_values_unaligned(make):
    q, k, _ = make(2, 150, 260)
    return q, k, unaligned_offsets(make)[2]


def every_second_row_from_the_end_of_a_buffer(make):
    return tuple(torch.randn(2, 301, 4, 128, device="cuda").bfloat16()[:, 1::2] for _ in range(3))


LAYOUTS = [
    packed_qkv,
    packed_heads,
    heads_before_rows,
    rows_before_batch,
    expanded_batch,
    expanded_heads,
    expanded_rows,
    everything_expanded,
    odd_strides_of_size_1,
    one_row_with_an_odd_stride,
    aligned_slices_of_wide_rows,
    unaligned_slices_of_wide_rows,
    unaligned_offsets,
    only_the_values_unaligned,
    every_second_row_from_the_end_of_a_buffer,
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_any_strides_are_read_right_and_never_written(layout, causal, make, attend, assert_accurate):
    q, k, v = layout(make)
    before = [x.clone() for x in (q, k, v)]
    out, lse = attend(q, k, v, causal=causal)
    assert out.is_contiguous()
    assert_accurate(out, lse, q, k, v, causal=causal)
    assert all(torch.equal(now, then) for now, then in zip((q, k, v), before, strict=True))


def test_a_remembered_call_does_not_mistake_another_for_itself(make, attend, assert_accurate):
    q, k, v = make(2, 150, 150, 4, 4)
    q_odd, k_odd, v_odd = (
        torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape) for x in (q, k, v)
    )
    for odd, even in ((q_odd, q), (k_odd, k), (v_odd, v)):
        odd.copy_(even)
    for _ in range(2):
        for tensors in ((q, k, v), (q_odd, k, v), (q, k_odd, v_odd), (k, v, q), (q_odd, k_odd, v_odd)):
            for softmax_scale in (None, 0.5):
                for causal in (False, True):
                    out, lse = attend(*tensors, softmax_scale, causal)
                    assert_accurate(out, lse, *tensors, softmax_scale, causal)


def test_strides_beyond_2_to_the_31_elements_are_read_right(attend, assert_accurate):
    buffer = torch.empty(2**31 + 2**27, dtype=torch.bfloat16, device="cuda")

    def far_batches(offset, rows, heads):
        x = buffer[offset:].as_strided((2, rows, heads, 128), (2**31, heads * 128, 128, 1))
        return x.copy_(torch.randn(x.shape, device="cuda"))

    def far_rows(offset, rows, heads):
        x = buffer[offset:].as_strided((2, rows, heads, 128), (2**18, 2**24 + 2**18, 128, 1))
        return x.copy_(torch.randn(x.shape, device="cuda"))

    q, k, v = far_batches(0, 130, 4), far_batches(2**20, 150, 2), far_rows(2**21, 128, 2)
    k = k[:, :128]
    assert v.stride(1) * 127 > 2**31
    assert_accurate(*attend(q, k, v, causal=True), q, k, v, causal=True)


def test_an_output_beyond_2_to_the_31_elements_is_written_to_its_end():
    heads, rows = 16, 2**20 + 3
    q = torch.randn(1, 4096, heads, 128, device="cuda").bfloat16().repeat(1, rows // 4096 + 1, 1, 1)[:, :rows]
    k, v = (torch.randn(1, 64, heads, 128, device="cuda").bfloat16() for _ in range(2))
    assert q.numel() > 2**31
    out, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    for part in (slice(0, 256), slice(rows - 259, rows)):
        expected, expected_lse = fa3.reference(q[:, part], k, v)
        torch.testing.assert_close(out[:, part].double(), expected, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse[..., part].double(), expected_lse, rtol=0, atol=1e-3)
    # Queries repeat, so outputs do.
    assert torch.equal(out[:, :4096], out[:, 4096 * 250 : 4096 * 251])


# What it refuses ----------------------------------------------------------------------------------------------------


def test_wide_dtypes_have_no_kernel_and_name_the_way_out(make, monkeypatch):
    q, k, v = (x.float() for x in make())
    with pytest.raises(NotImplementedError, match=r"hopper.*fp32.*FA3_BACKEND"):
        fa3.flash_attn_func(q, k, v)
    monkeypatch.setenv("FA3_BACKEND", "tiled")
    out = fa3.flash_attn_func(q, k, v)
    torch.testing.assert_close(out.double(), fa3.reference(q, k, v)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_input_that_requires_a_gradient_gets_an_accurate_one(which, make):
    tensors = make()
    tensors[which].requires_grad_()
    out, lse = fa3.flash_attn_func(*tensors, causal=True, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    (gradient,) = torch.autograd.grad((out, lse), tensors[which], (dout, dlse))
    assert_gradients_accurate({"qkv"[which]: gradient}, dout, dlse, *tensors, causal=True)
    with torch.no_grad():
        assert not fa3.flash_attn_func(*tensors).requires_grad


def test_bad_inputs_raise_and_the_gpu_stays_usable(make, attend, assert_accurate):
    q, k, v = make()
    bad = [
        (ValueError, (q[0], k, v)),
        (TypeError, (q, k.half(), v)),
        (ValueError, (q, k.cpu(), v)),
        (ValueError, (q.cpu(), k, v)),
        (ValueError, (q[:, :, :3], k, v)),
        (ValueError, (q, k[:, 1:], v)),
        (ValueError, (q, k, v[:1])),
        (ValueError, (q.mT.contiguous().mT, k, v)),
        (ValueError, (q, k, v, float("inf"))),
        (ValueError, (q, k, v, -1.0)),
    ]
    for error, arguments in bad:
        with pytest.raises(error):
            fa3.flash_attn_func(*arguments)
    assert_accurate(*attend(q, k, v), q, k, v)


# The sdpa backend, which can be forced here -------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 128), (113, 203), (239, 1), (300, 100), (77, 0)], ids=str)
def test_flash_attention_2_keeps_the_same_conventions(
    lengths, head_dim, causal, make, attend, assert_accurate, monkeypatch
):
    monkeypatch.setenv("FA3_BACKEND", "sdpa")
    q, k, v = make(2, *lengths, 6, 2, head_dim, torch.float16)
    out, lse = attend(q, k, v, causal=causal)
    assert_accurate(out, lse, q, k, v, causal=causal)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_flash_attention_2_reads_the_same_layouts(layout, make, attend, assert_accurate, monkeypatch):
    monkeypatch.setenv("FA3_BACKEND", "sdpa")
    q, k, v = layout(make)
    assert_accurate(*attend(q, k, v, causal=True), q, k, v, causal=True)
