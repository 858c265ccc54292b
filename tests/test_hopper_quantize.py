"""How the Hopper backend launches quantization: with the kernel on the host, against the definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from fa3 import quantization
from fa3.backends import hopper, hopper_quantize
from fa3.plan import H200
from quantize_on_host import HostStore


@pytest.fixture
def store(monkeypatch):
    """The store whose kernels are launched, for tensors of the CPU."""
    kernels = HostStore()
    monkeypatch.setattr(hopper_quantize, "default_store", lambda: kernels)
    monkeypatch.setattr(hopper_quantize, "_known", {})
    monkeypatch.setattr(hopper, "device_facts", lambda device: H200)
    monkeypatch.setattr(hopper, "_current_device", lambda: -1)  # what a CPU tensor says of its device
    monkeypatch.setattr(hopper, "_current_stream", lambda device: 0)
    return kernels


def assert_agrees(x, exact=True, **options):
    values, scale = hopper_quantize.quantize_tensor(x, **options)
    expected, expected_scale = quantization.quantize_tensor(x, **options)
    assert values.shape == expected.shape
    assert values.is_contiguous()
    torch.testing.assert_close(scale, expected_scale, rtol=0 if exact else 4e-7, atol=0)
    # Where products and sums may be fused some values fall on the other side of a tie.
    differs = (values.float() - expected.float()).abs() > 0
    assert differs.sum() <= (0 if exact else values.numel() / 1000)
    return values, scale


@pytest.mark.parametrize("rows", [64, "head", "tensor"])
def test_q_is_rotated_with_any_kind_of_scale(store, rows):
    assert_agrees(torch.randn(2, 150, 3, 64).bfloat16(), rows=rows, rotate=True, seed=5)
    assert [spec.scales for spec in store.specs] == (["block"] if rows == 64 else ["amax", "given"])


@pytest.mark.parametrize("rows", [128, "head"])
def test_v_is_transposed(store, rows):
    values, _ = assert_agrees(torch.randn(2, 70, 3, 64).half(), rows=rows, transpose=True)
    assert values.shape == (2, 3, 64, 80)


@pytest.mark.parametrize("rows", [64, "head"])
def test_scales_of_v_are_powers_of_two_where_asked_for_and_remembered_apart(store, rows):
    x = torch.randn(2, 70, 3, 64).half()
    _, rounded = assert_agrees(x, rows=rows, power_of_two=True)
    _, plain = assert_agrees(x, rows=rows)
    assert not torch.equal(rounded, plain)


def test_a_rotary_embedding_begins_at_the_first_position(store):
    x = torch.randn(1, 70, 2, 64).bfloat16()
    angle = torch.rand(100, 32)
    tables = angle.cos(), angle.sin()
    assert_agrees(x, exact=False, rows=64, rotate=True, rope=tables, first_position=30)
    halves = tuple(table.bfloat16() for table in tables)
    assert_agrees(x, exact=False, rows=64, rotate=True, rope=halves, first_position=30)
    # Of two dtypes, and not contiguous: both are read as float32.
    mixed = halves[0], torch.cat(tables[::-1], dim=1)[:, :32]
    assert_agrees(x, exact=False, rows=64, rotate=True, rope=mixed, first_position=30)
    assert [spec.rope for spec in store.specs] == ["fp32", "same", "fp32"]


def test_cos_and_sin_must_reach_the_last_position(store):
    x, tables = torch.randn(1, 70, 2, 64).bfloat16(), (torch.ones(80, 32), torch.zeros(80, 32))
    with pytest.raises(ValueError, match=r"cos has shape \(80, 32\).*need at least \(90, 32\)"):
        hopper_quantize.quantize_tensor(x, rows=64, rope=tables, first_position=20)
    with pytest.raises(ValueError, match=r"cos has shape \(80, 16\)"):
        hopper_quantize.quantize_tensor(x, rows=64, rope=(tables[0][:, :16], tables[1]))


def test_views_are_read_where_they_lie_and_what_cannot_be_is_copied(store):
    packed = torch.randn(2, 70, 3, 2, 64).bfloat16()
    for x in (*packed.unbind(2), packed[:, :, 1, :, :32], packed[:, :, 1, :, 8:40]):
        assert_agrees(x, rows=64)
    # Rows whose columns lie apart, and rows that do not begin at multiples of 16 bytes.
    assert_agrees(torch.randn(2, 2, 64, 70).bfloat16().permute(0, 3, 1, 2), rows=64)
    assert_agrees(torch.randn(2, 70, 2, 65).bfloat16()[..., :64], rows=64)
    flat = torch.randn(2 * 70 * 2 * 64 + 1).bfloat16()
    for start in (0, 1):
        assert_agrees(flat[start : start + 2 * 70 * 2 * 64].view(2, 70, 2, 64), rows=64)


def test_a_call_like_one_before_loads_nothing(store):
    for _ in range(3):
        assert_agrees(torch.randn(1, 70, 2, 64).bfloat16(), rows=64, rotate=True)
    assert len(store.specs) == 1


@pytest.mark.parametrize("rows", [64, "head", "tensor"])
def test_nothing_gives_nothing_and_loads_no_kernel(store, rows):
    for shape in ((2, 0, 3, 64), (0, 10, 3, 64), (2, 10, 0, 64)):
        assert_agrees(torch.empty(shape).bfloat16(), rows=rows, rotate=True)
        assert_agrees(torch.empty(shape).bfloat16(), rows=rows, transpose=True)
        assert_agrees(torch.empty(shape).bfloat16(), rows=rows, power_of_two=True)
    assert store.specs == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_of_pytorch_changes_no_scale(store, dtype, default_dtype):
    x = torch.empty(2, 0, 3, 64).bfloat16()
    default_dtype(dtype)
    assert_agrees(x, rows="head", power_of_two=True)
    assert_agrees(x, rows="head", rotate=True)


def test_float32_has_no_kernel(store):
    with pytest.raises(TypeError, match=r"float32: the kernel reads torch\.float16 and torch\.bfloat16"):
        hopper_quantize.quantize_tensor(torch.randn(1, 70, 2, 64), rows=64)
