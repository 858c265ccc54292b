"""The quantize kernel: on the host CPU against its definition, and its machine code."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fa3 import quantization
from fa3.compiler import inspect
from fa3.compiler.build import build
from fa3.compiler.target import Target
from fa3.spec import QuantizeSpec

cutlass = pytest.importorskip("cutlass")

import quantize_wrappers as wrappers  # noqa: E402
from bricks_on_host import call, floats, ints  # noqa: E402
from quantize_on_host import kernel_on_host  # noqa: E402

HEAD_DIMS = tuple(range(16, 257, 16))
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def on_host(x: Tensor, spec: QuantizeSpec, rope=None, first_position: int = 0, seed: int = 0, amax=None):
    """What the kernel of a spec makes of x, with results filled with what no correct one is."""
    batch, seqlen, heads, head_dim = x.shape
    out = torch.full(x.shape, 0x5A, dtype=torch.uint8)
    out_strides = out.stride()[:3]
    if spec.transpose:
        slots = seqlen + -seqlen % 16
        out = torch.full((batch, heads, head_dim, slots), 0x5A, dtype=torch.uint8)
        out_strides = out.stride(0), out.stride(2), out.stride(1)
    blocks = (-(-seqlen // spec.rows),) if spec.scales == "block" else ()
    scale = floats(batch, heads, *blocks)
    of_heads = torch.zeros(batch, heads) if amax is None else amax
    words = quantization.sign_words(seed, head_dim) if spec.rotate else (0,) * 8
    kernel_on_host(spec)(
        *(tensor.data_ptr() for tensor in (x, out, scale, of_heads, *(rope or (x, x)))),
        *(0, batch, seqlen, heads, first_position, 0),
        *(x.stride()[:3], out_strides, of_heads.stride()),
        words,
        quantization.scale_factor(spec.hadamard_block, spec.out),
    )
    return out.view(quantization.QK_DTYPES[spec.out]), scale, of_heads


def agree(found: Tensor, expected: Tensor) -> None:
    """Equal as numbers, NaN to NaN."""
    assert found.shape == expected.shape
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def strided(batch: int, seqlen: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Random rows with gaps of NaN between them."""
    whole = torch.full((batch, seqlen + 1, heads + 1, head_dim + 8), math.nan, dtype=dtype)
    x = whole[:, :seqlen, :heads, :head_dim]
    x.copy_(torch.randn(x.shape) * torch.logspace(-2, 2, head_dim))
    return x


def test_the_hosts_rounding_is_that_of_pytorch():
    values = torch.cat(
        [
            torch.randn(4096) * 2.0 ** torch.randint(-14, 10, (4096,)),
            torch.arange(-520, 521) / 512,
            torch.arange(256, dtype=torch.uint8).view(quantization.E4M3).float(),
            torch.tensor([448.0, 464.0, 463.0, 465.0, 1e30, -1e30, math.nan, 0.0, -0.0, 1e-40, 2.0**-10, 3 * 2.0**-10]),
        ]
    )
    values = torch.cat([values, torch.zeros(-len(values) % 4)])
    words = ints(len(values) // 4)
    call(wrappers.round_to_e4m3, values, words, len(words))
    agree(words.view(quantization.E4M3), quantization.to_e4m3(values))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_signs_are_those_of_the_definition(head_dim):
    spec = QuantizeSpec("bf16", head_dim, rotate=True)
    for seed in (0, 1, 2**31 - 1):
        words = torch.tensor(quantization.sign_words(seed, head_dim), dtype=torch.int32)
        results = floats(2, head_dim)
        call(wrappers.signs_of_columns, words, results, constants=(spec,))
        expected = quantization.signs(seed, head_dim)
        assert torch.equal(results, expected.expand(2, -1))


@pytest.mark.parametrize("numerator", [448.0, 127.0])
@pytest.mark.parametrize("error", [0.0, 2.0**-22, -(2.0**-22), 2.0**-23, -(2.0**-23)])
def test_448_or_127_over_amax_is_correctly_rounded(error, numerator):
    edges = torch.tensor([2.0**-40, 448.0, 1.0, 2.0**60, 2.0**60 * 1.0000001, 2.0**126, torch.finfo().max])
    values = torch.cat([edges, (1 + torch.rand(100_000)) * 2.0 ** torch.randint(-40, 127, (100_000,))])
    results = floats(len(values))
    call(wrappers.inverses, values, results, len(values), error, constants=(numerator,))
    assert torch.equal(results, torch.div(torch.tensor(numerator).expand_as(values), values))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_transform_mixes_as_many_columns_as_that_of_the_definition(head_dim):
    assert QuantizeSpec("bf16", head_dim, rotate=True).hadamard_block == quantization.hadamard_block(head_dim)
    assert QuantizeSpec("bf16", head_dim).hadamard_block == 1


# One of each way to cut a row in pieces, and of 96 rows with threads that have none.
@pytest.mark.parametrize(
    ("head_dim", "rows"),
    [*((head_dim, 64) for head_dim in (16, 32, 48, 64, 96, 128, 192, 256)), (80, 96), (128, 96), (208, 96)],
)
def test_rotated_rows_are_those_of_the_definition_bit_for_bit(head_dim, rows):
    spec = QuantizeSpec("bf16", head_dim, rows, rotate=True)
    x = strided(2, 100, 2, head_dim, torch.bfloat16)
    found, scale, _ = on_host(x, spec, seed=3)
    expected, expected_scale = quantization.quantize_tensor(x, rows=rows, rotate=True, seed=3)
    agree(scale, expected_scale)
    agree(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "rows"), [(16, 64), (48, 64), (128, 128), (48, 96), (96, 96), (128, 96), (240, 96)]
)
def test_v_in_rows_and_transposed_is_that_of_the_definition(head_dim, rows, dtype):
    for seqlen, transpose in itertools.product((1, 37, 128, 129), (False, True)):
        spec = QuantizeSpec(dtype, head_dim, rows, transpose=transpose)
        x = strided(2, seqlen, 2, head_dim, DTYPES[dtype])
        found, scale, _ = on_host(x, spec)
        expected, expected_scale = quantization.quantize_tensor(x, rows=rows, transpose=transpose)
        agree(scale, expected_scale)
        agree(found, expected)


@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "transposed"])
def test_scales_that_are_powers_of_two_are_those_of_the_definition(transpose):
    spec = QuantizeSpec("bf16", 64, 64, transpose=transpose, power_of_two=True)
    x = strided(1, 64 * 9, 1, 64, torch.bfloat16)
    # Zeros; a power of two times 448, the next number and the one before; the largest numbers there are, and tiny ones.
    for block, largest in enumerate((0.0, 448.0, 450.0, 446.0, 1.75, 2.0**-41, 1e-38, 3e38, torch.inf)):
        rows = x[:, 64 * block : 64 * block + 64]
        rows *= 1e-3 * min(largest, 448.0)
        rows[0, 7, 0, 5] = -largest
    found, scale, _ = on_host(x, spec)
    expected, expected_scale = quantization.quantize_tensor(x, rows=64, transpose=transpose, power_of_two=True)
    agree(scale, expected_scale)
    agree(found, expected)
    assert (torch.frexp(scale).mantissa == 0.5).all()


@pytest.mark.parametrize(
    ("head_dim", "rope", "interleaved"),
    [
        *((16, "fp32", False), (64, "same", False), (96, "fp32", False), (128, "fp32", False)),
        *((48, "same", True), (64, "fp32", True), (256, "fp32", True)),
        (192, "fp32", False),
    ],
)
def test_a_rotary_embedding_is_that_of_the_definition(head_dim, rope, interleaved):
    spec = QuantizeSpec("bf16", head_dim, 64, True, rope, interleaved)
    x = strided(1, 70, 2, head_dim, torch.bfloat16)
    angles = torch.rand(90, head_dim // 2) * 7
    tables = tuple(table.to(torch.float32 if rope == "fp32" else x.dtype) for table in (angles.cos(), angles.sin()))
    found, scale, _ = on_host(x, spec, tables, first_position=20)
    expected, expected_scale = quantization.quantize_tensor(
        x, rows=64, rotate=True, rope=tables, interleaved=interleaved, first_position=20
    )
    # The compiler may fuse a product and a sum.
    torch.testing.assert_close(scale, expected_scale, rtol=4e-7, atol=0)
    difference = (found.float() - expected.float()).abs()
    assert (difference <= expected.float().abs() / 8 + 2.0**-9).all()
    assert (difference > 0).float().mean() < 1e-3


@pytest.mark.parametrize("shared", [False, True], ids=["of a head", "of all"])
def test_two_passes_share_a_scale(shared):
    x = strided(2, 150, 3, 64, torch.bfloat16)
    spec = QuantizeSpec("bf16", 64, rotate=True, scales="amax")
    amax = torch.zeros(1).expand(2, 3) if shared else torch.zeros(2, 3)
    on_host(x, spec, amax=amax)
    found, scale, _ = on_host(x, replace(spec, scales="given"), amax=amax)
    expected, expected_scale = quantization.quantize_tensor(x, rows="tensor" if shared else "head", rotate=True)
    agree(scale, expected_scale)
    agree(found, expected)


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_what_is_not_finite_becomes_nan_and_counts_in_no_scale(rotate):
    spec = QuantizeSpec("bf16", 64, 64, rotate=rotate)
    x = strided(1, 200, 1, 64, torch.bfloat16)
    x[0, 3, 0, 5], x[0, 4, 0, 63], x[0, 70, 0, 1] = math.inf, math.nan, -math.inf
    x[0, 70, 0, 2] = math.nan
    x[0, 128:192] = math.inf
    x[0, 192:] = 0.0
    found, scale, _ = on_host(x, spec)
    expected, expected_scale = quantization.quantize_tensor(x, rows=64, rotate=rotate)
    agree(scale, expected_scale)
    agree(found, expected)


# One of each way to cut a row in pieces.
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize(("head_dim", "rows"), [(16, 64), (48, 96), (64, 64), (128, 96), (192, 64), (256, 64)])
def test_int8_is_that_of_the_definition_bit_for_bit(head_dim, rows, rotate):
    spec = QuantizeSpec("bf16", head_dim, rows, rotate=rotate, out="int8")
    x = strided(2, 100, 2, head_dim, torch.bfloat16)
    # Halves of a step, which go to the even neighbour: the scale of these rows is 1.
    x[0, :64, 0] = torch.randint(-250, 251, (64, head_dim)) / 2
    x[0, 0, 0, 0] = 127.0
    found, scale, _ = on_host(x, spec, seed=3)
    expected, expected_scale = quantization.quantize_tensor(x, rows=rows, rotate=rotate, seed=3, out="int8")
    agree(scale, expected_scale)
    agree(found, expected)
    assert found.dtype is torch.int8
    assert found.int().abs().max() == 127


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e30])
def test_tiny_and_huge_values_in_int8_are_those_of_the_definition(size):
    spec = QuantizeSpec("bf16", 64, 64, rotate=True, out="int8")
    x = (torch.randn(1, 64, 1, 64) * size).bfloat16()
    found, scale, _ = on_host(x, spec)
    expected, expected_scale = quantization.quantize_tensor(x, rows=64, rotate=True, out="int8")
    agree(scale, expected_scale)
    agree(found, expected)


@pytest.mark.parametrize("shared", [False, True], ids=["of a head", "of all"])
def test_two_passes_share_a_scale_of_int8_and_what_is_not_finite_makes_it_nan(shared):
    x = strided(2, 150, 3, 64, torch.bfloat16)
    rows = "tensor" if shared else "head"
    spec = QuantizeSpec("bf16", 64, rotate=True, scales="amax", out="int8")
    for spoiled in (False, True):
        if spoiled:
            x[1, 140, 2, 7] = math.nan
        amax = torch.zeros(1).expand(2, 3) if shared else torch.zeros(2, 3)
        on_host(x, spec, amax=amax)
        found, scale, _ = on_host(x, replace(spec, scales="given"), amax=amax)
        expected, expected_scale = quantization.quantize_tensor(x, rows=rows, rotate=True, out="int8")
        agree(scale, expected_scale)
        assert scale.isnan().sum() == spoiled * (6 if shared else 1)
        means_something = ~scale.isnan()[:, None, :, None].expand_as(found)
        assert torch.equal(found[means_something], expected[means_something])


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_the_scale_of_its_block_of_int8_nan_and_no_other(rotate, what):
    spec = QuantizeSpec("bf16", 64, 64, rotate=rotate, out="int8")
    x = strided(1, 200, 2, 64, torch.bfloat16)
    x[0, 70, 1, 5] = what
    found, scale, _ = on_host(x, spec)
    expected, expected_scale = quantization.quantize_tensor(x, rows=64, rotate=rotate, out="int8")
    agree(scale, expected_scale)
    assert scale.isnan().nonzero().tolist() == [[0, 1, 1]]
    found[0, 64:128, 1] = expected[0, 64:128, 1] = 0
    agree(found, expected)


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e30])
def test_tiny_and_huge_values_are_those_of_the_definition(size):
    spec = QuantizeSpec("bf16", 64, 64, rotate=True)
    x = (torch.randn(1, 64, 1, 64) * size).bfloat16()
    found, scale, _ = on_host(x, spec)
    expected, expected_scale = quantization.quantize_tensor(x, rows=64, rotate=True)
    agree(scale, expected_scale)
    agree(found, expected)


@pytest.mark.parametrize(
    "spec",
    [
        QuantizeSpec("bf16", 128, rotate=True),
        QuantizeSpec("bf16", 256, rotate=True, rope="fp32"),
        QuantizeSpec("bf16", 128, transpose=True, power_of_two=True),
        QuantizeSpec("bf16", 256, power_of_two=True),
        QuantizeSpec("bf16", 128, 96, rotate=True, out="int8"),
    ],
    ids=lambda spec: spec.name,
)
def test_the_machine_code_spills_nothing(spec):
    facts = build(spec, Target(cuda_major=13)).facts
    report = inspect.Report(**{name: facts[name] for name in inspect.Report.__dataclass_fields__})
    assert inspect.check(spec, report) == []
