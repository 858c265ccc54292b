"""q, k and v in one tensor: read where they lie, and one gradient that is written once."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fa3
from fa3 import backends, interface, ops, schemas
from fa3.backends import tiled
from fa3.mods import alibi, alibi_slopes
from fa3.options import Options

SIGNATURE = (
    "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False, "
    "return_lse=False, s_aux=None, sink=None, score_mod=None, mask_mod=None, block_mask=None"
)

#: How q, k and v may lie in one tensor: its shape, num_heads_q, and its parts.
PACKINGS = {
    "three of a kind": ((2, 9, 3, 4, 16), None),
    "three of a kind, told": ((2, 9, 3, 4, 16), 4),
    "heads in a row": ((2, 9, 8, 16), 4),
    "one key head": ((2, 9, 6, 16), 4),
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "options": {"window_size": (4, 2), "softcap": 2.0, "deterministic": True, "sm_margin": 2},
    "mods": {"causal": True, "score_mod": alibi(alibi_slopes(4)), "sink": torch.tensor([0.5, -1.0, 3.0, 0.0])},
}


def packed(packing, dtype=torch.float64, requires_grad=False):
    shape, num_heads_q = PACKINGS[packing]
    return torch.randn(shape, dtype=dtype, requires_grad=requires_grad), num_heads_q


def parts(qkv, num_heads_q):
    if qkv.dim() == 5:
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    heads_kv = (qkv.shape[2] - num_heads_q) // 2
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:-heads_kv], qkv[:, :, -heads_kv:]


def test_names_order_and_defaults_are_those_that_users_rely_on():
    parameters = inspect.signature(fa3.flash_attn_qkvpacked_func).parameters.values()
    written = (p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    assert ", ".join(written) == SIGNATURE


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packed_call_gives_what_its_parts_give(packing, options, requires_grad):
    qkv, num_heads_q = packed(packing, requires_grad=requires_grad)
    expected = fa3.flash_attn_func(*parts(qkv, num_heads_q), **options, return_lse=True)
    for name in ("return_lse", "return_attn_probs"):
        results = fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=num_heads_q, **options, **{name: True})
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    out = fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=num_heads_q, **options)
    assert torch.equal(out, expected[0])
    assert out.requires_grad is requires_grad


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_its_gradient_is_that_of_its_parts(packing, options):
    qkv, num_heads_q = packed(packing, requires_grad=True)
    inputs = [qkv]
    if "sink" in options:
        sink = options["sink"].double().requires_grad_()
        options, inputs = {**options, "sink": sink}, [qkv, sink]
    gradients, expected = (
        torch.autograd.grad(out.square().sum() + lse.sum(), inputs)
        for out, lse in (
            fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=num_heads_q, **options, return_lse=True),
            fa3.flash_attn_func(*parts(qkv, num_heads_q), **options, return_lse=True),
        )
    )
    for one, other in zip(gradients, expected, strict=True):
        assert torch.equal(one, other)


def test_a_sink_may_be_trained_beside_a_frozen_qkv():
    qkv, _ = packed("three of a kind")
    sink = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(fa3.flash_attn_qkvpacked_func(qkv, sink=sink).sum(), sink)
    (expected,) = torch.autograd.grad(fa3.flash_attn_func(*parts(qkv, None), sink=sink).sum(), sink)
    assert torch.equal(gradient, expected)


class Log(TorchDispatchMode):
    """Names of all operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["plain", "options"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_its_gradient_is_made_once_and_the_backend_writes_into_it(packing, options, monkeypatch):
    seen = []

    def backend(dout, dlse, q, k, v, out, lse, softmax_scale, causal, options, into):
        assert all(torch.isfinite(x).all() for x in (q, k, v, out, lse))
        seen.append(into)
        for number, gradient in enumerate(into):
            gradient.fill_(number + 1)
        return *into, None, None

    monkeypatch.setattr(backends, "backward_for", lambda *call: backend)
    qkv, num_heads_q = packed(packing, requires_grad=True)
    out = fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=num_heads_q, **options)
    with Log() as log:
        (gradient,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert gradient.is_contiguous()
    (into,) = seen
    for number, (one, expected) in enumerate(zip(into, parts(gradient, num_heads_q), strict=True)):
        assert one.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr()
        assert (one.shape, one.stride(), one.storage_offset()) == (
            expected.shape, expected.stride(), expected.storage_offset(),
        )  # fmt: skip
        assert (expected == number + 1).all()
    attention = [name for name in log.names if name.startswith("fa3::")]
    assert attention == ["fa3::backward_packed" + (".options" if options else "")]
    for name in ("cat", "stack", "select_backward", "slice_backward", "split_backward", "zeros", "add"):
        assert not any(name in called for called in log.names), log.names


@pytest.mark.parametrize("packing", PACKINGS)
def test_without_a_gradient_the_backend_is_called_with_views_and_nothing_else(packing, monkeypatch):
    calls = []

    def backend(*arguments):
        calls.append(arguments)
        return "out", "lse"

    monkeypatch.setattr(interface, "forward_for", lambda q: backend)
    qkv, num_heads_q = packed(packing)
    assert fa3.flash_attn_qkvpacked_func(qkv, 0.5, True, num_heads_q=num_heads_q) == "out"
    ((*views, softmax_scale, causal, with_lse),) = calls
    assert (softmax_scale, causal, with_lse) == (0.5, True, False)
    for view, expected in zip(views, parts(qkv, num_heads_q), strict=True):
        assert view.data_ptr() == expected.data_ptr()
        assert (view.shape, view.stride()) == (expected.shape, expected.stride())


def test_any_strides_but_the_last_are_taken_and_the_gradient_is_dense():
    wide = torch.randn(9, 3, 2, 4, 40, dtype=torch.float64, requires_grad=True)
    qkv = wide.permute(2, 0, 1, 3, 4)[..., 7:23]
    (gradient,) = torch.autograd.grad(fa3.flash_attn_qkvpacked_func(qkv, causal=True).square().sum(), wide)
    (expected,) = torch.autograd.grad(fa3.flash_attn_func(*parts(qkv, None), causal=True).square().sum(), wide)
    assert torch.equal(gradient, expected)


def test_an_empty_qkv_has_an_empty_gradient():
    qkv = torch.randn(2, 0, 3, 4, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(fa3.flash_attn_qkvpacked_func(qkv).sum(), qkv)
    assert gradient.shape == qkv.shape


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "num_heads_q", "error", "words"),
    [
        ((2, 9, 16), None, ValueError, r"^qkv has 3 dims, shape \(2, 9, 16\)"),
        ((2, 9, 4, 4, 16), None, ValueError, r"^qkv has shape \(2, 9, 4, 4, 16\): with 5 dims it must be"),
        ((2, 9, 3, 4, 16), 2, ValueError, r"^num_heads_q=2: qkv has 4 query heads"),
        ((2, 9, 12, 16), None, TypeError, r"^num_heads_q is None"),
        ((2, 9, 12, 16), 5, ValueError, r"^num_heads_q=5: qkv has 12 heads in all"),
        ((2, 9, 12, 16), 14, ValueError, r"^num_heads_q=14: qkv has 12 heads in all"),
        ((2, 9, 12, 16), 12, ValueError, r"^num_heads_q=12: qkv has 12 heads in all, .* heads_kv at least 1"),
        ((2, 9, 12, 16), -2, ValueError, r"^num_heads_q=-2: allowed are 0 and up"),
        ((2, 9, 12, 16), 4.0, TypeError, r"^num_heads_q=4\.0: must be an int"),
        ((2, 9, 12, 16), True, TypeError, r"^num_heads_q=True: must be an int"),
        ((2, 9, 11, 16), 5, ValueError, "q has 5 heads, k and v have 3"),
        ((2, 9, 3, 4, 12), None, ValueError, "head_dim.* is 12"),
    ],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_qkv_that_is_none_is_named(shape, num_heads_q, error, words, requires_grad):
    with pytest.raises(error, match=words):
        fa3.flash_attn_qkvpacked_func(torch.randn(shape, requires_grad=requires_grad), num_heads_q=num_heads_q)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"qkv": [1.0]}, TypeError, r"^qkv must be a torch\.Tensor, not list"),
        ({"softmax_scale": "1"}, TypeError, r"^softmax_scale='1': must be a float"),
        ({"causal": 1}, TypeError, "^causal=1: must be True or False"),
        ({"deterministic": 1}, TypeError, "^deterministic=1: must be True or False"),
        ({"q_descale": torch.ones(2, 4)}, TypeError, "^q_descale is given, and q has dtype"),
        ({"sink": torch.ones(3)}, ValueError, r"^sink has shape \(3,\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_bad_arguments_are_named_either_way(given, error, words, requires_grad):
    qkv, _ = packed("three of a kind", requires_grad=requires_grad)
    with pytest.raises(error, match=words):
        fa3.flash_attn_qkvpacked_func(**{"qkv": qkv, **given})


def test_a_number_of_heads_may_be_of_any_type_that_registers_as_one():
    qkv, num_heads_q = packed("one key head", requires_grad=True)
    out = fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=np.int64(num_heads_q))
    assert torch.equal(out, fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=num_heads_q))


def test_derivatives_that_do_not_exist_are_refused():
    qkv, _ = packed("three of a kind", requires_grad=True)
    (gradient,) = torch.autograd.grad(fa3.flash_attn_qkvpacked_func(qkv).sum(), qkv, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="dual tensor"):
        fa3.flash_attn_qkvpacked_func(forward_ad.make_dual(qkv, torch.ones_like(qkv)))
    slopes = alibi_slopes(4).requires_grad_()
    with pytest.raises(NotImplementedError, match=r"score_mod\.aux\[0\] requires a gradient"):
        fa3.flash_attn_qkvpacked_func(qkv, score_mod=alibi(slopes))


# As PyTorch's tools see it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_options", [False, True])
@pytest.mark.parametrize("packing", ["three of a kind", "one key head"])
def test_packed_operators_pass_opcheck(packing, with_options):
    qkv, num_heads_q = packed(packing)
    options = schemas.flatten(Options(3, 2, sink=torch.randn(4), deterministic=True)) if with_options else ()
    overload = "options" if with_options else "default"
    forward, forward_lse, backward = (
        getattr(getattr(torch.ops.fa3, f"{name}_packed"), overload) for name in ("forward", "forward_lse", "backward")
    )
    for requires_grad in (False, True):
        arguments = (qkv.detach().requires_grad_(requires_grad), num_heads_q, None, False, *options)
        torch.library.opcheck(forward, arguments)
        torch.library.opcheck(forward_lse, arguments)
    out, lse = forward_lse(qkv, num_heads_q, None, False, *options)
    for dlse in (None, torch.randn_like(lse)):
        rest = (torch.randn_like(out), dlse, qkv, num_heads_q, out, lse, None, False, *options)
        torch.library.opcheck(backward, rest)


@pytest.mark.parametrize("options", [OPTIONS["causal"], OPTIONS["mods"]], ids=["causal", "mods"])
def test_torch_compile_needs_no_graph_break_and_keeps_one_gradient(options):
    torch._dynamo.reset()

    def attend(x):
        qkv = (x * 2).view(2, 9, 3, 4, 16)
        out, lse = fa3.flash_attn_qkvpacked_func(qkv, **options, return_lse=True)
        return out.relu(), lse + 1

    x = torch.randn(2, 9, 192, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results, expected = compiled(x), attend(x)
    (gradient,), (by_eager,) = (
        torch.autograd.grad(out.square().sum() + lse.sum(), x) for out, lse in (results, expected)
    )
    for one, other in zip((*results, gradient), (*expected, by_eager), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradient(use_reentrant):
    qkv, _ = packed("three of a kind", requires_grad=True)
    (expected,) = torch.autograd.grad(fa3.flash_attn_qkvpacked_func(qkv).square().sum(), qkv)
    checkpoint(fa3.flash_attn_qkvpacked_func, qkv, use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(qkv.grad, expected)


def test_gradients_of_packed_tensors_pass_gradcheck():
    qkv = torch.randn(1, 6, 4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: fa3.flash_attn_qkvpacked_func(x, causal=True, num_heads_q=2, return_lse=True), qkv, fast_mode=True
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_and_torch_func_grad_of_packed_tensors():
    qkv, _ = packed("three of a kind")
    stacked = torch.stack([qkv, qkv + 1])

    def loss(x):
        return fa3.flash_attn_qkvpacked_func(x).square().sum()

    mapped = torch.vmap(torch.func.grad(loss))(stacked)
    for one, x in zip(mapped, stacked, strict=True):
        x = x.clone().requires_grad_()
        torch.testing.assert_close(one, torch.autograd.grad(loss(x), x)[0])


def test_a_negative_view_is_packed_with_its_sign():
    qkv, _ = packed("three of a kind")
    x, negative = (-qkv).requires_grad_(), torch._neg_view(qkv).requires_grad_()
    assert negative.is_neg()
    results = [fa3.flash_attn_qkvpacked_func(one, causal=True) for one in (x, negative)]
    assert torch.equal(*results)
    gradients = [
        torch.autograd.grad(out.square().sum(), one)[0] for out, one in zip(results, (x, negative), strict=True)
    ]
    assert torch.equal(*gradients)


def test_a_meta_tensor_has_a_gradient_of_its_shape():
    qkv = torch.empty(2, 9, 3, 4, 16, device="meta", requires_grad=True)
    fa3.flash_attn_qkvpacked_func(qkv).sum().backward()
    assert qkv.grad.shape == qkv.shape


def test_the_operators_stand_for_what_they_are_called():
    qkv, num_heads_q = packed("one key head")
    q, k, v = parts(qkv, num_heads_q)
    out, lse = tiled.forward(q, k, v, None, True, True)
    assert torch.equal(ops.forward_packed(qkv, num_heads_q, None, True), out)
    dqkv = ops.backward_packed(out, lse, qkv, num_heads_q, out, lse, None, True)
    expected = tiled.backward(out, lse, q, k, v, out, lse, None, True)
    assert torch.equal(dqkv, torch.cat(expected[:3], dim=2))
    *_, dsink, dqv = ops.backward_packed_options(out, lse, qkv, num_heads_q, out, lse, None, True)
    assert dsink.shape == dqv.shape == (0,)
