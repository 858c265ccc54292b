"""The public function: its signature, its options, and the two ways a call can take."""

import inspect
import re
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fa3
from fa3 import backends, interface
from fa3.backends import tiled

SIGNATURE = (
    "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False, return_lse=False, s_aux=None, sink=None, score_mod=None, mask_mod=None, "
    "block_mask=None"
)

TOO_LARGE = 2**2000


@pytest.fixture
def qkv():
    return tuple(torch.randn(2, 6, 2, 16) for _ in range(3))


def test_names_order_and_defaults_are_those_that_users_rely_on():
    parameters = inspect.signature(fa3.flash_attn_func).parameters.values()
    written = (p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    assert ", ".join(written) == SIGNATURE


def test_the_result_is_out_alone_unless_the_lse_is_asked_for(qkv):
    out = fa3.flash_attn_func(*qkv)
    assert isinstance(out, torch.Tensor)
    for name in ("return_lse", "return_attn_probs"):
        again, lse = fa3.flash_attn_func(*qkv, **{name: True})
        assert torch.equal(out, again)
        torch.testing.assert_close(lse.double(), fa3.reference(*qkv)[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "hints",
    [
        {"pack_gqa": True},
        {"pack_gqa": False},
        {"deterministic": True},
        {"sm_margin": 8},
        {"num_splits": 0},
        {"window_size": [-1, -1]},
        {"softcap": 0},
    ],
)
def test_hints_change_nothing(qkv, hints):
    assert torch.equal(fa3.flash_attn_func(*qkv, **hints), fa3.flash_attn_func(*qkv))


@pytest.mark.parametrize(
    "options",
    [{"causal": True, "window_size": (-1, 0)}, {"window_size": (-1, 0)}, {"causal": True, "window_size": (-1, 5)}],
)
def test_a_window_that_is_the_causal_mask_is_the_causal_mask(qkv, options):
    assert torch.equal(fa3.flash_attn_func(*qkv, **options), fa3.flash_attn_func(*qkv, causal=True))


def test_an_option_that_is_not_built_is_named(qkv):
    with pytest.raises(NotImplementedError, match="^num_splits.*is not built yet"):
        fa3.flash_attn_func(*qkv, num_splits=2)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("causal", 1, TypeError),
        ("causal", 0, TypeError),
        ("causal", None, TypeError),
        ("causal", "yes", TypeError),
        ("causal", np.bool_(True), TypeError),
        ("return_lse", 1, TypeError),
        ("return_lse", "yes", TypeError),
        ("return_attn_probs", "yes", TypeError),
        ("return_attn_probs", 0, TypeError),
        ("deterministic", "yes", TypeError),
        ("deterministic", 1, TypeError),
        ("pack_gqa", "yes", TypeError),
        ("pack_gqa", 1, TypeError),
        ("num_splits", -1, ValueError),
        ("num_splits", 1.5, TypeError),
        ("num_splits", 1.0, TypeError),
        ("num_splits", True, TypeError),
        ("num_splits", np.ones(2, int), TypeError),
        ("window_size", 3, TypeError),
        ("window_size", np.array([-1, -1]), TypeError),
        ("window_size", (1, 2, 3), ValueError),
        ("window_size", (-2, -1), ValueError),
        ("window_size", (0.5, -1), TypeError),
        ("window_size", (-1.0, -1.0), TypeError),
        ("attention_chunk", -1, ValueError),
        ("attention_chunk", "4", TypeError),
        ("attention_chunk", False, TypeError),
        ("attention_chunk", 0.0, TypeError),
        ("softcap", -1.0, ValueError),
        ("softcap", float("nan"), ValueError),
        ("softcap", "30", TypeError),
        ("softcap", False, TypeError),
        ("softcap", np.zeros(2), TypeError),
        ("sm_margin", -1, ValueError),
        ("sm_margin", 0.0, TypeError),
        ("softcap", 1e-60, ValueError),
        ("softmax_scale", TOO_LARGE, ValueError),
        ("softmax_scale", 1e300, ValueError),
        ("softmax_scale", 1e-60, ValueError),
        ("softmax_scale", True, TypeError),
        ("softmax_scale", np.array(0.5), TypeError),
    ],
    ids=lambda value: repr(value)[:20],
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_bad_option_is_named_with_its_value(qkv, name, value, error, grad):
    qkv[0].requires_grad_(grad)
    # A window is named by its bad side, a scale of 600 digits without them.
    shown = "" if isinstance(value, tuple) or value is TOO_LARGE else re.escape(f"={value!r}")
    with pytest.raises(error, match=rf"^{name}.*{shown}"):
        fa3.flash_attn_func(*qkv, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_splits", np.int64(1)),
        ("attention_chunk", np.int32(0)),
        ("sm_margin", np.int64(4)),
        ("softcap", np.float32(0.0)),
        ("softcap", 0),
        ("window_size", (np.int64(-1), np.int64(-1))),
        ("softmax_scale", np.float32(0.25)),
        ("softmax_scale", Fraction(1, 4)),
    ],
    ids=repr,
)
def test_a_number_may_be_of_any_type_that_registers_as_one(qkv, name, value):
    assert torch.equal(fa3.flash_attn_func(*qkv, **{name: value}), fa3.flash_attn_func(*qkv))


def test_float64_inputs_have_scales_beyond_float32(qkv):
    q, k, v = (x.double() for x in qkv)
    out = fa3.flash_attn_func(q * 1e-60, k, v, softmax_scale=1e60)
    torch.testing.assert_close(out, fa3.reference(q, k, v, softmax_scale=1.0)[0])


@pytest.mark.parametrize("grad", [False, True])
def test_bad_tensors_and_scales_are_complained_about_on_both_ways(qkv, grad):
    q, k, v = (x.requires_grad_(grad) for x in qkv)
    with pytest.raises(TypeError, match=r"k must be a torch\.Tensor, not list"):
        fa3.flash_attn_func(q, [1.0], v)
    with pytest.raises(ValueError, match="q has 3 dims"):
        fa3.flash_attn_func(q[0], k, v)
    with pytest.raises(TypeError, match="must be the same"):
        fa3.flash_attn_func(q, k.half(), v)
    with pytest.raises(ValueError, match="softmax_scale=nan"):
        fa3.flash_attn_func(q, k, v, softmax_scale=float("nan"))
    with pytest.raises(TypeError, match="softmax_scale='1'"):
        fa3.flash_attn_func(q, k, v, softmax_scale="1")


class OperatorLog(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operator(qkv):
    with OperatorLog() as log:
        fa3.flash_attn_func(*qkv)
        fa3.flash_attn_func(*qkv, return_lse=True)
    assert [name for name in log.names if name.startswith("fa3::")] == ["fa3::forward", "fa3::forward_lse"]


def test_the_profiler_sees_the_operator(qkv):
    with torch.profiler.profile() as profile:
        fa3.flash_attn_func(*qkv)
    assert "fa3::forward" in [event.key for event in profile.key_averages()]


def test_a_jit_trace_records_the_operator(qkv):
    traced = torch.jit.trace(lambda q, k, v: fa3.flash_attn_func(q, k, v), qkv, check_trace=False)
    others = tuple(x + 1 for x in qkv)
    torch.testing.assert_close(traced(*others), fa3.flash_attn_func(*others))


def test_a_subclass_of_tensor_goes_through_the_operator(qkv):
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    fa3.flash_attn_func(qkv[0].as_subclass(Watched), *qkv[1:])
    assert torch.ops.fa3.forward.default in seen


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_maps_over_problems(qkv):
    stacked = tuple(torch.stack([x, x + 1, x * 2]) for x in qkv)
    mapped = torch.vmap(fa3.flash_attn_func)(*stacked)
    for i in range(3):
        torch.testing.assert_close(mapped[i], fa3.flash_attn_func(*(x[i] for x in stacked)))


@pytest.mark.parametrize("return_lse", [False, True])
def test_the_plain_way_and_the_operator_agree(qkv, return_lse):
    plain = fa3.flash_attn_func(*qkv, causal=True, return_lse=return_lse)
    with OperatorLog():
        by_operator = fa3.flash_attn_func(*qkv, causal=True, return_lse=return_lse)
    for one, other in zip(*((x if return_lse else (x,)) for x in (plain, by_operator)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("return_lse", [False, True])
def test_an_input_that_requires_grad_makes_a_graph(qkv, which, return_lse):
    qkv[which].requires_grad_()
    results = fa3.flash_attn_func(*qkv, return_lse=return_lse)
    for result in results if return_lse else (results,):
        assert result.requires_grad
        (gradient,) = torch.autograd.grad(result.sum(), qkv[which], retain_graph=True)
        assert gradient.shape == qkv[which].shape


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_nothing_is_recorded(qkv, guard):
    qkv[0].requires_grad_()
    with guard():
        out = fa3.flash_attn_func(*qkv)
    assert not out.requires_grad


def test_what_sdpa_leaves_to_tiled_has_gradients(qkv, monkeypatch):
    monkeypatch.setattr(backends, "for_device", lambda device: "sdpa")
    q, k, v = (x.requires_grad_() for x in qkv)
    fa3.flash_attn_func(q, k, v).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_second_derivative_is_refused(qkv, linear, which):
    inputs = [x.requires_grad_() for x in qkv]
    out = fa3.flash_attn_func(*inputs)
    # The gradient of a linear loss is a constant: only q, k and v make the gradient depend on something.
    loss = out.sum() if linear else out.square().sum()
    (gradient,) = torch.autograd.grad(loss, inputs[which], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*create_graph"):
        (gradient.square().sum() + inputs[which].sum()).backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(qkv, use_reentrant):
    inputs = [x.requires_grad_() for x in qkv]
    expected = torch.autograd.grad(fa3.flash_attn_func(*inputs).square().sum(), inputs)
    checkpoint(fa3.flash_attn_func, *inputs, use_reentrant=use_reentrant).square().sum().backward()
    for one, other in zip(inputs, expected, strict=True):
        assert torch.equal(one.grad, other)


def loss_of(attend):
    return lambda q, k, v: attend(q, k, v).square().sum()


def oracle(q, k, v):
    return fa3.reference(q, k, v)[0]


def test_torch_func_grad_is_the_gradient(qkv):
    inputs = [x.double() for x in qkv]
    gradients = torch.func.grad(loss_of(fa3.flash_attn_func), (0, 1, 2))(*inputs)
    torch.testing.assert_close(gradients, torch.func.grad(loss_of(oracle), (0, 1, 2))(*inputs))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_jacrev_is_the_jacobian(qkv):
    inputs = [x[:1, :3].double() for x in qkv]
    jacobians = torch.func.jacrev(fa3.flash_attn_func, (0, 1, 2))(*inputs)
    torch.testing.assert_close(jacobians, torch.func.jacrev(oracle, (0, 1, 2))(*inputs))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_and_torch_func_grad_nest_either_way(qkv):
    stacked = [torch.stack([x, x + 1, x * 2]).double() for x in qkv]
    each = [torch.func.grad(loss_of(oracle))(*(x[i] for x in stacked)) for i in range(3)]
    mapped = torch.func.vmap(torch.func.grad(loss_of(fa3.flash_attn_func)))(*stacked)
    of_mapped = torch.func.grad(loss_of(torch.func.vmap(fa3.flash_attn_func)))(*stacked)
    torch.testing.assert_close(mapped, torch.stack(each))
    torch.testing.assert_close(of_mapped, torch.stack(each))


@pytest.mark.parametrize("linear", [False, True])
def test_nested_torch_func_grads_are_refused(qkv, linear):
    q, k, v = qkv

    def first(q):
        def loss(q):
            out = fa3.flash_attn_func(q, k, v)
            return out.sum() if linear else out.square().sum()

        return torch.func.grad(loss)(q).sum()

    with pytest.raises(NotImplementedError, match=r"no second derivative.*torch\.func"):
        torch.func.grad(first)(q)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*torch\.func"):
        first(q.requires_grad_()).backward()


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_forward_mode_derivative_is_refused(qkv, return_lse):
    with forward_ad.dual_level():
        q = forward_ad.make_dual(qkv[0], torch.ones_like(qkv[0]))
        with pytest.raises(NotImplementedError, match="dual tensor"):
            fa3.flash_attn_func(q, *qkv[1:], return_lse=return_lse)
        fa3.flash_attn_func(*qkv, return_lse=return_lse)


def test_the_plain_way_calls_the_backend_and_nothing_else(qkv, monkeypatch):
    calls = []

    def backend(*arguments):
        calls.append(arguments)
        return "out", "lse"

    monkeypatch.setattr(interface, "forward_for", lambda q: backend)
    assert fa3.flash_attn_func(*qkv, causal=True) == "out"
    assert fa3.flash_attn_func(*qkv, 0.5, return_lse=True) == ("out", "lse")
    assert calls == [(*qkv, None, True, False), (*qkv, 0.5, False, True)]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_negative_view_reaches_the_backend_with_its_sign(qkv, monkeypatch, which):
    expected = fa3.flash_attn_func(*(-x if i == which else x for i, x in enumerate(qkv)))

    def backend(*arguments):
        assert not any(x.is_neg() for x in arguments[:3])
        return tiled.forward(*arguments)

    for module in (interface, backends):
        monkeypatch.setattr(module, "forward_for", lambda q: backend)
    inputs = [torch._neg_view(x) if i == which else x for i, x in enumerate(qkv)]
    assert inputs[which].is_neg()
    assert torch.equal(fa3.flash_attn_func(*inputs), expected)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("forced", [None, "hopper"])
def test_meta_tensors_give_shapes_at_once(grad, forced, monkeypatch):
    if forced:
        monkeypatch.setenv("FA3_BACKEND", forced)
    q, k, v = (torch.empty(1, 200_000, heads, 64, device="meta", requires_grad=grad) for heads in (8, 2, 2))
    start = time.perf_counter()
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    if grad:
        out.sum().backward()
        assert q.grad.shape == q.shape
    assert time.perf_counter() - start < 5
    assert out.is_meta
    assert lse.is_meta
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (1, 8, 200_000), torch.float32)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_nested_tensor_is_refused_by_its_layout(qkv, layout, which):
    inputs = list(qkv)
    inputs[which] = torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (4, 6)], layout=layout)
    with pytest.raises(ValueError, match=rf"^{'qkv'[which]} is a nested tensor, layout {layout}"):
        fa3.flash_attn_func(*inputs)


def test_a_nested_tensor_is_refused_where_the_backend_reads_shapes_first(qkv, monkeypatch):
    monkeypatch.setattr(interface, "forward_for", lambda q: lambda q, *rest: q.shape)
    nested = torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (4, 6)])
    with pytest.raises(ValueError, match=r"^q is a nested tensor, layout torch\.strided"):
        fa3.flash_attn_func(nested, *qkv[1:])


def test_import_leaves_the_compiler_and_the_terminal_alone():
    code = "import sys, fa3; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    environment = {"PYTHONPATH": str(Path(fa3.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    loaded = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert "'torch'" in loaded.stdout
    for name in ("cutlass", "rich", "platformdirs", "tvm_ffi", "matplotlib"):
        assert f"'{name}'" not in loaded.stdout
