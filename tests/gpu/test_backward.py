"""Gradients on a Hopper GPU: values against the float64 oracle, and repeats of them."""

import math
import random

import pytest
import torch

import fa3
from fa3 import mods
from oracle_gradients import assert_gradients_accurate

DEVICE = "cuda"

#: One call for each tile class.
DIMS = ((64, 64), (128, 128), (64, 256), (192, 128), (256, 256))
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (100, 50)}}
#: Query heads and K/V heads: as many, and shared by 2, 8 and 3.
HEADS = ((2, 2), (4, 2), (8, 1), (3, 1))

_random = random.Random(7)
LENGTHS = [
    (1, 128),
    (3, 799),
    (64, 127),
    (113, 203),
    (300, 100),
    (1023, 1024),
    *((_random.randint(1, 700), _random.randint(2, 700)) for _ in range(2)),
]

of_masks = pytest.mark.parametrize("mask", MASKS)
of_dims = pytest.mark.parametrize("dims", DIMS, ids=str)


def poison(*tensors):
    """Fill the blocks that the caching allocator will hand out for gradients and sums with NaN."""
    blocks = [torch.full(x.shape, math.nan, dtype=x.dtype, device=DEVICE) for x in tensors for _ in range(2)]
    # Sums of dQ, in rows of whole tiles, and statistics.
    rows = tensors[0].shape[0] * tensors[0].shape[2] * (tensors[0].shape[1] + 128)
    blocks += [torch.full((rows * columns,), math.nan, device=DEVICE) for columns in (2, 64, 128, 256)]
    del blocks


def gradients_of(q, k, v, dout=None, dlse=None, **options):
    """Gradients of ``sum(out * dout) + sum(lse * dlse)`` by name, and both; those not given are random numbers."""
    inputs = {"q": q, "k": k, "v": v, "sink": options.get("sink"), "qv": options.get("qv")}
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items() if x is not None}
    options |= {name: x for name, x in inputs.items() if name in options}
    out, lse = fa3.flash_attn_func(inputs["q"], inputs["k"], inputs["v"], return_lse=True, **options)
    dout = torch.randn_like(out) if dout is None else dout
    poison(q, k, v)
    outputs = (out, dout) if dlse is None else ((out, lse), (dout, dlse))
    gradients = torch.autograd.grad(outputs[0], tuple(inputs.values()), outputs[1])
    return dict(zip(inputs, gradients, strict=True)), dout


def check(q, k, v, dout=None, dlse=None, **options):
    gradients, dout = gradients_of(q, k, v, dout, dlse, **options)
    assert_gradients_accurate(gradients, dout, dlse, q, k, v, **options)


def random_dlse(q):
    return torch.randn(q.shape[0], q.shape[2], q.shape[1], device=DEVICE)


# Shapes and masks -----------------------------------------------------------------------------------------------------


@of_masks
@of_dims
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_all_lengths_are_accurate(lengths, dims, mask, make):
    heads = HEADS[(lengths[0] + sum(dims) // 64) % len(HEADS)]
    q, k, v = make(2, *lengths, *heads, dims[0], head_dim_v=dims[1])
    check(q, k, v, **MASKS[mask])


@of_masks
@of_dims
def test_gradients_in_half_precision_are_accurate(dims, mask, make):
    check(*make(2, 213, 333, 4, 2, dims[0], torch.float16, dims[1]), **MASKS[mask])


@pytest.mark.parametrize("heads", [(1, 1), (7, 7), (4, 2), (8, 1), (12, 4)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_query_heads_that_share_keys_add_up_in_them(heads, causal, make):
    check(*make(3, 200, 333, *heads), causal=causal)


@pytest.mark.parametrize(
    "dims", [(8, 8), (40, 40), (72, 72), (96, 96), (128, 40), (160, 128), (192, 192), (64, 512), (64, 264)], ids=str
)
def test_head_dims_between_those_of_tiles_and_wide_values_are_accurate(dims, make):
    check(*make(2, 213, 333, 4, 2, dims[0], head_dim_v=dims[1]), causal=True)


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (1, 0)},
        {"window_size": (64, -1)},
        {"window_size": (-1, 3)},
        {"window_size": (33, 0), "causal": True},
        {"attention_chunk": 100},
        {"attention_chunk": 77, "window_size": (20, 50)},
        {"attention_chunk": 64, "causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(400, 400), (150, 613), (613, 150)], ids=str)
def test_windows_and_chunks_are_accurate(lengths, options, make):
    check(*make(2, *lengths), **options)


@of_dims
@pytest.mark.parametrize("lengths", [(1, 1), (239, 1)], ids=str)
def test_a_single_key_has_a_gradient_as_value_alone(lengths, dims, make):
    q, k, v = make(2, *lengths, 4, 2, dims[0], head_dim_v=dims[1])
    gradients, dout = gradients_of(q, k, v)
    assert_gradients_accurate({"v": gradients["v"]}, dout, None, q, k, v)
    # What probabilities of 1 leave is the difference of two float32 sums.
    for name in "qk":
        assert gradients[name].abs().max() < 1e-3


@of_dims
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(129, 2), (500, 130), (257, 256)])
def test_rows_that_see_no_key_get_and_give_nothing(seqlen_q, seqlen_k, dims, make):
    q, k, v = make(2, seqlen_q, seqlen_k, head_dim=dims[0], head_dim_v=dims[1])
    first = seqlen_q - seqlen_k
    # Whatever they hold.
    q[:, :first] = math.nan
    dout = torch.randn(*q.shape[:3], dims[1], device=DEVICE).to(q.dtype)
    gradients, _ = gradients_of(q, k, v, dout, random_dlse(q), causal=True)
    assert (gradients["q"][:, :first] == 0).all()
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    seen, dout = q[:, first:].contiguous(), dout[:, first:].contiguous()
    gradients, _ = gradients_of(seen, k, v, dout, causal=True)
    assert_gradients_accurate(gradients, dout, None, seen, k, v, causal=True)


def test_keys_that_no_query_sees_have_gradients_of_zero(make):
    q, k, v = make(2, 50, 700)
    gradients, dout = gradients_of(q, k, v, window_size=(20, 0))
    assert_gradients_accurate(gradients, dout, None, q, k, v, window_size=(20, 0))
    for name in "kv":
        assert (gradients[name][:, : 700 - 50 - 20] == 0).all()


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_q": 0}], ids=str)
def test_empty_problems_have_gradients_of_zero(sizes, make):
    gradients, _ = gradients_of(*make(**sizes), causal=True)
    assert all((gradient == 0).all() for gradient in gradients.values())


# Options ----------------------------------------------------------------------------------------------------------


@of_masks
def test_a_gradient_of_the_lse_joins_in(mask, make):
    q, k, v = make(2, 213, 333)
    check(q, k, v, dlse=random_dlse(q), **MASKS[mask])


def test_a_gradient_of_the_lse_alone_is_accurate(make):
    q, k, v = make(2, 213, 333)
    check(q, k, v, dout=torch.zeros_like(q), dlse=random_dlse(q), causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@of_masks
def test_sinks_have_accurate_gradients(mask, dtype, make):
    q, k, v = make(2, 213, 333)
    sink = torch.randn(4, device=DEVICE).to(dtype)
    check(q, k, v, sink=sink, **MASKS[mask])
    check(q, k, v, dlse=random_dlse(q), sink=sink, **MASKS[mask])


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (256, False)])
@pytest.mark.parametrize("softcap", [3.0, 50.0])
def test_caps_are_accurate(softcap, head_dim, causal, make):
    q, k, v = make(2, 213, 333, head_dim=head_dim)
    check((3 * q.float()).to(q.dtype), k, v, softcap=softcap, causal=causal)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (64, 128)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_qv_has_accurate_gradients(causal, head_dim, head_dim_v, make):
    q, k, v = make(2, 213, 333, head_dim=head_dim, head_dim_v=head_dim_v)
    qv = torch.randn(*q.shape[:3], head_dim_v, device=DEVICE).to(q.dtype)
    check(q, k, v, causal=causal, qv=qv)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_alibi_is_accurate(head_dim, make):
    score_mod = mods.alibi(mods.alibi_slopes(4, DEVICE))
    for lengths in ((2, 2), (113, 203), (300, 300)):
        check(*make(2, *lengths, head_dim=head_dim), causal=True, score_mod=score_mod)


@pytest.mark.parametrize("lengths", [(40, 40), (200, 333), (333, 200)], ids=str)
def test_a_bias_and_a_mask_mod_are_accurate_and_so_are_they_with_a_window_and_a_cap(lengths, make):
    q, k, v = make(2, *lengths)
    options = {
        "score_mod": mods.relative_bias(torch.randn(4, 129, device=DEVICE)),
        "mask_mod": mods.prefix_lm(torch.tensor([7, 33], device=DEVICE, dtype=torch.int32)),
    }
    check(q, k, v, **options)
    check(q, k, v, window_size=(77, 33), softcap=20.0, sink=torch.randn(4, device=DEVICE), **options)


# Hard numbers -------------------------------------------------------------------------------------------------------


@of_masks
@of_dims
def test_three_times_larger_inputs_are_accurate(dims, mask, make):
    q, k, v = ((3 * x.float()).to(x.dtype) for x in make(2, 213, 333, 4, 2, dims[0], head_dim_v=dims[1]))
    check(q, k, v, **MASKS[mask])


@pytest.mark.parametrize("softmax_scale", [1e-3, 0.5])
def test_the_softmax_scale_is_applied(softmax_scale, make):
    check(*make(2, 130, 260), softmax_scale=softmax_scale)


# Layouts ------------------------------------------------------------------------------------------------------------


def packed_qkv(make):
    return torch.randn(2, 150, 3, 4, 128, device=DEVICE).bfloat16().unbind(2)


def heads_before_rows(make):
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in make(2, 150, 260))


def expanded_heads(make):
    q, k, v = make(2, 150, 260, 4, 1)
    return q, k.expand(-1, -1, 4, -1), v.expand(-1, -1, 4, -1)


def expanded_batch(make):
    q, k, v = make(3, 150, 260)
    return q, k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1)


def aligned_slices_of_wide_rows(make):
    return tuple(torch.randn(2, 150, 4, 160, device=DEVICE).bfloat16()[..., 8:136] for _ in range(3))


def unaligned_slices_of_wide_rows(make):
    return tuple(torch.randn(2, 150, 4, 131, device=DEVICE).bfloat16()[..., 1:129] for _ in range(3))


def unaligned_offsets(make):
    return tuple(
        torch.empty(x.numel() + 1, device=DEVICE, dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in make(2, 150, 260)
    )


LAYOUTS = (
    packed_qkv,
    heads_before_rows,
    expanded_heads,
    expanded_batch,
    aligned_slices_of_wide_rows,
    unaligned_slices_of_wide_rows,
    unaligned_offsets,
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_any_strides_are_read_right_and_never_written(layout, make):
    q, k, v = layout(make)
    before = [x.clone() for x in (q, k, v)]
    check(q, k, v, causal=True)
    assert all(torch.equal(now, then) for now, then in zip((q, k, v), before, strict=True))


def heads_before_rows_of(out):
    return torch.randn_like(out.transpose(1, 2).contiguous()).transpose(1, 2)


def slices_of(out):
    return torch.randn(*out.shape[:3], out.shape[3] + 3, device=DEVICE).to(out.dtype)[..., 3:]


def columns_apart(out):
    return torch.randn_like(out.transpose(2, 3).contiguous()).transpose(2, 3)


def a_row_for_all(out):
    return torch.randn_like(out[:, :1]).expand(out.shape)


@pytest.mark.parametrize(
    "dout_of", [heads_before_rows_of, slices_of, columns_apart, a_row_for_all], ids=lambda make_dout: make_dout.__name__
)
def test_dout_of_any_strides_is_read_right(dout_of, make):
    q, k, v = make(2, 213, 333)
    dout = dout_of(q)
    before = dout.clone()
    check(q, k, v, dout, causal=True)
    assert torch.equal(dout, before)


@of_dims
def test_the_gradient_of_a_sum_whose_strides_are_all_zero_is_accurate(dims, make):
    q, k, v = make(2, 213, 333, head_dim=dims[0], head_dim_v=dims[1])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    fa3.flash_attn_func(*leaves, causal=True).sum().backward()
    dout = torch.ones(*q.shape[:3], dims[1], dtype=q.dtype, device=DEVICE)
    gradients = {name: x.grad for name, x in zip("qkv", leaves, strict=True)}
    assert_gradients_accurate(gradients, dout, None, q.detach(), k.detach(), v.detach(), causal=True)


@pytest.mark.parametrize("heads", [None, 6], ids=["as many", "grouped"])
def test_packed_calls_have_one_gradient(heads, make):
    if heads is None:
        qkv = torch.randn(2, 150, 3, 4, 128, device=DEVICE).bfloat16()
        q, k, v = qkv.unbind(2)
    else:
        qkv = torch.randn(2, 150, heads + 2 * 2, 128, device=DEVICE).bfloat16()
        q, k, v = qkv.split([heads, 2, 2], dim=2)
    qkv.requires_grad_()
    out = fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=heads)
    dout = torch.randn_like(out)
    poison(qkv.detach().flatten(2, -2), k, v)
    (dqkv,) = torch.autograd.grad(out, qkv, dout)
    parts = dqkv.unbind(2) if heads is None else dqkv.split([heads, 2, 2], dim=2)
    assert_gradients_accurate(
        dict(zip("qkv", parts, strict=True)), dout, None, q.detach(), k.detach(), v.detach(), causal=True
    )


# Repeats --------------------------------------------------------------------------------------------------------------


def count_of_differences(repeats, problem, dout, **options):
    """Elements of gradients that differ from those of the first call, counted on the GPU."""
    first, _ = gradients_of(*problem, dout, deterministic=True, **options)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(repeats - 1):
        again, _ = gradients_of(*problem, dout, deterministic=True, **options)
        for name, gradient in again.items():
            different += (gradient != first[name]).sum()
    return first, different.item()


@of_masks
@of_dims
def test_in_a_fixed_order_20_repeats_agree_bitwise_and_are_accurate(dims, mask, make):
    q, k, v = make(2, 700, 900, 4, 2, dims[0], head_dim_v=dims[1])
    dout = torch.randn(*q.shape[:3], dims[1], device=DEVICE).to(q.dtype)
    gradients, different = count_of_differences(20, (q, k, v), dout, **MASKS[mask])
    assert different == 0
    assert_gradients_accurate(gradients, dout, None, q, k, v, **MASKS[mask])


def test_in_a_fixed_order_200_repeats_that_fill_the_card_agree_bitwise(make):
    q, k, v = make(4, 1500, 1500, 16, 8)
    _, different = count_of_differences(200, (q, k, v), torch.randn_like(q), causal=True)
    assert different == 0


def test_pytorchs_own_switch_asks_for_a_fixed_order(make):
    q, k, v = make(2, 700, 900, 4, 2)
    dout = torch.randn_like(q)
    asked, _ = gradients_of(q, k, v, dout, causal=True, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        switched, _ = gradients_of(q, k, v, dout, causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(switched[name], gradient) for name, gradient in asked.items())


def test_200_repeats_in_no_fixed_order_differ_by_one_rounding_of_dq_at_most(make):
    q, k, v = make(2, 1000, 1100, 8, 2)
    dout = torch.randn_like(q)
    first, _ = gradients_of(q, k, v, dout, causal=True)
    different, farthest = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
    for _ in range(199):
        again, _ = gradients_of(q, k, v, dout, causal=True)
        different += (again["k"] != first["k"]).sum() + (again["v"] != first["v"]).sum()
        farthest = torch.maximum(farthest, (again["q"].float() - first["q"].float()).abs().max())
    assert different.item() == 0, "dk and dv are sums of one block each"
    largest = first["q"].abs().max().item()
    assert farthest.item() <= torch.finfo(q.dtype).eps * 2.0 ** math.floor(math.log2(largest))
    assert_gradients_accurate(first, dout, None, q, k, v, causal=True)


def test_what_has_no_kernels_is_left_to_the_tiled_backend_with_a_warning_and_is_accurate(make):
    q, k, v = make(1, 256, 256, head_dim=64, head_dim_v=256)
    qv = torch.randn(*q.shape[:3], 256, device=DEVICE).to(q.dtype)
    with pytest.warns(UserWarning, match="qv beside"):
        gradients, dout = gradients_of(q, k, v, qv=qv)
    assert_gradients_accurate(gradients, dout, None, q, k, v, qv=qv)
