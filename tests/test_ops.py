"""The operators: what torch.compile, torch.export and opcheck need of them."""

import pytest
import torch

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
    with pytest.raises(NotImplementedError, match="second derivatives"):
        ops.backward(out, None, q, k, v, out, lse, None, True)


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
