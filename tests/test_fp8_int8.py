"""int8 q and k beside v of e4m3: what they are, which calls take them, and what they gain."""

import copy
import math
import pickle
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import fa3
import recorder
from fa3 import fp8_ops, ops, schemas
from fa3.backends import hopper
from fa3.cli.main import main
from fa3.e4m3 import INT8_MAX, SMALLEST_AMAX
from fa3.numerics.fp8_error import emulate, exact, make_inputs, rmse
from fa3.options import Fp8, Options
from fa3.plan import H200, computes, plan
from fa3.problem import check_forward
from fa3.quantization import QuantizedQKV, dequantize, hadamard, quantize_tensor, scale_factor, signs, to_int8
from fp8_inputs import OPTIONS, SINK, ByOperator, assert_near, rope_of, tensors

ROWS = [64, 96, 128, "head", "tensor"]


def rows_of_scales(rows):
    return rows if isinstance(rows, int) else 0


# The numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_dequantized_values_are_within_half_a_step(rows, rotate):
    x = torch.randn(2, 150, 3, 64)
    values, scale = quantize_tensor(x, rows=rows, rotate=rotate, seed=5, out="int8")
    assert values.dtype is torch.int8
    assert values.shape == x.shape
    assert values.is_contiguous()
    expected = hadamard(x * signs(5, 64)) / 8 if rotate else x
    ones = dequantize(torch.ones_like(values), scale, rows_of_scales(rows))
    difference = dequantize(values, scale, rows_of_scales(rows)) - expected
    assert (difference.abs() <= 0.5001 * ones).all()


def test_the_largest_value_of_a_block_is_127_or_minus_127_and_none_is_minus_128():
    x = torch.randn(1, 640, 2, 32)
    values, scale = quantize_tensor(x, rows=64, out="int8")
    blocks = values.int().abs().unflatten(1, (-1, 64))
    assert (blocks.amax(dim=(2, 4)) == 127).all()
    largest = x.abs().unflatten(1, (-1, 64)).amax(dim=(2, 4)).transpose(1, 2)
    assert torch.equal(scale, largest * scale_factor(1, "int8"))


def test_conversion_rounds_once_to_nearest_even():
    halves = torch.arange(-255, 256) / 2
    expected = [round(x / 2) for x in range(-254, 255)]  # Python rounds halves to even, too
    assert to_int8(halves[1:-1], torch.ones(())).tolist() == expected
    # The product in float32 would be 0.5, which rounds to 0; it is larger.
    x, factor = torch.tensor(1 + 2.0**-23), torch.tensor(0.5 * (1 + 2.0**-23))
    assert to_int8(x, factor).item() == 1
    assert to_int8(torch.tensor([130.0, -130.0]), torch.ones(())).tolist() == [127, -127]


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, SMALLEST_AMAX, 1e30, 1e36])
def test_finite_values_of_any_size_stay_finite_and_near(size, rotate):
    x = torch.randn(1, 130, 1, 32).clamp(-1, 1) * size
    values, scale = quantize_tensor(x, rows=64, rotate=rotate, out="int8")
    expected = hadamard(x * signs(0, 32)) / math.sqrt(32) if rotate else x
    allowed = 0.5001 * max(expected.abs().max().item(), SMALLEST_AMAX) / INT8_MAX
    assert ((dequantize(values, scale, 64) - expected).abs() <= allowed).all()
    assert (scale > 0).all()


@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(("rows", "lost"), [(64, [[0, 1, 1]]), ("head", [[0, 1]]), ("tensor", [[0, 0], [0, 1]])])
def test_what_is_not_finite_makes_the_scale_of_what_shares_it_nan_and_changes_nothing_else(what, rotate, rows, lost):
    x = torch.randn(1, 200, 2, 64)
    expected, expected_scale = quantize_tensor(x, rows=rows, rotate=rotate, out="int8")
    x[0, 70, 1, 3] = what
    values, scale = quantize_tensor(x, rows=rows, rotate=rotate, out="int8")
    assert scale.isnan().nonzero().tolist() == lost
    kept = ~scale.isnan()
    assert torch.equal(scale[kept], expected_scale[kept])
    back, expected_back = (
        dequantize(v, s, rows_of_scales(rows)) for v, s in ((values, scale), (expected, expected_scale))
    )
    assert torch.equal(back[~back.isnan()], expected_back[~back.isnan()])
    assert back.isnan().any()


@pytest.mark.parametrize("rows", ROWS)
def test_no_rows_at_all_have_scales_too(rows):
    values, scale = quantize_tensor(torch.empty(2, 0, 3, 64), rows=rows, out="int8")
    assert values.shape == (2, 0, 3, 64)
    assert scale.isfinite().all()


# q, k and v together ------------------------------------------------------------------------------------------------


def quantized(**options):
    return fa3.quantize_qkv(*tensors(), qk_dtype="int8", **options)


def test_v_is_what_it_is_beside_e4m3():
    q, k, v = tensors()
    x, plain = (fa3.quantize_qkv(q, k, v, qk_dtype=name) for name in ("int8", "e4m3"))
    assert (x.q.dtype, x.k.dtype, x.v.dtype, x.qk_dtype) == (torch.int8, torch.int8, torch.float8_e4m3fn, "int8")
    assert plain.qk_dtype == "e4m3"
    assert torch.equal(x.v.view(torch.uint8), plain.v.view(torch.uint8))
    assert torch.equal(x.v_scale, plain.v_scale)
    assert x.block == plain.block


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_a_copy_is_the_same(copied):
    x = quantized(v_layout="transposed")
    y = copied(x)
    assert (y.q.dtype, y.k.dtype, y.v.dtype) == (torch.int8, torch.int8, torch.float8_e4m3fn)
    for mine, expected in zip(y.dequantize(), x.dequantize(), strict=True):
        assert torch.equal(mine, expected)


def test_queries_and_keys_of_two_dtypes_do_not_belong_together():
    x, plain = quantized(), fa3.quantize_qkv(*tensors())
    with pytest.raises(ValueError, match=r"^qk_dtype='int8' of the queries, 'e4m3' of the keys: must be the same"):
        x.with_keys_of(plain)
    assert x.with_keys_of(quantized()).qk_dtype == "int8"
    with pytest.raises(TypeError, match=r"^q and k have dtypes torch\.int8 and torch\.float8_e4m3fn: must be the same"):
        replace(x, k=plain.k)
    with pytest.raises(TypeError, match=r"^v has dtype torch\.int8: must be torch\.float8_e4m3fn$"):
        replace(x, v=x.v.view(torch.int8))
    with pytest.raises(TypeError, match=r"^q has dtype torch\.uint8: must be torch\.float8_e4m3fn or torch\.int8$"):
        replace(x, q=x.q.view(torch.uint8))


@pytest.mark.parametrize("function", [fa3.quantize_qkv, fa3.flash_attn_fp8_func])
@pytest.mark.parametrize("given", ["e5m2", torch.int8, None])
def test_other_dtypes_are_refused(function, given):
    with pytest.raises(ValueError, match=r"^qk_dtype=.*: allowed are 'e4m3' and 'int8'$"):
        function(*tensors(), qk_dtype=given)


# Attention ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, (64, 96), "head", "tensor"], ids=str)
@pytest.mark.parametrize("v_layout", ["row", "transposed"])
def test_attention_of_the_quantized_is_that_of_the_dequantized(block, v_layout):
    x = quantized(rope=rope_of(), block=block, v_layout=v_layout)
    answer = fa3.flash_attn_quantized_func(x, causal=True, return_lse=True)
    assert_near(answer, fa3.reference(*x.dequantize(), causal=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_call_of_16_bits_is_attention_of_the_quantized(options, dtype):
    q, k, v = tensors(dtype)
    x = fa3.quantize_qkv(q, k, v, v_layout="transposed", qk_dtype="int8")
    expected = fa3.flash_attn_quantized_func(x, **options, out_dtype=dtype, return_lse=True)
    answer = fa3.flash_attn_fp8_func(q, k, v, **options, return_lse=True, qk_dtype="int8")
    for one, other in zip(answer, expected, strict=True):
        assert torch.equal(one, other)
    assert_near(answer, fa3.reference(*x.dequantize(), **options), dtype)


def test_gradients_are_those_of_16_bits_with_out_and_lse_of_int8():
    q, k, v = tensors(requires_grad=True)
    out, lse = fa3.flash_attn_fp8_func(q, k, v, causal=True, return_lse=True, qk_dtype="int8")
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    with torch.no_grad():
        expected = ops.backward(dout, dlse, q, k, v, out, lse, None, True)
    for one, other in zip(gradients, expected, strict=True):
        assert torch.equal(one, other)


def test_a_nan_in_k_is_nan_in_every_row_that_sees_its_block_and_in_no_other_head():
    q, k, v = tensors()
    k[1, 100, 1, 3] = math.nan
    out = fa3.flash_attn_fp8_func(q, k, v, block=(64, 64), qk_dtype="int8")
    assert out[1, :, 2:].isnan().all()
    assert out[1, :, :2].isfinite().all()
    assert out[0].isfinite().all()


# flash_attn_func ----------------------------------------------------------------------------------------------------


def one_scale_a_head():
    q, k = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((2, 90, 4, 32), (2, 150, 2, 32)))
    v = torch.randn(2, 150, 2, 48).to(torch.float8_e4m3fn)
    return (q, k, v), {f"{name}_descale": (0.02 + 0.01 * torch.rand(2, 2)) for name in "qkv"}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("by_operator", [False, True])
def test_int8_with_scales_is_attention_of_what_they_stand_for(options, by_operator):
    (q, k, v), scales = one_scale_a_head()
    with ByOperator() if by_operator else nullcontext():
        answer = fa3.flash_attn_func(q, k, v, **scales, **options, return_lse=True)
    q_scale = scales["q_descale"].repeat_interleave(2, dim=1)
    x = dequantize(q, q_scale), dequantize(k, scales["k_descale"]), dequantize(v, scales["v_descale"])
    assert_near(answer, fa3.reference(*x, **options))


@pytest.mark.parametrize(
    ("dtypes", "words"),
    [
        (("i8", "e4m3", "e4m3"), r"^q, k and v have dtypes torch\.int8, .*: torch\.int8 must be that of both q and k"),
        (("e4m3", "i8", "e4m3"), r"^q, k and v have dtypes .*: torch\.int8 must be that of both q and k"),
        (("i8", "i8", "bf16"), r"^q, k and v have dtypes .*, beside v of torch\.float8_e4m3fn"),
        (("i8", "i8", "i8"), r"^v has dtype torch\.int8: allowed are .*torch\.float8_e4m3fn$"),
        (("e4m3", "e4m3", "i8"), r"^v has dtype torch\.int8: allowed are"),
        (("u8", "u8", "e4m3"), r"^q has dtype torch\.uint8: allowed are .*, and torch\.int8 of q and k beside v of"),
    ],
    ids=str,
)
@pytest.mark.parametrize("by_operator", [False, True])
def test_mixtures_are_refused_with_words(dtypes, words, by_operator):
    names = {"i8": torch.int8, "u8": torch.uint8, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}
    qkv = [x.float().to(names[name]) for x, name in zip(one_scale_a_head()[0], dtypes, strict=True)]
    with ByOperator() if by_operator else nullcontext(), pytest.raises(TypeError, match=words):
        fa3.flash_attn_func(*qkv)


def test_qv_beside_int8_is_refused():
    with pytest.raises(TypeError, match=r"^qv is given, and q has dtype torch\.int8"):
        fa3.flash_attn_func(*one_scale_a_head()[0], qv=torch.randn(2, 90, 4, 48))


@pytest.mark.parametrize("wants", ["v", "k_descale", "sink"])
def test_gradients_of_int8_are_refused_with_a_word_on_what_has_some(wants):
    qkv, scales = one_scale_a_head()
    arguments = {**dict(zip("qkv", qkv, strict=True)), **scales, "sink": SINK.clone()}
    arguments[wants].requires_grad_()
    with pytest.raises(NotImplementedError, match="flash_attn_fp8_func"):
        fa3.flash_attn_func(**arguments)


# Operators and descriptions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [64, 0, -1])
def test_the_operator_that_quantizes_passes_opcheck(rows):
    x = torch.randn(2, 70, 3, 48).half()
    call = (x, *rope_of(90, 48), rows, True, 3, True, 20, False, False, "int8")
    torch.library.opcheck(torch.ops.fa3.quantize.default, call)


def test_operators_pass_opcheck():
    q, k, v = tensors(requires_grad=True)
    options = schemas.flatten(Options(fp8=Fp8(q_block=64, k_block=128, v_transposed=True)))
    call = (q, k, v, None, None, False, 5, "block", "int8", None, True, *options)
    torch.library.opcheck(torch.ops.fa3.fp8_forward_lse.default, call)
    x = quantized()
    options = schemas.flatten(Options(softcap=3.0, fp8=fp8_ops.fp8_options(x, "fp16", None)))
    # As with e4m3, of which the test of the schema wants products with numbers.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.forward_options, (x.q, x.k, x.v, None, True, *options), test_utils=checks)


def test_torch_compile_needs_no_graph_break():
    torch._dynamo.reset()
    qkv = tensors()

    def attend(q, k, v):
        x = fa3.quantize_qkv(q, k, v, qk_dtype="int8")
        return fa3.flash_attn_quantized_func(x) + fa3.flash_attn_fp8_func(q, k, v, causal=True, qk_dtype="int8")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*qkv), attend(*qkv))


def problem_of(x: QuantizedQKV):
    return check_forward(x.q, x.k, x.v, options=Options(fp8=fp8_ops.fp8_options(x, "bf16", None)))


def test_a_problem_and_its_plan_say_so():
    problem, other = problem_of(quantized()), problem_of(fa3.quantize_qkv(*tensors()))
    assert (problem.dtype, problem.qk_dtype, other.qk_dtype) == ("e4m3", "int8", "")
    planned = plan(problem, H200)
    # Of V^T the same kernels ship.
    transposed = plan(replace(problem, v_transposed=True), H200).spec
    assert transposed == replace(plan(replace(other, v_transposed=True), H200).spec, qk_dtype="int8")
    assert computes(planned.spec, problem)
    assert not computes(planned.spec, other)
    assert "q and k are int8: tensor cores add their products exactly, in int32" in planned.reasons
    for changes, words in (
        ({"qk_dtype": "int4"}, "^qk_dtype='int4': allowed are 'int8'"),
        (
            {"dtype": "bf16", "out_dtype": "", "q_block": 0, "k_block": 0},
            "^out_dtype, .*'int8'.*: go with dtype='e4m3'",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            replace(problem, **changes)


def test_the_backend_launches_a_kernel_of_int8_with_addresses_and_strides_of_bytes(monkeypatch):
    kernel = recorder.install(monkeypatch)
    (q, k, v), scales = one_scale_a_head()
    out = hopper.forward(q, k, v, None, False, False, Options(fp8=Fp8(*scales.values())))[0]
    assert out.dtype is torch.bfloat16
    assert kernel.last["spec"].qk_dtype == "int8"
    assert [kernel.last[name] for name in "qkv"] == [x.data_ptr() for x in (q, k, v)]
    assert recorder.strides_of(kernel.last, "q") == (90 * 4 * 32, 4 * 32, 32)
    other = [x.to(torch.float8_e4m3fn) for x in (q, k)]
    hopper.forward(*other, v, None, False, False, Options(fp8=Fp8(*scales.values())))
    assert kernel.last["spec"].qk_dtype == ""


def test_explain_shows_what_q_k_and_v_are(capsys):
    arguments = ["explain", "--shape", "2,8192,8,128", "--dtype", "e4m3", "--qk-dtype", "int8"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "q    (2, 8192, 8, 128) int8\n" in out
    assert "v    (2, 8192, 8, 128) e4m3\n" in out
    assert "forward_e4m3_d128" in out
    assert "q and k are int8" in out
    assert main([*arguments[:3], "--qk-dtype", "int8"]) == 2
    assert "--qk-dtype: goes with --dtype e4m3, not bf16" in capsys.readouterr().err


# What it gains ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[(64, 0.65), (128, 0.8)], ids="d={0[0]}".format)
def errors(request):
    """Errors of the paper's data by what q and k are and whether they are rotated, and what int8 is said to gain."""
    head_dim, ratio = request.param
    q, k, v = make_inputs("paper", (1, 1024, 2, head_dim), dtype=torch.bfloat16)
    expected, found = exact(q, k, v), {}
    for qk_dtype in ("e4m3", "int8"):
        for incoherent in (False, True):
            x = fa3.quantize_qkv(q, k, v, incoherent=incoherent, qk_dtype=qk_dtype)
            found[qk_dtype, incoherent] = rmse(emulate(x), expected)
    return found, ratio


def test_rotated_int8_has_the_smaller_error(errors):
    found, ratio = errors
    assert found["int8", True] < ratio * found["e4m3", True]


def test_outliers_that_are_not_rotated_cost_int8_what_it_gains(errors):
    found, _ = errors
    assert found["int8", False] > 1.2 * found["int8", True]
