"""The public functions of FP8: values, gradients, what is refused, and what torch.compile makes of them."""

import dataclasses
import inspect

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad

import fa3
from fa3 import backends, ops, schemas
from fa3.block_masks import create_block_mask
from fa3.options import Fp8, Options
from fa3.quantization import rope_rows
from fp8_inputs import DOCUMENT, OPTIONS, SINK, ByOperator, assert_near, rope_of, tensors

# Attention of what was quantized ------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, (64, 96), "head", "tensor"], ids=str)
@pytest.mark.parametrize("v_layout", ["row", "transposed"])
@pytest.mark.parametrize("incoherent", [False, True])
def test_attention_of_the_quantized_is_that_of_the_dequantized(block, v_layout, incoherent):
    q, k, v = tensors()
    rope = rope_of()
    x = fa3.quantize_qkv(q, k, v, rope=rope, block=block, v_layout=v_layout, incoherent=incoherent)
    answer = fa3.flash_attn_quantized_func(x, causal=True, return_lse=True)
    assert_near(answer, fa3.reference(*x.dequantize(), causal=True))
    near = fa3.reference(rope_rows(q, rope, first_position=60), rope_rows(k, rope), v, causal=True)[0]
    assert (answer[0] - near).norm() < 0.07 * near.norm()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_options_of_an_attention_of_the_quantized_are_those_of_any(options, dtype):
    x = fa3.quantize_qkv(*tensors(), block=(64, 64), v_layout="transposed")
    answer = fa3.flash_attn_quantized_func(x, **options, out_dtype=dtype, return_lse=True)
    assert_near(answer, fa3.reference(*x.dequantize(), **options), dtype)


@pytest.mark.parametrize("return_lse", [False, True])
def test_the_way_past_the_operators_gives_the_same(return_lse):
    x = fa3.quantize_qkv(*tensors())
    direct = fa3.flash_attn_quantized_func(x, sink=SINK, return_lse=return_lse)
    with ByOperator():
        by_operator = fa3.flash_attn_quantized_func(x, sink=SINK, return_lse=return_lse)
    assert isinstance(direct, tuple) is return_lse
    torch.testing.assert_close(by_operator, direct, rtol=0, atol=0)


def test_a_gradient_by_a_sink_of_the_quantized_is_refused():
    x = fa3.quantize_qkv(*tensors())
    with pytest.raises(NotImplementedError, match="flash_attn_fp8_func"):
        fa3.flash_attn_quantized_func(x, sink=SINK.clone().requires_grad_())


def test_hints_change_nothing():
    x = fa3.quantize_qkv(*tensors())
    plain = fa3.flash_attn_quantized_func(x)
    for hints in ({"two_level": True}, {"two_level": False}, {"sm_margin": 4}):
        assert torch.equal(fa3.flash_attn_quantized_func(x, **hints), plain)


def test_a_block_mask_hides_what_its_modification_hides():
    x = fa3.quantize_qkv(*tensors())
    blocks = create_block_mask(DOCUMENT, 2, None, 90, 150)
    out = fa3.flash_attn_quantized_func(x, block_mask=blocks)
    assert torch.equal(out, fa3.flash_attn_quantized_func(x, mask_mod=DOCUMENT))


def test_new_queries_attend_to_a_cache_of_keys():
    q, k, v = tensors()
    rope = rope_of()
    cache = fa3.quantize_qkv(q, k, v, rope=rope, v_layout="transposed")
    new = fa3.quantize_qkv(q[:, -1:], k, v, rope=rope)
    out = fa3.flash_attn_quantized_func(new.with_keys_of(cache))
    torch.testing.assert_close(out.double(), fa3.reference(*new.dequantize())[0], rtol=1e-2, atol=1e-4)


def test_tensors_that_want_gradients_are_quantized_only_where_none_are_recorded():
    qkv = tensors(requires_grad=True)
    with pytest.raises(NotImplementedError, match="q requires a gradient, and quantize_qkv has none"):
        fa3.quantize_qkv(*qkv)
    with torch.no_grad():
        x = fa3.quantize_qkv(*qkv)
    assert not any(y.requires_grad for y in (x.q, x.k, x.v, x.q_scale))
    with torch.inference_mode():
        out = fa3.flash_attn_quantized_func(fa3.quantize_qkv(*qkv), causal=True)
    assert torch.equal(out, fa3.flash_attn_quantized_func(x, causal=True))


def test_seeds_give_other_signs_and_the_same_attention():
    q, k, v = tensors()
    one, other = (fa3.quantize_qkv(q, k, v, seed=seed) for seed in (1, 2))
    assert not torch.equal(one.q.float(), other.q.float())
    outs = [fa3.flash_attn_quantized_func(x).float() for x in (one, other)]
    assert (outs[0] - outs[1]).norm() < 0.1 * outs[0].norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("block", [None, (64, 96), "tensor"], ids=str)
@pytest.mark.parametrize("qk_dtype", ["e4m3", "int8"])
def test_the_default_dtype_of_pytorch_changes_nothing(dtype, block, qk_dtype, default_dtype):
    q, k, v = tensors()
    arguments = {"block": block, "qk_dtype": qk_dtype}
    expected = fa3.flash_attn_fp8_func(q, k, v, return_lse=True, **arguments)
    default_dtype(dtype)
    assert fa3.quantize_qkv(q, k, v, **arguments).q_scale.dtype is torch.float32
    for mine, theirs in zip(fa3.flash_attn_fp8_func(q, k, v, return_lse=True, **arguments), expected, strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs)


QUANTIZE_REFUSED = {
    "q that is none": ({"q": 1}, TypeError, r"^q must be a torch\.Tensor, not int"),
    "three dims": ({"k": torch.randn(150, 2, 32).bfloat16()}, ValueError, "^k has 3 dims"),
    "a float64": ({"v": torch.randn(2, 150, 2, 48).double()}, TypeError, r"^v has dtype torch\.float64: allowed are"),
    "a mix": ({"v": torch.randn(2, 150, 2, 48).half()}, TypeError, "^q, k and v have dtypes"),
    "a head dim": (
        {"v": torch.randn(2, 150, 2, 40).bfloat16()},
        ValueError,
        r"^v has head dim \(dim 3\) 40: .* multiples of 16",
    ),
    "a stride": (
        {"v": torch.randn(2, 150, 2, 96).bfloat16()[..., ::2]},
        ValueError,
        "^v has strides .*: the last must be 1",
    ),
    "lengths": (
        {"v": torch.randn(2, 140, 2, 48).bfloat16()},
        ValueError,
        r"^k and v have lengths and heads .* \(150, 2\) and \(140, 2\)",
    ),
    "batches": ({"q": torch.randn(1, 90, 4, 32).bfloat16()}, ValueError, "^q, k and v have batch sizes 1, 2 and 2"),
    "head dims": (
        {"q": torch.randn(2, 90, 4, 64).bfloat16()},
        ValueError,
        r"^q and k have head dims \(dim 3\) 64 and 32",
    ),
    "heads": ({"q": torch.randn(2, 90, 3, 32).bfloat16()}, ValueError, "^q has 3 heads, k and v have 2"),
    "a device": (
        {"v": torch.randn(2, 150, 2, 48, device="meta").bfloat16()},
        ValueError,
        "^q, k and v are on devices cpu, cpu and meta",
    ),
    "a rope that is one tensor": (
        {"rope": torch.ones(150, 16)},
        TypeError,
        r"^rope must be a pair \(cos, sin\) of tensors, not Tensor",
    ),
    "a rope of half the columns": (
        {"rope": rope_of(150, 16)},
        ValueError,
        r"^rope\[0\] \(cos\) has shape \(150, 8\): must be \(positions, head_dim / 2\), at least \(150, 16\)",
    ),
    "a rope that is too short": ({"rope": rope_of(149)}, ValueError, r"^rope\[0\] \(cos\) has shape \(149, 16\)"),
    "a rope in float64": (
        {"rope": rope_of(dtype=torch.float64)},
        TypeError,
        r"^rope\[0\] \(cos\) has dtype torch\.float64: allowed are torch\.float32 and that of q",
    ),
    "a rope of two dtypes": (
        {"rope": (rope_of()[0], rope_of()[1].bfloat16())},
        ValueError,
        "^cos and sin of rope have dtypes",
    ),
    "a rope of more queries": (
        {"q": torch.randn(2, 151, 4, 32).bfloat16(), "rope": rope_of(160)},
        ValueError,
        "^q has length 151, k 150: with rope",
    ),
    "pairs of no rope": ({"interleaved": True}, ValueError, "^interleaved=True, rope=None"),
    "a number for a flag": ({"incoherent": 1}, TypeError, "^incoherent=1: must be True or False"),
    "a negative seed": ({"seed": -1}, ValueError, "^seed=-1: allowed are 0 to 2147483647"),
    "a large seed": ({"seed": 2**31}, ValueError, "^seed=2147483648: allowed are 0 to 2147483647"),
    "a seed that is no int": ({"seed": 0.5}, TypeError, "^seed=0.5: must be an int"),
    "a block of 32": ({"block": (128, 32)}, ValueError, r"^block=\(128, 32\): allowed are None, 'head', 'tensor'"),
    "96 queries": ({"block": (96, 96)}, ValueError, r"^block=\(96, 96\): .*64 or 128 rows of q, 64, 96 or 128 rows"),
    "an unknown block": ({"block": "row"}, ValueError, "^block='row': allowed are"),
    "a block of floats": ({"block": (64.0, 96.0)}, ValueError, r"^block=\(64\.0, 96\.0\): allowed are"),
    "a rope of one table": ({"rope": (torch.zeros(150, 16),)}, TypeError, r"^rope must be a pair .*, not tuple of 1$"),
    "a block of one number": ({"block": 128}, TypeError, "^block=128: must be None, 'head', 'tensor'"),
}


@pytest.mark.parametrize("function", [fa3.quantize_qkv, fa3.flash_attn_fp8_func])
@pytest.mark.parametrize(("changes", "error", "words"), QUANTIZE_REFUSED.values(), ids=QUANTIZE_REFUSED)
def test_what_cannot_be_quantized_is_named(function, changes, error, words):
    arguments = {**dict(zip("qkv", tensors(), strict=True)), **changes}
    with pytest.raises(error, match=words):
        function(**arguments)


def test_float32_is_quantized_but_has_no_16_bit_attention():
    q, k, v = tensors(torch.float32)
    assert fa3.flash_attn_quantized_func(fa3.quantize_qkv(q, k, v)).dtype is torch.bfloat16
    with pytest.raises(TypeError, match=r"^q has dtype torch\.float32: allowed are torch\.float16, torch\.bfloat16$"):
        fa3.flash_attn_fp8_func(q, k, v)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x": torch.ones(2)}, TypeError, r"^x must be a fa3\.QuantizedQKV.*not Tensor.*flash_attn_func"),
        (
            {"out_dtype": torch.float32},
            TypeError,
            r"^out_dtype=torch\.float32: allowed are torch\.bfloat16, torch\.float16",
        ),
        ({"out_dtype": ["bf16"]}, TypeError, r"^out_dtype=\['bf16'\]: allowed are torch\.bfloat16, torch\.float16"),
        ({"two_level": 1}, TypeError, "^two_level=1: must be True, False or None, not int"),
        ({"window_size": 3}, TypeError, "^window_size=3: must be a pair"),
        ({"softmax_scale": -1.0}, ValueError, r"^softmax_scale=-1\.0"),
        ({"causal": 1}, TypeError, "^causal=1: must be True or False"),
        ({"sink": SINK[:3]}, ValueError, r"^sink has shape \(3,\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_of_an_attention_of_the_quantized_are_named(changes, error, words):
    with pytest.raises(error, match=words):
        fa3.flash_attn_quantized_func(**{"x": fa3.quantize_qkv(*tensors()), **changes})


def test_an_unknown_layout_of_v_is_named():
    with pytest.raises(ValueError, match=r"^v_layout='column': allowed are 'row' and 'transposed'"):
        fa3.quantize_qkv(*tensors(), v_layout="column")


def test_a_plain_transposed_v_in_the_place_of_the_packed_one_is_refused_by_its_shape():
    x = fa3.quantize_qkv(*tensors(), v_layout="transposed")
    with pytest.raises(ValueError, match=r"^v has shape \(2, 2, 48, 150\): must be \(2, 2, 48, 160\)"):
        dataclasses.replace(x, v=x.v[..., :150])


def test_the_kernels_of_the_device_quantize(monkeypatch):
    """Which of the two quantizers is asked, and with what."""
    seen = []

    def quantizer(x, **arguments):
        seen.append((tuple(x.shape), arguments))
        return fa3.quantization.quantize_tensor(x, **arguments)

    monkeypatch.setattr(backends, "quantizer_for", lambda x: quantizer)
    q, k, v = tensors()
    rope = rope_of()
    by_functions = fa3.flash_attn_quantized_func(fa3.quantize_qkv(q, k, v, rope=rope, seed=9, v_layout="transposed"))
    plain = {"interleaved": False, "first_position": 0, "transpose": False, "power_of_two": False, "out": "e4m3"}
    rotation = {"rotate": True, "seed": 9, "rope": rope}
    expected = [
        ((2, 90, 4, 32), {**plain, **rotation, "rows": 64, "first_position": 60}),
        ((2, 150, 2, 32), {**plain, **rotation, "rows": 128}),
        (
            (2, 150, 2, 48),
            {**plain, "rotate": False, "seed": 0, "rope": None, "rows": "head", "transpose": True},
        ),
    ]
    for (shape, arguments), (expected_shape, wanted) in zip(seen, expected, strict=True):
        tables, wanted_tables = arguments.pop("rope"), wanted.pop("rope")
        assert (shape, arguments) == (expected_shape, wanted)
        assert (tables is None) == (wanted_tables is None)
    assert torch.equal(fa3.flash_attn_fp8_func(q, k, v, rope=rope, seed=9), by_functions)
    assert len(seen) == 6


# 16 bits in, 16 bits out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_forward_is_attention_of_the_quantized(dtype, options):
    q, k, v = tensors(dtype)
    x = fa3.quantize_qkv(q, k, v, v_layout="transposed")
    expected = fa3.flash_attn_quantized_func(x, **options, out_dtype=dtype, return_lse=True)
    answer = fa3.flash_attn_fp8_func(q, k, v, **options, return_lse=True)
    assert answer[0].dtype is dtype
    for one, other in zip(answer, expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(fa3.flash_attn_fp8_func(q, k, v, **options), answer[0])


@pytest.mark.parametrize("block", [None, (128, 64), "head", "tensor"], ids=str)
def test_the_forward_takes_blocks_as_quantize_qkv_does(block):
    q, k, v = tensors()
    # Other numbers by one scale for the head than by one for each block.
    v[:, :64] *= 0.01
    x = fa3.quantize_qkv(q, k, v, block=block, v_layout="transposed")
    expected = fa3.flash_attn_quantized_func(x, return_lse=True)
    answer = fa3.flash_attn_fp8_func(q, k, v, block=block, return_lse=True)
    for one, other in zip(answer, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("with_rope", [False, True])
@pytest.mark.parametrize("block", [(64, 128), "tensor"], ids=str)
def test_gradients_are_those_of_the_16_bit_backward_with_the_results_of_the_forward(interleaved, with_rope, block):
    q, k, v = tensors(requires_grad=True)
    sink = SINK.clone().requires_grad_()
    rope = rope_of() if with_rope else None
    interleaved = interleaved and with_rope
    options = {"window_size": (70, 3), "softcap": 3.0}
    out, lse = fa3.flash_attn_fp8_func(
        q, k, v, sink=sink, rope=rope, interleaved=interleaved, block=block, **options, return_lse=True
    )
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), (q, k, v, sink), (dout, dlse))

    with torch.no_grad():
        rotated = [q, k]
        if rope is not None:
            rotated = [rope_rows(q, rope, interleaved, 60).bfloat16(), rope_rows(k, rope, interleaved).bfloat16()]
        flat = schemas.flatten(Options(70, 3, softcap=3.0, sink=sink))
        expected = list(ops.backward_options(dout, dlse, *rotated, v, out, lse, None, False, *flat)[:4])
        if rope is not None:
            for i, first in enumerate((60, 0)):
                expected[i] = rope_rows(expected[i], rope, interleaved, first, transposed=True).bfloat16()
    for one, other in zip(gradients, expected, strict=True):
        assert torch.equal(one, other)


def test_gradients_are_near_those_of_exact_attention():
    q, k, v = tensors(requires_grad=True)
    rope = rope_of()
    gradients = torch.autograd.grad(fa3.flash_attn_fp8_func(q, k, v, rope=rope, causal=True).sum(), (q, k, v))
    exact = fa3.reference(rope_rows(q, rope, first_position=60), rope_rows(k, rope), v, causal=True)[0]
    for one, other in zip(gradients, torch.autograd.grad(exact.sum(), (q, k, v)), strict=True):
        assert (one.float() - other.float()).norm() < 0.1 * other.float().norm()


@pytest.mark.parametrize("wanted", ["q", "k", "v", "sink"])
def test_only_the_gradients_that_are_wanted_come_back(wanted):
    arguments = {**dict(zip("qkv", tensors(), strict=True)), "sink": SINK.clone()}
    arguments[wanted].requires_grad_()
    fa3.flash_attn_fp8_func(**arguments).sum().backward()
    assert [name for name, x in arguments.items() if x.grad is not None] == [wanted]


def test_gradients_that_do_not_exist_are_refused():
    q, k, v = tensors(requires_grad=True)
    cos, sin = rope_of()
    with pytest.raises(NotImplementedError, match=r"^rope\[1\] \(sin\) requires a gradient"):
        fa3.flash_attn_fp8_func(q, k, v, rope=(cos, sin.requires_grad_()))
    (dq,) = torch.autograd.grad(fa3.flash_attn_fp8_func(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="dual tensor"):
        fa3.flash_attn_fp8_func(forward_ad.make_dual(q.detach(), torch.ones_like(q)), k, v)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_takes_gradients_of_each_sequence():
    q, k, v = tensors()

    def loss(q, k, v):
        return fa3.flash_attn_fp8_func(q[None], k[None], v[None], causal=True).float().square().sum()

    mapped = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v)
    for i in range(2):
        for one, other in zip(mapped, torch.func.grad(loss, (0, 1, 2))(q[i], k[i], v[i]), strict=True):
            assert torch.equal(one[i], other)


@pytest.mark.parametrize("with_rope", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
def test_operators_of_fp8_pass_opcheck(with_rope, seed):
    q, k, v = tensors(requires_grad=True)
    cos, sin = rope_of() if with_rope else (None, None)
    for fp8, v_rows in ((Fp8(q_block=64, k_block=128, v_transposed=True), "head"), (Fp8(), "tensor")):
        call = (
            q,
            k,
            v,
            cos,
            sin,
            False,
            seed,
            v_rows,
            "e4m3",
            None,
            True,
            *schemas.flatten(Options(softcap=3.0, fp8=fp8)),
        )
        torch.library.opcheck(torch.ops.fa3.fp8_forward.default, call)
        torch.library.opcheck(torch.ops.fa3.fp8_forward_lse.default, call)
    with torch.no_grad():
        out, lse = torch.ops.fa3.fp8_forward_lse(*call)
        call = (
            torch.randn_like(out),
            None,
            *(x.detach() if isinstance(x, torch.Tensor) else x for x in call[:9]),
            out,
            lse,
            *call[9:],
        )
    torch.library.opcheck(torch.ops.fa3.fp8_backward.default, call)


@pytest.mark.parametrize("rows", [64, 0, -1])
@pytest.mark.parametrize("transpose", [False, True])
def test_the_operator_that_quantizes_passes_opcheck(rows, transpose):
    x = torch.randn(2, 70, 3, 48).half()
    torch.library.opcheck(
        torch.ops.fa3.quantize.default, (x, *rope_of(90, 48), rows, True, 3, True, 20, transpose, False)
    )


# torch.compile ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_needs_no_graph_break(dynamic):
    torch._dynamo.reset()
    q, k, v = tensors(requires_grad=True)
    rope = rope_of()

    def attend(q, k, v):
        return fa3.flash_attn_fp8_func(q, k, v, rope=rope, causal=True, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for one, other in zip(compiled(q, k, v), attend(q, k, v), strict=True):
        assert torch.equal(one, other)
    gradients, expected = (torch.autograd.grad(f(q, k, v)[0].sum(), (q, k, v)) for f in (compiled, attend))
    for one, other in zip(gradients, expected, strict=True):
        assert torch.equal(one, other)


def test_torch_compile_takes_quantization_and_attention_of_the_quantized():
    torch._dynamo.reset()
    qkv = tensors()

    def attend(q, k, v):
        x = fa3.quantize_qkv(q, k, v, rope=rope_of(), v_layout="transposed")
        return fa3.flash_attn_quantized_func(x, causal=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*qkv), attend(*qkv))
    graphs = CompileCounter()
    given = torch.compile(lambda x: fa3.flash_attn_quantized_func(x), fullgraph=True, backend=graphs)
    x = fa3.quantize_qkv(*qkv)
    assert torch.equal(given(x), fa3.flash_attn_quantized_func(x))
    assert graphs.frame_count == 1


def test_meta_tensors_have_shapes():
    q, k, v = (x.to("meta").requires_grad_() for x in tensors())
    out = fa3.flash_attn_fp8_func(q, k, v)
    out.sum().backward()
    assert out.shape == (2, 90, 4, 48)
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]
    x = fa3.quantize_qkv(*(x.detach() for x in (q, k, v)), v_layout="transposed")
    assert (x.v.shape, x.v_scale.shape) == ((2, 2, 48, 160), (2, 2, 2))
    assert fa3.flash_attn_quantized_func(x).shape == (2, 90, 4, 48)


def test_signatures_are_what_they_are_said_to_be():
    assert str(inspect.signature(fa3.quantize_qkv)).startswith("(q: 'Tensor', k: 'Tensor', v: 'Tensor', *, rope:")
    names = list(inspect.signature(fa3.flash_attn_quantized_func).parameters)
    assert names[:4] == ["x", "softmax_scale", "causal", "window_size"]
    names = list(inspect.signature(fa3.flash_attn_fp8_func).parameters)
    assert names[:12] == [
        "q", "k", "v", "softmax_scale", "causal", "window_size", "rope", "interleaved", "incoherent", "seed", "block",
        "two_level",
    ]  # fmt: skip
