"""The operators: what torch.compile, torch.export and opcheck need of them."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3
from fa3 import ops


def tensors(seqlen_q=9, dtype=torch.float64, requires_grad=False):
    shapes = ((2, seqlen_q, 4, 16), (2, 11, 2, 16), (2, 11, 2, 8))
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", [ops.forward, ops.forward_lse], ids=str)
def test_forward_operators_pass_opcheck(operator, dtype, causal):
    torch.library.opcheck(operator, (*tensors(dtype=dtype), None, causal))


@pytest.mark.parametrize("operator", [ops.forward, ops.forward_lse], ids=str)
def test_forward_operators_pass_opcheck_with_gradients(operator):
    torch.library.opcheck(operator, (*tensors(requires_grad=True), 0.3, True))


@pytest.mark.parametrize("with_dlse", [False, True])
def test_the_backward_operator_passes_opcheck(with_dlse):
    q, k, v = tensors()
    out, lse = ops.forward_lse(q, k, v, None, True)
    dlse = torch.randn_like(lse) if with_dlse else None
    torch.library.opcheck(ops.backward, (torch.randn_like(out), dlse, q, k, v, out, lse, None, True))


def test_the_backward_operator_refuses_to_be_differentiated():
    q, k, v = tensors(requires_grad=True)
    with torch.no_grad():
        out, lse = ops.forward_lse(q, k, v, None, True)
    gradients = ops.backward(out, None, q, k, v, out, lse, None, True)
    for gradient in gradients:
        with pytest.raises(NotImplementedError, match="no second derivative"):
            gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_fakes_have_the_shapes_dtypes_and_strides_of_the_real_results(dtype):
    real = tensors(dtype=dtype)
    out, lse = ops.forward_lse(*real, None, True)
    real_results = (out, lse, *ops.backward(out, lse, *real, out, lse, None, True))
    meta = tuple(x.to("meta") for x in real)
    fake_out, fake_lse = ops.forward_lse(*meta, None, True)
    fake_results = (fake_out, fake_lse, *ops.backward(fake_out, fake_lse, *meta, fake_out, fake_lse, None, True))
    for one, other in zip(real_results, fake_results, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


BAD_TENSORS = {
    "ranks": lambda q, k, v: (q[0], k, v),
    "a mix of dtypes": lambda q, k, v: (q, k.half(), v),
    "a dtype without attention": lambda q, k, v: (q.int(), k.int(), v.int()),
    "heads that do not divide": lambda q, k, v: (q[:, :, :3], k, v),
    "head dims that differ": lambda q, k, v: (q[..., :8], k, v),
    "a head dim that is no multiple of 8": lambda q, k, v: (q[..., :12], k[..., :12], v),
    "batches that differ": lambda q, k, v: (q[:1], k, v),
    "keys without values": lambda q, k, v: (q, k, v[:, :5]),
    "a last stride of 2": lambda q, k, v: (q[..., ::2], k[..., :8], v),
}


@pytest.mark.parametrize("spoil", BAD_TENSORS.values(), ids=BAD_TENSORS)
@pytest.mark.parametrize("return_lse", [False, True])
def test_fakes_complain_as_the_kernels_do(spoil, return_lse):
    def complaint():
        with pytest.raises((TypeError, ValueError)) as caught:
            fa3.flash_attn_func(*spoil(*tensors()), return_lse=return_lse)
        return caught.type, str(caught.value)

    expected = complaint()
    with FakeTensorMode():
        assert complaint() == expected


def test_the_fake_of_backward_complains_too():
    q, k, v = (x.to("meta") for x in tensors())
    out, lse = ops.forward_lse(q, k, v, None, True)
    with pytest.raises(TypeError, match="must be the same"):
        ops.backward(out, None, q, k.half(), v, out, lse, None, True)


def test_one_dynamic_graph_serves_all_shapes():
    torch._dynamo.reset()
    graphs = CompileCounter()

    def attend(q, k, v):
        return fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend=graphs, dynamic=True)
    for batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v in (
        (3, 9, 11, 4, 2, 16, 24),  # Sizes that are equal here would stay so.
        (3, 7, 30, 6, 3, 72, 80),
        (5, 40, 12, 10, 5, 128, 64),
        (4, 8, 6, 21, 7, 32, 512),
    ):
        shapes = (
            (batch, seqlen_q, heads_q, head_dim),
            (batch, seqlen_k, heads_kv, head_dim),
            (batch, seqlen_k, heads_kv, head_dim_v),
        )
        inputs = [torch.randn(shape) for shape in shapes]
        for one, other in zip(compiled(*inputs), attend(*inputs), strict=True):
            torch.testing.assert_close(one, other)
    assert graphs.frame_count == 1


def test_a_dynamic_graph_complains_about_bad_sizes():
    torch._dynamo.reset()
    compiled = torch.compile(fa3.flash_attn_func, fullgraph=True, backend="eager", dynamic=True)
    q, k, v = tensors()
    with pytest.raises(ValueError, match="q has 3 heads, k and v have 2"):
        compiled(q[:, :, :3], k, v)


BAD_OPTIONS = [
    ("q_descale", 1.0, NotImplementedError),
    ("softcap", -1.0, ValueError),
    ("num_splits", 3, NotImplementedError),
    ("attention_chunk", -4, ValueError),
    ("sink", "1", TypeError),
    ("score_mod", abs, TypeError),
    ("softmax_scale", True, TypeError),
    ("softmax_scale", "1", TypeError),
    ("softmax_scale", -1.0, ValueError),
    ("causal", 1, TypeError),
    ("q", None, TypeError),
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("name", "value", "error"), BAD_OPTIONS)
def test_compiled_calls_complain_as_eager_ones_do(name, value, error, dynamic):
    def attend(arguments):
        return fa3.flash_attn_func(**arguments)

    arguments = {**dict(zip("qkv", tensors(), strict=True)), name: value}
    torch._dynamo.reset()
    with pytest.raises(error, match=rf"^{name}\b"):
        torch.compile(attend, backend="eager", dynamic=dynamic)(arguments)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"{error.__name__}.*{name}\b"):
        torch.compile(attend, backend="eager", dynamic=dynamic, fullgraph=True)(arguments)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("scale", [0.5, 2, np.float32(0.5)], ids=repr)
def test_compiled_calls_take_the_scales_that_eager_ones_take(scale, dynamic):
    torch._dynamo.reset()

    def attend(q, k, v, scale):
        return fa3.flash_attn_func(q, k, v, softmax_scale=scale)

    # A NumPy scalar breaks the graph: it would become a tensor.
    fullgraph = not isinstance(scale, np.generic)
    compiled = torch.compile(attend, backend="eager", dynamic=dynamic, fullgraph=fullgraph)
    inputs = tensors()
    assert torch.equal(compiled(*inputs, scale), attend(*inputs, scale))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_needs_no_graph_break_forward_and_backward(backend, dynamic):
    torch._dynamo.reset()

    def attend(q, k, v):
        out, lse = fa3.flash_attn_func(q * 2, k, v, causal=True, return_lse=True, deterministic=True)
        return out.relu(), lse + 1

    compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=dynamic)
    for seqlen_q in (9, 7):
        inputs = tensors(seqlen_q, requires_grad=True)
        results, expected = compiled(*inputs), attend(*inputs)
        gradients, expected_gradients = (
            torch.autograd.grad(out.square().sum() + lse.sum(), inputs) for out, lse in (results, expected)
        )
        for one, other in zip((*results, *gradients), (*expected, *expected_gradients), strict=True):
            torch.testing.assert_close(one, other)


def test_torch_compile_without_gradients_keeps_one_operator():
    torch._dynamo.reset()
    graphs = []

    def record(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    inputs = tensors()
    out = torch.compile(fa3.flash_attn_func, fullgraph=True, backend=record)(*inputs)
    assert graphs == [[ops.forward]]
    assert torch.equal(out, fa3.flash_attn_func(*inputs))


def test_torch_export_keeps_one_operator():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return fa3.flash_attn_func(q, k, v, causal=True)

    inputs = tensors()
    exported = torch.export.export(Attention(), inputs)
    assert [node.target for node in exported.graph.nodes if node.op == "call_function"] == [ops.forward]
    assert torch.equal(exported.module()(*inputs), fa3.flash_attn_func(*inputs, causal=True))


def test_a_gradient_of_the_lse_alone_is_enough():
    q, k, v = tensors(requires_grad=True)
    _, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    expected = torch.autograd.grad(fa3.reference(q, k, v)[1].sum(), (q, k))
    torch.testing.assert_close((dq, dk), expected)
    assert (dv == 0).all()
