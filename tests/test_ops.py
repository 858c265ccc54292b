"""The operators: what torch.compile, torch.export and opcheck need of them."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3
from fa3 import ops, schemas
from fa3.block_masks import create_block_mask
from fa3.mods import MaskMod, alibi, alibi_slopes, document, twin
from fa3.options import Options


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


@pytest.mark.parametrize("with_options", [False, True])
def test_one_dynamic_graph_serves_all_shapes(with_options):
    torch._dynamo.reset()
    graphs = CompileCounter()

    def attend(q, k, v, **options):
        return fa3.flash_attn_func(q, k, v, causal=True, return_lse=True, **options)

    compiled = torch.compile(attend, fullgraph=True, backend=graphs, dynamic=True)
    for batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v in (
        (3, 9, 11, 4, 2, 16, 24),  # Sizes that are equal here would stay so.
        (3, 7, 30, 6, 3, 72, 80),
        (5, 40, 12, 10, 5, 128, 64),
        (4, 8, 6, 21, 7, 32, 512),
    ):
        q, k = torch.randn(batch, seqlen_q, heads_q, head_dim), torch.randn(batch, seqlen_k, heads_kv, head_dim)
        v = torch.randn(batch, seqlen_k, heads_kv, head_dim_v)
        options = {}
        if with_options:
            qv = torch.randn(batch, seqlen_q, heads_q, head_dim_v)
            options = {"window_size": (5, 3), "softcap": 3.0, "sink": torch.randn(heads_q), "qv": qv}
        for one, other in zip(compiled(q, k, v, **options), attend(q, k, v, **options), strict=True):
            torch.testing.assert_close(one, other)
    assert graphs.frame_count == 1


def test_a_dynamic_graph_complains_about_bad_sizes():
    torch._dynamo.reset()
    compiled = torch.compile(fa3.flash_attn_func, fullgraph=True, backend="eager", dynamic=True)
    q, k, v = tensors()
    with pytest.raises(ValueError, match="q has 3 heads, k and v have 2"):
        compiled(q[:, :, :3], k, v)


BAD_OPTIONS = [
    ("q_descale", 1.0, TypeError),
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


# Options ------------------------------------------------------------------------------------------------------------


def own_parity(batch, head, q_index, kv_index, numbers):
    return (kv_index + q_index + numbers[head]) % 2 == 0


def options_for(kind, seqlen_q=9, dtype=torch.float64, requires_grad=False):
    """Options of every kind, for the tensors above."""
    sink = torch.randn(4, dtype=dtype, requires_grad=requires_grad)
    qv = torch.randn(2, seqlen_q, 4, 8, dtype=dtype, requires_grad=requires_grad)
    numbers = torch.arange(4, dtype=torch.int32)
    parity = MaskMod("ops_mods:own_parity", own_parity, (numbers,))
    return {
        "window": Options(window_left=3, window_right=2),
        "chunk": Options(attention_chunk=4),
        "softcap": Options(softcap=2.0),
        "sink": Options(sink=sink),
        "qv": Options(qv=qv),
        "hints": Options(pack_gqa=True, sm_margin=2, deterministic=True),
        "all": Options(5, 3, 6, 2.0, sink, qv, False, 1, True),
        "score_mod": Options(score_mod=alibi(alibi_slopes(4))),
        "mask_mod": Options(mask_mod=parity, softcap=2.0),
        "block_mask": Options(block_mask=create_block_mask(parity, 1, 4, seqlen_q, 11), sink=sink),
        "both mods": Options(score_mod=alibi(alibi_slopes(4)), mask_mod=parity, window_right=4, qv=qv),
    }[kind]


KINDS = [
    "window", "chunk", "softcap", "sink", "qv", "hints", "all", "score_mod", "mask_mod", "block_mask", "both mods",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_options_survive_the_way_through_an_operator(kind):
    options = options_for(kind)
    arguments = schemas.flatten(options)
    schema = ops.forward_options._schema.arguments[5:]
    # The dispatcher drops defaults at the end, and so may a caller.
    while (
        arguments
        and type(arguments[-1]) is type(schema[len(arguments) - 1].default_value)
        and (arguments[-1] == schema[len(arguments) - 1].default_value)
    ):
        arguments = arguments[:-1]
    for again in (schemas.unflatten(arguments), schemas.unflatten(schemas.flatten(options))):
        assert again[:9] == options[:9]
        for mod, expected in ((again.score_mod, options.score_mod), (again.mask_mod, options.mask_mod)):
            assert (mod is None) == (expected is None)
            if mod is not None:
                assert (mod.cute, mod.torch, mod.aux) == (expected.cute, twin(expected.cute), expected.aux)
        if options.block_mask is not None:
            assert again.block_mask.mask_mod.cute == options.block_mask.mask_mod.cute
            for name in ("seqlen_q", "seqlen_k", "counts", "indices"):
                assert getattr(again.block_mask, name) is getattr(options.block_mask, name)


def test_the_schema_has_the_fields_and_defaults_of_options():
    arguments = ops.forward_options._schema.arguments[5:]
    assert [x.name for x in arguments[:9]] == list(Options._fields[:9])
    assert [x.default_value for x in arguments[:9]] == list(Options()[:9])
    for operator in (
        ops.forward_lse_options,
        ops.backward_options,
        ops.forward_packed_options,
        ops.backward_packed_options,
    ):
        others = operator._schema.arguments[-len(arguments) :]
        assert [(x.name, x.default_value) for x in others] == [(x.name, x.default_value) for x in arguments]


@pytest.mark.parametrize("kind", KINDS)
def test_operators_with_options_pass_opcheck(kind):
    arguments = (*tensors(), None, kind == "softcap", *schemas.flatten(options_for(kind)))
    torch.library.opcheck(ops.forward_options, arguments)
    torch.library.opcheck(ops.forward_lse_options, arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_operators_with_options_pass_opcheck_with_gradients(kind):
    options = schemas.flatten(options_for(kind, requires_grad=True))
    causal = kind != "block_mask"
    torch.library.opcheck(ops.forward_options, (*tensors(requires_grad=True), 0.3, causal, *options))
    torch.library.opcheck(ops.forward_lse_options, (*tensors(requires_grad=True), 0.3, causal, *options))


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_operator_with_options_passes_opcheck(kind):
    q, k, v = tensors()
    options = schemas.flatten(options_for(kind))
    causal = kind != "block_mask"
    out, lse = ops.forward_lse_options(q, k, v, None, causal, *options)
    arguments = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, None, causal, *options)
    torch.library.opcheck(ops.backward_options, arguments)
    given = ops.backward_options(*arguments)[3:]
    assert [tuple(x.shape) for x in given] == [(0,) if x is None else tuple(x.shape) for x in (options[4], options[5])]


def test_options_may_be_named():
    q, k, v = tensors()
    sink = torch.randn(4)
    named = torch.ops.fa3.forward(q, k, v, None, False, sink=sink, window_left=3)
    assert torch.equal(named, fa3.flash_attn_func(q, k, v, window_size=(3, -1), sink=sink))


def test_an_operator_whose_options_say_nothing_is_the_plain_one():
    q, k, v = tensors(requires_grad=True)
    out, lse = ops.forward_lse_options(q, k, v, None, True)
    assert torch.equal(out, ops.forward(q, k, v, None, True))
    with torch.no_grad():
        *gradients, dsink, dqv = ops.backward_options(out, lse, q, k, v, out, lse, None, True)
        expected = ops.backward(out, lse, q, k, v, out, lse, None, True)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
    assert dsink.shape == dqv.shape == (0,)
    by_autograd = torch.autograd.grad((out, lse), (q, k, v), (out.detach(), lse.detach()))
    assert all(torch.equal(one, other) for one, other in zip(gradients, by_autograd, strict=True))


def test_a_twin_that_this_process_does_not_know_is_named():
    with pytest.raises(ValueError, match=r"'nowhere:unknown' has no PyTorch twin in this process"):
        ops.forward_options(*tensors(), None, False, mask_mod="nowhere:unknown")


def test_blocks_without_their_mask_are_refused():
    blocks = options_for("block_mask").block_mask
    with pytest.raises(TypeError, match="mask_mod must be a MaskMod"):
        ops.forward_options(*tensors(), None, False, block_counts=blocks.counts, block_indices=blocks.indices)


def call(options):
    """A call as users write it, of the options' fields."""
    given = {name: x for name, x in options._asdict().items() if not name.startswith("window")}
    window = (options.window_left, options.window_right)
    return lambda q, k, v: fa3.flash_attn_func(q, k, v, window_size=window, **given, return_lse=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["window", "all", "block_mask", "both mods"])
def test_torch_compile_needs_no_graph_break_for_options(kind, dynamic):
    torch._dynamo.reset()
    options = options_for(kind, requires_grad=True)
    attend = call(options)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    inputs = tensors(requires_grad=True)
    results, expected = compiled(*inputs), attend(*inputs)
    inputs = [*inputs, *(x for x in (options.sink, options.qv) if x is not None)]
    results, expected = (
        (*both, *torch.autograd.grad(both[0].square().sum() + both[1].logsumexp(-1).sum(), inputs))
        for both in (results, expected)
    )
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_modification_may_be_made_inside_of_a_compiled_function():
    torch._dynamo.reset()

    def attend(q, k, v, slopes, ids):
        return fa3.flash_attn_func(q, k, v, score_mod=alibi(slopes), mask_mod=document(ids))

    inputs = (*tensors(), alibi_slopes(4), torch.arange(11, dtype=torch.int32).div(4).int().repeat(2, 1))
    torch.testing.assert_close(torch.compile(attend, backend="eager")(*inputs), attend(*inputs))


def test_torch_export_keeps_one_operator_with_options():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sink = torch.nn.Parameter(torch.randn(4), requires_grad=False)

        def forward(self, q, k, v):
            return fa3.flash_attn_func(q, k, v, window_size=(4, 0), softcap=3.0, sink=self.sink)

    inputs, attention = tensors(dtype=torch.float32), Attention()
    exported = torch.export.export(attention, inputs)
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert targets == [ops.forward_options]
    assert torch.equal(exported.module()(*inputs), attention(*inputs))


BAD_OPTION_TENSORS = {
    "a sink for other heads": {"sink": lambda: torch.zeros(3)},
    "a sink of integers": {"sink": lambda: torch.zeros(4, dtype=torch.int32)},
    "a qv of another length": {"qv": lambda: torch.zeros(2, 8, 4, 8, dtype=torch.float64)},
    "a qv of another dtype": {"qv": lambda: torch.zeros(2, 9, 4, 8)},
    "slopes of other heads": {"score_mod": lambda: alibi(alibi_slopes(8))},
}


@pytest.mark.parametrize("make", BAD_OPTION_TENSORS.values(), ids=BAD_OPTION_TENSORS)
def test_fakes_complain_about_options_as_the_kernels_do(make):
    def complaint():
        with pytest.raises((TypeError, ValueError)) as caught:
            fa3.flash_attn_func(*tensors(), **{name: value() for name, value in make.items()})
        return caught.type, str(caught.value)

    expected = complaint()
    with FakeTensorMode():
        assert complaint() == expected


def test_compiled_autograd_traces_the_backward_of_a_compiled_step():
    q = torch.randn(1, 40, 2, 16, requires_grad=True)

    def step(q):
        fa3.flash_attn_func(q, q, q, causal=True).sum().backward()

    step(q)
    expected, q.grad = q.grad, None
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="eager")(q)
    torch.testing.assert_close(q.grad, expected)
