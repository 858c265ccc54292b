"""The tiled backend against the oracle and against autograd of the oracle's formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa3
from eager import LargestTensor
from fa3.backends import tiled

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 4e-6, torch.float64: 1e-13}


def tensors(batch=1, seqlen_q=7, seqlen_k=9, heads_q=2, heads_kv=1, head_dim=16, head_dim_v=16, dtype=torch.float64):
    q = torch.randn(batch, seqlen_q, heads_q, head_dim, dtype=torch.float64).to(dtype)
    k = torch.randn(batch, seqlen_k, heads_kv, head_dim, dtype=torch.float64).to(dtype)
    v = torch.randn(batch, seqlen_k, heads_kv, head_dim_v, dtype=torch.float64).to(dtype)
    return q, k, v


def assert_like_the_oracle(q, k, v, **options):
    out, lse = tiled.forward(q, k, v, options.get("softmax_scale"), options.get("causal", False), True)
    expected_out, expected_lse = fa3.reference(q, k, v, **options)
    assert out.dtype == q.dtype
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    lse_tolerance = 1e-12 if q.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(lse.double(), expected_lse, rtol=lse_tolerance, atol=lse_tolerance)
    return out, lse


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4 queries and 8 keys, so that small problems cross many tile edges."""
    monkeypatch.setattr(tiled, "_tile_sizes", lambda problem, device: (2, 4, 8))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (1, 128), (3, 799), (64, 127), (113, 203), (239, 1), (1023, 1024), (700, 70)]
)
def test_every_dtype_agrees_with_the_oracle(seqlen_q, seqlen_k, dtype, causal):
    assert_like_the_oracle(*tensors(2, seqlen_q, seqlen_k, 2, 1, 32, 32, dtype), causal=causal)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    seqlen_q=st.integers(1, 20),
    seqlen_k=st.integers(0, 30),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([8, 24]),
    head_dim_v=st.sampled_from([8, 40]),
    causal=st.booleans(),
    softmax_scale=st.sampled_from([None, 0.7]),
    tile=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 1000),
)
def test_no_tile_size_changes_values_or_gradients(
    batch, seqlen_q, seqlen_k, heads_kv, group, head_dim, head_dim_v, causal, softmax_scale, tile, seed
):
    torch.manual_seed(seed)
    q, k, v = tensors(batch, seqlen_q, seqlen_k, heads_kv * group, heads_kv, head_dim, head_dim_v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "_tile_sizes", lambda problem, device: tile)
        out, lse = assert_like_the_oracle(q, k, v, causal=causal, softmax_scale=softmax_scale)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        gradients = tiled.backward(dout, dlse, q, k, v, out, lse, softmax_scale, causal)[:3]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected_out, expected_lse = fa3.reference(*inputs, causal=causal, softmax_scale=softmax_scale)
    # A LSE of -inf is a constant: it has no gradient to hand back.
    seen = expected_lse.masked_fill(expected_lse == -math.inf, 0.0)
    expected = torch.autograd.grad(
        (expected_out * dout).sum() + (seen * dlse).sum(), inputs, allow_unused=True, materialize_grads=True
    )
    for gradient, by_autograd in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, by_autograd, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_pass_gradcheck(causal, small_tiles):
    inputs = [x.requires_grad_() for x in tensors(1, 5, 9, 2, 1, 8, 16)]
    assert torch.autograd.gradcheck(lambda *qkv: fa3.flash_attn_func(*qkv, causal=causal, return_lse=True), inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_short_dtypes_are_those_of_the_oracle(dtype, small_tiles):
    inputs = [x.requires_grad_() for x in tensors(2, 33, 47, 4, 2, 16, 24, dtype)]
    out, lse = fa3.flash_attn_func(*inputs, causal=True, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    expected_out, expected_lse = fa3.reference(*inputs, causal=True)
    expected = torch.autograd.grad([expected_out, expected_lse], inputs, [dout.double(), dlse.double()])
    for gradient, by_autograd in zip(gradients, expected, strict=True):
        assert gradient.dtype == dtype
        error = (gradient.double() - by_autograd.double()).abs().max() / by_autograd.double().abs().max()
        assert error < 4 * TOLERANCE[dtype]


def test_rows_without_keys_give_0_and_minus_infinity_and_no_gradient(small_tiles):
    q, k, v = (x.requires_grad_() for x in tensors(seqlen_q=15, seqlen_k=4))
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert (out[:, :11] == 0).all()
    assert (lse[:, :, :11] == -math.inf).all()
    assert torch.isfinite(lse[:, :, 11:]).all()
    # exp(lse) is what code that merges partial results does; its gradient at -inf must stay 0.
    gradients = torch.autograd.grad((out * lse.exp().mT[..., None]).sum(), (q, k, v))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[0][:, :11] == 0).all()


@pytest.mark.parametrize("bad", ["q", "dout", "dlse"])
def test_a_nan_in_a_row_without_keys_reaches_no_gradient(bad, small_tiles):
    q, k, v = tensors(seqlen_q=15, seqlen_k=4)
    out, lse = tiled.forward(q, k, v, None, True, True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = tiled.backward(dout, dlse, q, k, v, out, lse, None, True)[:3]
    {"q": q, "dout": dout, "dlse": dlse.mT}[bad][:, :11] = math.nan
    for one, other in zip(tiled.backward(dout, dlse, q, k, v, out, lse, None, True)[:3], expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_autocast_changes_neither_values_nor_gradients(dtype, autocast, grad, small_tiles):
    q, k, v = (x.requires_grad_(grad) for x in tensors(2, 13, 21, 4, 2, 16, 24, dtype))

    def results():
        out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
        gradients = torch.autograd.grad([out, lse], (q, k, v), [out.detach(), lse.detach()]) if grad else ()
        return (out, lse, *gradients, *fa3.reference(q, k, v, causal=True))

    expected = results()
    with torch.autocast("cpu", autocast):
        inside = results()
    for one, other in zip(inside, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("causal", [False, True])
def test_without_keys_the_whole_output_is_zero(causal):
    q, k, v = (x.requires_grad_() for x in tensors(seqlen_k=0))
    out, lse = fa3.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    gradients = torch.autograd.grad(out.sum() + lse.exp().sum(), (q, k, v))
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    assert (gradients[0] == 0).all()


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"heads_q": 0}])
def test_empty_problems_have_empty_results(sizes):
    q, k, v = tensors(**sizes)
    out, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_all_negative_scores_are_not_lost_against_the_zero_start(dtype, small_tiles):
    q, k, v = tensors(seqlen_q=20, seqlen_k=30, dtype=dtype)
    assert_like_the_oracle(q.abs() * 30, -k.abs() - 1, v, softmax_scale=1.0, causal=True)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_of_ten_thousand_do_not_overflow(sign, small_tiles):
    q, k, v = tensors(seqlen_q=20, seqlen_k=30, dtype=torch.float32)
    q, k = torch.full_like(q, 25.0), sign * (25.0 + k)
    out, lse = tiled.forward(q, k, v, 1.0, False, True)
    expected_out, expected_lse = fa3.reference(q, k, v, softmax_scale=1.0)
    assert expected_lse.abs().min() > 9000
    # The scores themselves are rounded at 1e4 * 2^-24.
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=2e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bad_query_row_spoils_no_other(bad, causal, small_tiles):
    q, k, v = tensors(seqlen_q=13, seqlen_k=21, dtype=torch.float32)
    good_out, good_lse = tiled.forward(q, k, v, None, causal, True)
    q[0, 6, 0, 3] = bad
    out, lse = tiled.forward(q, k, v, None, causal, True)
    assert not torch.equal(out[0, 6, 0], good_out[0, 6, 0])
    others = torch.ones(13, 2, dtype=torch.bool)
    others[6, 0] = False
    assert torch.equal(out[0][others], good_out[0][others])
    assert torch.equal(lse[0].mT[others], good_lse[0].mT[others])


def test_strides_do_not_change_the_result(small_tiles):
    q, k, v = tensors(2, 11, 11, 4, 2, 16, 16, torch.float32)
    expected = tiled.forward(q, k, v, None, True, True)
    packed = torch.cat([q, k, v], dim=2)
    wide = torch.zeros(2, 11, 4, 33)
    wide[..., 5:21] = q
    by_head = q.transpose(1, 2).contiguous().transpose(1, 2)
    for strided in (packed[:, :, :4], wide[..., 5:21], by_head):
        actual = tiled.forward(strided, packed[:, :, 4:6], packed[:, :, 6:], None, True, True)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_expanded_inputs_are_read_and_get_summed_gradients(small_tiles):
    q, k, v = tensors(3, 9, 9, 2, 1)
    one_k, one_v = k[:1].clone().requires_grad_(), v[:1].clone().requires_grad_()
    out = fa3.flash_attn_func(q, one_k.expand(3, -1, -1, -1), one_v.expand(3, -1, -1, -1))
    expected, _ = fa3.reference(q, one_k.expand(3, -1, -1, -1), one_v.expand(3, -1, -1, -1))
    torch.testing.assert_close(out, expected)
    for gradient, by_autograd in zip(
        torch.autograd.grad(out.square().sum(), (one_k, one_v)),
        torch.autograd.grad(expected.square().sum(), (one_k, one_v)),
        strict=True,
    ):
        torch.testing.assert_close(gradient, by_autograd)


@pytest.mark.parametrize(("seqlen", "heads"), [(1, 2), (5, 1)])
def test_inputs_are_never_written(seqlen, heads):
    q, k, v = tensors(1, seqlen, 6, heads, 1, dtype=torch.float32)
    before = [x.clone() for x in (q, k, v)]
    out, lse = tiled.forward(q, k, v, 0.3, False, True)
    out_before, lse_before, dout = out.clone(), lse.clone(), torch.ones_like(out)
    tiled.backward(dout, torch.ones_like(lse), q, k, v, out, lse, 0.3, False)
    for now, then in zip(
        (q, k, v, out, lse, dout), (*before, out_before, lse_before, torch.ones_like(out)), strict=True
    ):
        assert torch.equal(now, then)


def test_two_runs_agree_bitwise():
    q, k, v = tensors(2, 300, 700, 4, 2, 32, 32, torch.bfloat16)
    first, second = (tiled.forward(q, k, v, None, True, True) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_no_intermediate_has_the_size_of_the_score_matrix():
    seqlen = 6000
    q, k, v = (torch.randn(1, seqlen, 1, 8) for _ in range(3))
    with LargestTensor() as largest:
        out, lse = tiled.forward(q, k, v, None, True, True)
        tiled.backward(out, lse, q, k, v, out, lse, None, True)
    assert largest.elements <= max(tiled._TILE_SCORES_CPU, seqlen * 8) < seqlen * seqlen / 30
