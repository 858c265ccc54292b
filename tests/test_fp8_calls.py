"""flash_attn_func of e4m3 q, k and v: scales of heads as the official interface has them, and all that is refused."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch

import fa3
from fa3 import fp8_ops, ops, schemas
from fa3.block_masks import create_block_mask
from fa3.mods import alibi, alibi_slopes
from fa3.options import Fp8, Options
from fa3.problem import check_forward
from fa3.quantization import dequantize, to_e4m3
from fp8_inputs import DOCUMENT, OPTIONS, SINK, ByOperator, assert_near, tensors


def one_scale_a_head():
    """e4m3 q, k, v and scales as the official interface takes them."""
    q, k, v = (to_e4m3(30 * x.float()) for x in tensors())
    scales = {f"{name}_descale": (0.02 + 0.03 * torch.rand(2, 2)) for name in "qkv"}
    return (q, k, v), scales


def expected_of(q, k, v, scales, **options):
    scales = {name: scales[f"{name}_descale"] for name in "qkv"}
    q_scale = scales["q"] if scales["q"].shape[1] == 4 else scales["q"].repeat_interleave(2, dim=1)
    x = dequantize(q, q_scale), dequantize(k, scales["k"]), dequantize(v, scales["v"])
    return fa3.reference(*x, **options)


# The interface of FlashAttention-3 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("by_operator", [False, True])
def test_e4m3_with_scales_is_attention_of_what_they_stand_for(options, by_operator):
    qkv, scales = one_scale_a_head()
    with ByOperator() if by_operator else nullcontext():
        answer = fa3.flash_attn_func(*qkv, **scales, **options, return_lse=True)
    assert_near(answer, expected_of(*qkv, scales, **options))


def test_scales_may_have_any_strides_and_be_of_query_heads():
    qkv, scales = one_scale_a_head()
    scales = {
        "q_descale": torch.rand(2, 4) / 20,
        "k_descale": torch.tensor(0.03).expand(2, 2),
        "v_descale": scales["v_descale"].T,
    }
    assert_near(fa3.flash_attn_func(*qkv, **scales, return_lse=True), expected_of(*qkv, scales))


def test_scales_that_are_not_given_are_1():
    qkv = [to_e4m3(x.float()) for x in tensors()]
    ones = {f"{name}_descale": torch.ones(2, 2) for name in "qkv"}
    plain = fa3.flash_attn_func(*qkv, return_lse=True)
    assert_near(plain, expected_of(*qkv, ones))
    for name in ones:
        assert torch.equal(fa3.flash_attn_func(*qkv, **{name: ones[name]}), plain[0])
    with ByOperator():
        assert torch.equal(fa3.flash_attn_func(*qkv), plain[0])


def test_packed_e4m3_is_the_same_as_its_parts():
    qkv = to_e4m3(torch.randn(2, 50, 8, 32))
    scales = {f"{name}_descale": torch.rand(2, 2) for name in "qkv"}
    out = fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=4, causal=True, **scales)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, fa3.flash_attn_func(*qkv.split([4, 2, 2], dim=2), causal=True, **scales))
    three = to_e4m3(torch.randn(2, 50, 3, 4, 32))
    assert torch.equal(fa3.flash_attn_qkvpacked_func(three), fa3.flash_attn_func(*three.unbind(2)))


def bad(**changes):
    def spoil():
        qkv, scales = one_scale_a_head()
        arguments = {**dict(zip("qkv", qkv, strict=True)), **scales}
        return arguments | {name: change(arguments) for name, change in changes.items()}

    return spoil


def of_dtype(dtype):
    return {name: lambda x, name=name: x[name].to(torch.float32).to(dtype) for name in "qkv"}


REFUSED = {
    "a scale that is no tensor": (
        bad(q_descale=lambda x: 1.0),
        TypeError,
        r"^q_descale must be a torch\.Tensor, not float",
    ),
    "a scale in 16 bits": (
        bad(k_descale=lambda x: x["k_descale"].half()),
        TypeError,
        r"^k_descale has dtype torch\.float16: must be torch\.float32",
    ),
    "scales of 16-bit inputs": (
        bad(**of_dtype(torch.float16)),
        TypeError,
        r"^q_descale is given, and q has dtype torch\.float16: scales go with .*e4m3fn",
    ),
    "a scale on another device": (
        bad(v_descale=lambda x: x["v_descale"].to("meta")),
        ValueError,
        "^v_descale is on device meta, q on cpu",
    ),
    "scales of too many heads": (
        bad(k_descale=lambda x: torch.ones(2, 4)),
        ValueError,
        r"^k_descale has shape \(2, 4\): must be \(batch, heads_kv\) = \(2, 2\)",
    ),
    "a scale for each of three heads": (
        bad(q_descale=lambda x: torch.ones(2, 3)),
        ValueError,
        r"^q_descale has shape \(2, 3\): must be \(batch, heads_kv\) or \(batch, heads_q\) = \(2, 2\) or \(2, 4\)$",
    ),
    "scales of blocks": (bad(v_descale=lambda x: torch.ones(2, 2, 2)), ValueError, r"^v_descale has shape \(2, 2, 2\)"),
    "e5m2": (
        bad(**of_dtype(torch.float8_e5m2)),
        TypeError,
        r"^q has dtype torch\.float8_e5m2: allowed are .*torch\.float8_e4m3fn",
    ),
    "a mix": (
        bad(k=lambda x: x["k"].to(torch.bfloat16)),
        TypeError,
        "^q, k and v have dtypes .*e4m3fn, .*bfloat16.*: must be the same",
    ),
    "qv": (
        bad(qv=lambda x: torch.randn(2, 90, 4, 48)),
        TypeError,
        "^qv is given, and q has dtype .*e4m3fn: qv goes with 16 bits",
    ),
    "a V^T of one's own": (
        bad(v=lambda x: x["v"].permute(0, 2, 3, 1).contiguous()),
        ValueError,
        r"^v has shape \(2, 2, 48, 150\).*looks transposed.*in rows.*quantize_qkv\(v_layout='transposed'\)",
    ),
    "a head dim of 24": (
        bad(q=lambda x: x["q"][..., :24], k=lambda x: x["k"][..., :24]),
        ValueError,
        "^head_dim .* is 24: allowed with e4m3 are the multiples of 16 from 16 to 256",
    ),
    "a head dim of v of 40": (
        bad(v=lambda x: x["v"][..., :40]),
        ValueError,
        "^head_dim_v .* is 40: allowed with e4m3 are the multiples of 16",
    ),
    "a head dim of v of 320": (
        bad(v=lambda x: to_e4m3(torch.randn(2, 150, 2, 320))),
        ValueError,
        "^head_dim_v .* is 320: .* from 16 to 256",
    ),
}


@pytest.mark.parametrize(("spoil", "error", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("by_operator", [False, True])
def test_what_does_not_go_with_e4m3_is_named_either_way(spoil, error, words, by_operator):
    arguments = spoil()
    with ByOperator() if by_operator else nullcontext(), pytest.raises(error, match=words):
        fa3.flash_attn_func(**arguments)


@pytest.mark.parametrize("wants", ["q", "v", "k_descale", "sink"])
def test_gradients_of_e4m3_are_refused_with_a_word_on_what_has_some(wants):
    qkv, scales = one_scale_a_head()
    arguments = {**dict(zip("qkv", qkv, strict=True)), **scales, "sink": SINK.clone()}
    arguments[wants].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^there are no gradients of a call in e4m3 or int8.*fp8_func"):
        fa3.flash_attn_func(**arguments)
    with torch.no_grad():
        fa3.flash_attn_func(**arguments)


def test_the_backward_operator_refuses_e4m3_too():
    (q, k, v), _ = one_scale_a_head()
    out, lse = ops.forward_lse(q, k, v, None, False)
    with pytest.raises(NotImplementedError, match="flash_attn_fp8_func"):
        ops.backward(out, None, q, k, v, out, lse, None, False)


def test_the_schema_has_the_fields_and_defaults_of_fp8():
    arguments = ops.forward_options._schema.arguments[5 + schemas.FP8 :]
    assert [x.name for x in arguments] == list(Fp8._fields)
    defaults = {**Fp8()._asdict(), "out_dtype": ""}
    assert [x.default_value for x in arguments] == list(defaults.values())


@pytest.mark.parametrize(
    "options",
    [
        Options(fp8=Fp8()),
        Options(fp8=Fp8(q_scale=torch.ones(2, 2))),
        Options(
            score_mod=alibi(alibi_slopes(4)),
            fp8=Fp8(None, torch.ones(2, 2, 3), torch.ones(2, 2, 3), torch.ones(2, 2), 64, 128, True, "fp16", False),
        ),
        Options(block_mask=create_block_mask(DOCUMENT, 2, None, 90, 150), fp8=Fp8(two_level=True)),
    ],
    ids=["defaults", "one scale", "all and a mod", "a block mask"],
)
def test_fp8_survives_the_way_through_an_operator(options):
    again = schemas.unflatten(schemas.flatten(options))
    assert all(x is y or x == y for x, y in zip(again.fp8, options.fp8, strict=True))
    assert (again.block_mask is None) == (options.block_mask is None)
    assert schemas.unflatten(schemas.flatten(options._replace(fp8=None))).fp8 is None


@pytest.mark.parametrize("operator", [ops.forward_options, ops.forward_lse_options], ids=str)
@pytest.mark.parametrize("v_layout", ["row", "transposed"])
def test_operators_pass_opcheck_with_e4m3(operator, v_layout):
    x = fa3.quantize_qkv(*tensors(), v_layout=v_layout)
    options = schemas.flatten(Options(softcap=3.0, fp8=fp8_ops.fp8_options(x, "fp16", None)))
    # The test of the schema multiplies its inputs by numbers, which e4m3 tensors do not let happen.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, (x.q, x.k, x.v, None, True, *options), test_utils=checks)


# Descriptions -------------------------------------------------------------------------------------------------------


def test_a_call_is_described_with_what_goes_with_e4m3():
    x = fa3.quantize_qkv(*tensors(), block=(128, 64), v_layout="transposed")
    options = Options(fp8=fp8_ops.fp8_options(x, "fp16", True))
    problem = check_forward(x.q, x.k, x.v, options=options)
    assert (problem.dtype, problem.out_dtype, problem.q_block, problem.k_block) == ("e4m3", "fp16", 128, 64)
    assert (problem.v_transposed, problem.two_level, problem.head_dim_v, problem.seqlen_k) == (True, True, 48, 150)
    (q, k, v), _ = one_scale_a_head()
    problem = check_forward(q, k, v)
    assert (problem.out_dtype, problem.q_block, problem.v_transposed, problem.two_level) == ("bf16", 0, False, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"dtype": "bf16"},
            r"^out_dtype, q_block, .*\('bf16', 64, 128, False, None, ''\): go with dtype='e4m3', not 'bf16'",
        ),
        ({"out_dtype": ""}, "^out_dtype='': allowed beside e4m3 are bf16, fp16"),
        ({"out_dtype": "fp32"}, "^out_dtype='fp32': allowed beside e4m3"),
        ({"k_block": 0}, "^q_block=64, k_block=0: allowed are 64 and 128 of q with 64, 96 and 128 of k"),
        ({"q_block": 96}, "^q_block=96, k_block=128: allowed are"),
        ({"qv": True}, "^qv beside dtype='e4m3'"),
        ({"head_dim": 72}, "^head_dim .* is 72: allowed with e4m3 are the multiples of 16"),
    ],
    ids=str,
)
def test_fields_that_do_not_go_together_are_named(changes, words):
    x = fa3.quantize_qkv(*tensors(), block=(64, 128))
    problem = check_forward(x.q, x.k, x.v, options=Options(fp8=fp8_ops.fp8_options(x, "bf16", None)))
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(problem, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"q_scale": torch.ones(2, 2)},
            r"^q_descale has shape \(2, 2\): must be \(batch, heads_q, ceil\(seqlen_q / 64\)\) = \(2, 4, 2\)",
        ),
        ({"v_scale": torch.ones(2, 2, 3)}, r"^v_descale has shape \(2, 2, 3\): must be .* = \(2, 2, 2\)"),
        ({"v_scale_max": None}, "^v_scale_max is None: must be given"),
        ({"k_scale": None}, "^k_descale is None: must be given beside k_block=128"),
        ({"v_scale": None}, "^v_descale is None: must be given beside k_block=128"),
        ({"v_scale": None, "v_scale_max": None}, "^v_descale is None"),
        ({"v_scale_max": torch.ones(2, 4)}, r"^v_scale_max has shape \(2, 4\)"),
        ({"v_transposed": True}, r"^v has shape \(2, 150, 2, 48\): must be V\^T .* = \(2, 2, 2, 160\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_scales_of_blocks_that_do_not_fit_are_named(changes, words):
    x = fa3.quantize_qkv(*tensors(), block=(64, 128))
    fp8 = fp8_ops.fp8_options(x, "bf16", None)._replace(**changes)
    with pytest.raises(ValueError, match=words):
        check_forward(x.q, x.k, x.v, options=Options(fp8=fp8))


def test_flash_attention_2_is_not_asked_for_e4m3():
    from fa3.backends import sdpa

    (q, k, v), _ = one_scale_a_head()
    assert sdpa.why_not(check_forward(q, k, v)) == "dtype e4m3"


def test_torch_compile_takes_the_official_call():
    torch._dynamo.reset()
    qkv, scales = one_scale_a_head()

    def attend(q, k, v, scales):
        return fa3.flash_attn_func(q, k, v, causal=True, **scales)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*qkv, scales), attend(*qkv, scales))
