"""FP8 attention on a Hopper GPU: values against the float64 oracle on the dequantized q, k and v."""

import itertools
import math

import pytest
import torch

import fa3
from eager import masked_scores, with_sink
from fa3 import mods, quantization
from fa3.errors import FA3Error
from fa3.numerics.fp8_error import P_SCALE
from fa3.quantization import E4M3, QuantizedQKV, to_e4m3

HEAD_DIMS = (64, 96, 128, 192, 256)
DIMS = (
    *((d, d) for d in (16, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)),
    (192, 128),
    (64, 256),
    (256, 64),
    (16, 144),
)
LENGTHS = ((1, 1), (3, 799), (113, 203), (239, 1), (300, 100), (517, 1030))
#: (block, v_layout): every kind of scales with every layout.
KINDS = tuple(itertools.product(("head", (128, 128), (64, 64), (64, 128), (128, 64)), ("row", "transposed")))
SHIPPED_KINDS = (("head", "row"), ("head", "transposed"), ((128, 128), "transposed"))

#: Largest difference of an LSE: it is that of a sum of rounded probabilities, each by 2**-4 of it at most. Scores, and
#: so large LSEs, have the 14 bits of sums in tensor cores.
LSE_ERROR = 0.07
MEAN_LSE_ERROR = 0.02
LSE_PRECISION = 2.0**-11


def asked(function, *arguments, **options):
    """The answer of a call, or a skip where its kernel is neither in the store nor can be compiled."""
    from fa3.compiler.target import dsl_installed

    try:
        return function(*arguments, **options)
    except FA3Error:
        if dsl_installed():
            raise
        pytest.skip("a kernel is not in the store, and no compiler here")


def tensors(lengths=(200, 333), dims=(128, 128), heads=(4, 2), batch=2, dtype=torch.bfloat16):
    """16-bit q, k and v on the GPU."""
    (seqlen_q, seqlen_k), (head_dim, head_dim_v), (heads_q, heads_kv) = lengths, dims, heads
    shapes = (batch, seqlen_q, heads_q, head_dim), (batch, seqlen_k, heads_kv, head_dim)
    shapes += ((batch, seqlen_k, heads_kv, head_dim_v),)
    return tuple(torch.randn(shape, device="cuda").to(dtype) for shape in shapes)


def quantized(*sizes, block="head", v_layout="row", qk_dtype="e4m3", **more) -> QuantizedQKV:
    """What the definition makes of random tensors: the kernel that quantizes has tests of its own."""
    q, k, v = tensors(*sizes, **more)
    # Some blocks are larger than others. Large scores would be those of tensor cores, which have 14 bits.
    for x, span in ((q, 2.0), (k, 2.0), (v, 10.0)):
        factors = span ** (2 * torch.rand(-(-x.shape[1] // 64), device="cuda") - 1)
        x *= factors.repeat_interleave(64)[: x.shape[1], None, None].to(x.dtype)
    return quantization.quantize_qkv(
        quantization.quantize_tensor, q, k, v, block=block, v_layout=v_layout, seed=3, qk_dtype=qk_dtype
    )


def poison(q, head_dim_v, dtype):
    """Fill the blocks that the caching allocator will hand out for out and LSE with NaN."""
    batch, rows, heads, _ = q.shape
    blocks = [torch.full((batch, rows, heads, head_dim_v), math.nan, dtype=dtype, device="cuda") for _ in range(3)]
    blocks += [torch.full((batch, heads, rows), math.nan, device="cuda") for _ in range(3)]
    del blocks


def attend(x: QuantizedQKV, **options):
    poison(x.q, x.head_dim_v, options.get("out_dtype", torch.bfloat16))
    return asked(fa3.flash_attn_quantized_func, x, return_lse=True, **options)


def rounding_probabilities(
    q, k, v, shares=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
    sink=None, score_mod=None, mask_mod=None,
):  # fmt: skip
    """Attention of float32 q, k and v with nothing rounded but probabilities, to e4m3: the yardstick.

    ``shares`` (batch, heads_kv, seqlen_k): the scale of each key's block of v in the largest of its head.
    """
    seqlen_k, group = k.shape[1], q.shape[2] // k.shape[2]
    keys, values = (x.double().transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.double().transpose(1, 2) @ keys.mT * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = masked_scores(scores, causal, window_size, attention_chunk, softcap, score_mod, mask_mod)
    logits = with_sink(scores, sink)
    largest = scores.amax(dim=-1, keepdim=True).clamp_min(-1e300)
    weights = torch.full_like(scores[:, :, :1], P_SCALE)
    if shares is not None:
        weights *= shares.double().repeat_interleave(group, dim=1)[:, :, None, :seqlen_k]
    rounded = to_e4m3(((scores - largest).exp() * weights).float()).double() / weights
    row_sum = (logits - largest).exp().sum(dim=-1, keepdim=True)
    return torch.where(row_sum > 0, rounded @ values / row_sum, 0.0).transpose(1, 2)


def shares_of(x: QuantizedQKV):
    if not x.k_block:
        return None
    return (x.v_scale / x.v_scale_max[..., None]).repeat_interleave(x.k_block, dim=-1)


def assert_accurate(out, lse, q, k, v, shares=None, dtype=torch.bfloat16, **options):
    """q, k and v in float32 are what was computed with. At most twice the error of rounding probabilities alone, and
    a unit of the last place of bf16."""
    assert out.dtype == dtype
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert torch.isfinite(out).all(), "a value is not finite: an element was not written, or read from nowhere"
    expected, expected_lse = fa3.reference(q, k, v, **options)
    yardstick = rounding_probabilities(q, k, v, shares, **options)
    for measure in (lambda x: x.abs().max().item(), lambda x: x.square().mean().sqrt().item()):
        error, allowed, size = (measure(x.double()) for x in (out - expected, yardstick - expected, expected))
        assert error <= 2 * allowed + 2.0**-8 * size
    if lse is None:
        return
    assert lse.dtype == torch.float32
    assert torch.equal(lse == -math.inf, expected_lse == -math.inf)
    seen = expected_lse != -math.inf
    if seen.any():
        error = ((lse - expected_lse).abs() - LSE_PRECISION * expected_lse.abs())[seen].clamp_min(0.0)
        assert error.max().item() <= LSE_ERROR
        assert error.mean().item() <= MEAN_LSE_ERROR


def assert_quantized_accurate(x: QuantizedQKV, **options):
    """A call of what was quantized, with options that the oracle has too."""
    hints = {
        name: options.pop(name) for name in ("out_dtype", "two_level", "sm_margin", "block_mask") if name in options
    }
    of_blocks = {} if "block_mask" not in hints else {"mask_mod": hints["block_mask"].mask_mod}
    out, lse = attend(x, **options, **hints)
    dtype = hints.get("out_dtype", torch.bfloat16)
    assert_accurate(out, lse, *x.dequantize(), shares_of(x), dtype, **options, **of_blocks)
    return out


# Sizes, layouts and scales ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_head_dim_and_length_is_accurate(dims, causal):
    for lengths in LENGTHS:
        assert_quantized_accurate(quantized(lengths, dims), causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_scales_and_layout_of_v_is_accurate(kind, head_dim, causal):
    block, v_layout = kind
    for lengths in LENGTHS:
        x = quantized(lengths, (head_dim, head_dim), block=block, v_layout=v_layout)
        assert_quantized_accurate(x, causal=causal)


@pytest.mark.parametrize("two_level", [None, False, True])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
def test_long_rows_are_accurate_however_outputs_are_added(kind, head_dim, causal, two_level):
    block, v_layout = kind
    x = quantized((700, 5000), (head_dim, head_dim), block=block, v_layout=v_layout, batch=1)
    assert_quantized_accurate(x, causal=causal, two_level=two_level)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 127, 128, 129, 4093])
@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
def test_keys_that_fill_no_group_of_16_are_accurate(kind, length):
    block, v_layout = kind
    assert_quantized_accurate(quantized((70, length), block=block, v_layout=v_layout))


@pytest.mark.parametrize("heads", [(1, 1), (7, 7), (8, 4), (12, 4), (16, 1), (40, 8)], ids=str)
@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
def test_query_heads_that_share_keys_are_accurate(kind, heads):
    block, v_layout = kind
    assert_quantized_accurate(quantized((200, 333), heads=heads, batch=3, block=block, v_layout=v_layout), causal=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
def test_a_full_card_is_accurate(kind, head_dim):
    block, v_layout = kind
    x = quantized((2000, 1500), (head_dim, head_dim), heads=(32, 8), block=block, v_layout=v_layout)
    assert_quantized_accurate(x, causal=True)


@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
def test_out_in_fp16_is_accurate(kind):
    block, v_layout = kind
    x = quantized((300, 400), block=block, v_layout=v_layout)
    assert_quantized_accurate(x, out_dtype=torch.float16)


@pytest.mark.parametrize("sm_margin", [1, 131])
def test_a_margin_is_accurate(sm_margin):
    assert_quantized_accurate(quantized((700, 900)), causal=True, sm_margin=sm_margin)


# Masks and options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_size", [(0, 0), (63, 0), (64, 64), (-1, 17), (17, -1), (1000, 0)], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_windows_are_accurate(head_dim, window_size):
    for lengths, v_layout in zip(LENGTHS, itertools.cycle(("row", "transposed"))):
        assert_quantized_accurate(quantized(lengths, (head_dim, head_dim), v_layout=v_layout), window_size=window_size)


@pytest.mark.parametrize("attention_chunk", [1, 64, 100])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_chunks_are_accurate(attention_chunk, causal):
    for lengths in LENGTHS:
        x = quantized(lengths, block=(128, 128), v_layout="transposed")
        assert_quantized_accurate(x, attention_chunk=attention_chunk, causal=causal)


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (90, 10)}], ids=str)
@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_softcap_and_a_sink_are_accurate(head_dim, kind, mask):
    block, v_layout = kind
    x = quantized((113, 400), (head_dim, head_dim), block=block, v_layout=v_layout)
    assert_quantized_accurate(x, softcap=5.0, **mask)
    sink = torch.tensor([0.0, 3.0, -2.0, -math.inf], device="cuda")
    assert_quantized_accurate(x, sink=sink, **mask)
    assert_quantized_accurate(x, sink=sink.bfloat16(), softmax_scale=0.3, **mask)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
def test_modifications_and_block_masks_are_accurate(kind, head_dim):
    block, v_layout = kind
    x = quantized((300, 300), (head_dim, head_dim), block=block, v_layout=v_layout)
    ids = torch.randint(0, 3, (2, 300), device="cuda", dtype=torch.int32).sort(1).values
    document = mods.document(ids, causal=True)
    assert_quantized_accurate(x, score_mod=mods.alibi(mods.alibi_slopes(4, "cuda")), causal=True)
    assert_quantized_accurate(x, mask_mod=document)
    block_mask = fa3.create_block_mask(document, 2, None, 300, 300, device="cuda")
    assert_quantized_accurate(x, block_mask=block_mask)
    assert_quantized_accurate(x, block_mask=block_mask, two_level=True)


# e4m3 of the caller's own -------------------------------------------------------------------------------------------


def own(lengths=(200, 333), dims=(128, 128), heads=(4, 2)):
    """q, k and v in e4m3 and their scales (batch, heads_kv)."""
    values = [x.to(E4M3) for x in tensors(lengths, dims, heads)]
    return values, [torch.rand(2, heads[1], device="cuda") + 0.5 for _ in range(3)]


def dequantized(values, scales):
    """In float32; ``None`` is 1."""
    found = []
    for x, scale in zip(values, scales, strict=True):
        factor = (
            1.0 if scale is None else scale.repeat_interleave(x.shape[2] // scale.shape[1], dim=1)[:, None, :, None]
        )
        found.append(x.float() * factor)
    return found


def call_own(values, scales, **options):
    poison(values[0], values[2].shape[3], torch.bfloat16)
    names = ("q_descale", "k_descale", "v_descale")
    given = dict(zip(names, scales, strict=True))
    return asked(fa3.flash_attn_func, *values, return_lse=True, **given, **options)


@pytest.mark.parametrize("given", list(itertools.product((False, True), repeat=3)), ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scales_of_a_head_and_none_are_accurate_in_flash_attn_func(head_dim, given):
    values, scales = own(dims=(head_dim, head_dim))
    scales = [scale if one else None for scale, one in zip(scales, given, strict=True)]
    out, lse = call_own(values, scales, causal=True)
    assert_accurate(out, lse, *dequantized(values, scales), causal=True)


def test_scales_of_any_strides_are_read_where_they_lie():
    values, scales = own()
    expected = call_own(values, scales)
    apart = [torch.stack([scale, torch.full_like(scale, math.nan)], dim=1)[:, 0] for scale in scales]
    turned = [scale.t().contiguous().t() for scale in scales]
    for other in (apart, turned):
        assert all(torch.equal(x, y) for x, y in zip(call_own(values, other), expected, strict=True))
    one = [scale[:1, :1].expand(2, 2) for scale in scales]
    assert torch.equal(call_own(values, one)[0], call_own(values, [scale.contiguous() for scale in one])[0])


def test_rows_of_any_strides_are_read_right_and_never_written():
    packed = torch.randn(2, 150, 3, 4, 128, device="cuda").to(E4M3)
    wide = torch.randn(2, 150, 4, 136, device="cuda").to(E4M3)
    flat = torch.randn(2 * 150 * 4 * 128 + 1, device="cuda").to(E4M3)
    odd = flat[1:].view(2, 150, 4, 128)
    for values in (
        packed.unbind(2),
        [wide[..., :128]] * 3,
        [odd] * 3,
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in packed.unbind(2)],
    ):
        before = [x.float() for x in values]
        out, lse = call_own(values, (None, None, None), causal=True)
        assert_accurate(out, lse, *before, causal=True)
        assert all(torch.equal(x.float(), y) for x, y in zip(values, before, strict=True))


def test_transposed_v_at_an_odd_address_is_read_right():
    x = quantized((100, 203), v_layout="transposed")
    expected = attend(x)
    odd = torch.empty(x.v.numel() + 1, device="cuda", dtype=E4M3)[1:].view(x.v.shape)
    odd.copy_(x.v)
    apart = torch.empty(*x.v.shape[:3], x.v.shape[3] + 32, device="cuda", dtype=E4M3)[..., : x.v.shape[3]]
    apart.copy_(x.v)
    for v in (odd, apart):
        other = QuantizedQKV(x.q, x.k, v, x.q_scale, x.k_scale, x.v_scale, None, "head", "transposed", 3)
        assert all(torch.equal(a, b) for a, b in zip(attend(other), expected, strict=True))


def test_columns_beyond_the_head_dims_are_neither_read_nor_written():
    nan = torch.tensor([math.nan], device="cuda").to(E4M3)
    wide = [x.to(E4M3) for x in tensors((150, 260))]
    for x in wide:
        x[..., 80:] = nan
    values = [wide[0][..., :80], wide[1][..., :80], wide[2][..., :48]]
    out, lse = call_own(values, (None, None, None))
    assert_accurate(out, lse, *(x.float() for x in values))


# Hard numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
def test_zeros_give_zeros_and_the_logarithm_of_the_number_of_keys(kind):
    block, v_layout = kind
    q, k, v = (torch.zeros_like(x) for x in tensors())
    x = quantization.quantize_qkv(quantization.quantize_tensor, q, k, v, block=block, v_layout=v_layout)
    out, lse = attend(x)
    assert not out.any()
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(333)), rtol=0, atol=1e-3)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_scale_of_zero_makes_zeros(which):
    values, scales = own()
    scales[which] = torch.zeros_like(scales[which])
    out, lse = call_own(values, scales)
    assert_accurate(out, lse, *dequantized(values, scales))


@pytest.mark.parametrize("size", [1e30, 1e-30, 1e38, 1e-38])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1), (0, 1, 2)], ids=str)
def test_huge_and_tiny_scales_give_no_nan(which, size):
    values, scales = own()
    for i in which:
        scales[i] = torch.full_like(scales[i], size)
    out, lse = call_own(values, scales, causal=True)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    if which == (2,):
        reference = call_own(values, [scales[0], scales[1], None], causal=True)[0].double() * size
        seen = reference.abs() < 1e38
        torch.testing.assert_close(out.double()[seen], reference[seen], rtol=2.0**-6, atol=1e-37)


@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
def test_nan_of_one_head_reaches_no_other(kind):
    block, v_layout = kind
    x = quantized((140, 300), heads=(4, 4), block=block, v_layout=v_layout)
    expected = attend(x)[0]
    v = x.v.clone()
    nan = torch.tensor([math.nan], device="cuda").to(E4M3)
    if v_layout == "row":
        v[1, 37, 2] = nan
    else:
        v[1, 2, :, 32] = nan
    out = attend(QuantizedQKV(x.q, x.k, v, x.q_scale, x.k_scale, x.v_scale, x.v_scale_max, block, v_layout, 3))[0]
    assert out[1, :, 2].isnan().all()
    clean = torch.ones(out.shape[:3], dtype=torch.bool, device="cuda")
    clean[1, :, 2] = False
    assert torch.equal(out[clean], expected[clean])


def test_a_nan_query_row_spoils_no_other():
    x = quantized((140, 300))
    expected = attend(x, causal=True)[0]
    q = x.q.clone()
    q[1, 37, 2, 5] = torch.tensor(math.nan, device="cuda").to(E4M3)
    out, lse = attend(QuantizedQKV(q, x.k, x.v, x.q_scale, x.k_scale, x.v_scale, None, "head", "row", 3), causal=True)
    assert out[1, 37, 2].isnan().all()
    assert lse[1, 2, 37].isnan()
    clean = torch.ones(out.shape[:3], dtype=torch.bool, device="cuda")
    clean[1, 37, 2] = False
    assert torch.equal(out[clean], expected[clean])


@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
def test_growing_scores_move_the_softmax_reference_at_every_tile(kind):
    block, v_layout = kind
    q, k, v = tensors((100, 2000), heads=(1, 1), batch=1)
    k = (k.float() * 0.1 + torch.linspace(-3, 3, 2000, device="cuda")[None, :, None, None]).to(k.dtype)
    for up in (1, -1):
        q_up = (q.float() * 0.1 + up).to(q.dtype)
        x = quantization.quantize_qkv(quantization.quantize_tensor, q_up, k, v, block=block, v_layout=v_layout)
        assert_quantized_accurate(x, softmax_scale=0.3)


def test_rows_without_keys_and_empty_problems_are_those_of_any_call():
    for kind in SHIPPED_KINDS:
        block, v_layout = kind
        x = quantized((500, 130), block=block, v_layout=v_layout)
        out, lse = attend(x, causal=True)
        assert (out[:, :370] == 0).all()
        assert (lse[:, :, :370] == -math.inf).all()
    for lengths, heads, batch in (((77, 0), (4, 2), 2), ((0, 50), (4, 2), 2), ((77, 50), (4, 2), 0)):
        values = [x.to(E4M3) for x in tensors(lengths, heads=heads, batch=batch)]
        out, lse = call_own(values, (None, None, None))
        assert (out.shape, out.dtype) == (values[0].shape, torch.bfloat16)
        assert not out.any()
        assert (lse == -math.inf).all()


# A guest of PyTorch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_100_repeats_agree_bitwise(head_dim, kind, causal):
    block, v_layout = kind
    x = quantized((1000, 1100), (head_dim, head_dim), heads=(8, 2), block=block, v_layout=v_layout)
    first_out, first_lse = attend(x, causal=causal)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(99):
        out, lse = fa3.flash_attn_quantized_func(x, causal=causal, return_lse=True)
        different += (out != first_out).sum() + (lse != first_lse).sum()
    assert different.item() == 0


@pytest.mark.parametrize("block", ["head", "tensor", (128, 128), (64, 64)], ids=str)
@pytest.mark.parametrize("v_layout", ["row", "transposed"])
@pytest.mark.parametrize("incoherent", [False, True], ids=["plain", "incoherent"])
def test_the_whole_way_from_16_bits_is_near_exact_attention(block, v_layout, incoherent):
    q, k, v = tensors((300, 400))
    x = asked(fa3.quantize_qkv, q, k, v, block=block, v_layout=v_layout, incoherent=incoherent)
    assert_quantized_accurate(x, causal=True)
    out = fa3.flash_attn_quantized_func(x, causal=True)
    exact = fa3.reference(q, k, v, causal=True)[0]
    assert (out - exact).norm() < 0.08 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_through_fp8_are_near_those_of_exact_attention(head_dim, dtype):
    inputs = [x.requires_grad_() for x in tensors((250, 300), (head_dim, head_dim), dtype=dtype)]
    out = asked(fa3.flash_attn_fp8_func, *inputs, causal=True)
    assert out.dtype == dtype
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, dout)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected_out, _ = fa3.reference(*exact, causal=True)
    expected = torch.autograd.grad(expected_out, exact, dout.double())
    assert (out - expected_out).norm() < 0.08 * expected_out.norm()
    for gradient, near in zip(gradients, expected, strict=True):
        assert gradient.dtype == dtype
        assert (gradient - near).norm() < 0.15 * near.norm()


def test_the_backward_of_fp8_is_the_16_bit_one_with_its_out_and_lse():
    from fa3.backends import hopper_backward

    inputs = [x.requires_grad_() for x in tensors((250, 300))]
    out, lse = asked(fa3.flash_attn_fp8_func, *inputs, causal=True, return_lse=True)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, dout)
    q, k, v = (x.detach() for x in inputs)
    expected = hopper_backward.backward(dout, None, q, k, v, out.detach(), lse.detach(), None, True)
    # dQ is summed in no fixed order.
    for gradient, same in zip(gradients, expected, strict=False):
        torch.testing.assert_close(gradient, same, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("kind", SHIPPED_KINDS, ids=str)
def test_a_captured_graph_replays_with_new_inputs(kind):
    block, v_layout = kind
    x, new = (quantized((300, 400), block=block, v_layout=v_layout) for _ in range(2))
    attend(x, causal=True)
    expected = attend(new, causal=True)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa3.flash_attn_quantized_func(x, causal=True)
    for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale", "v_scale_max"):
        mine, theirs = getattr(x, name), getattr(new, name)
        if mine is not None:
            mine.copy_(theirs)
    graph.replay()
    assert torch.equal(out, expected)


def test_torch_compile_keeps_the_calls_in_one_graph():
    q, k, v = tensors((300, 400))

    def whole_way(q, k, v):
        return fa3.flash_attn_fp8_func(q, k, v, causal=True) * 2

    expected = asked(whole_way, q, k, v)
    compiled = torch.compile(whole_way, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), expected)
    values, scales = own()

    def given(q, k, v, *scales):
        return fa3.flash_attn_func(q, k, v, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2]) * 2

    expected = asked(given, *values, *scales)
    assert torch.equal(torch.compile(given, fullgraph=True, backend="aot_eager")(*values, *scales), expected)


def test_tiled_on_the_same_gpu_is_a_second_opinion(monkeypatch):
    x = quantized((700, 900), block=(128, 128), v_layout="transposed")
    out, lse = attend(x, causal=True)
    monkeypatch.setenv("FA3_BACKEND", "tiled")
    tiled_out, tiled_lse = attend(x, causal=True)
    assert (out - tiled_out).float().norm() < 0.05 * tiled_out.float().norm()
    torch.testing.assert_close(lse, tiled_lse, rtol=0, atol=LSE_ERROR)
