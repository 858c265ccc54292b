"""Caps and modifications of scores, compiled for the host and run on the CPU, against plain definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

cutlass = pytest.importorskip("cutlass")

import score_wrappers as wrappers  # noqa: E402
from bricks_on_host import call, floats, ints  # noqa: E402
from fa3 import mods  # noqa: E402
from fa3.kernels.parts import scores  # noqa: E402
from fa3.mods import MaskMod, ScoreMod  # noqa: E402

INF, NAN = math.inf, math.nan
REGISTERS = wrappers.COLUMNS // 2

# tanh ---------------------------------------------------------------------------------------------


def tanh(values: Tensor) -> Tensor:
    results = floats(len(values))
    call(wrappers.tanh, values, results, len(values))
    return results


def assert_is_tanh(values: Tensor) -> None:
    found = tanh(values)
    assert (found.double() - values.double().tanh()).abs().max() < 2e-7
    assert found.abs().max() <= 1


def test_tanh_is_right_to_float32_of_one_where_it_bends():
    assert_is_tanh(torch.linspace(-20, 20, 400_001))


def test_tanh_is_right_at_every_magnitude():
    magnitudes = torch.logspace(-38, 38, 20_001).clamp(max=3.4e38)
    assert_is_tanh(torch.cat([magnitudes, -magnitudes]))


def test_tanh_of_zero_infinity_and_nan_is_what_it_should_be():
    largest = torch.finfo(torch.float32).max
    given = torch.tensor([0.0, -0.0, INF, -INF, largest, -largest, 1e-45])
    assert tanh(given).tolist() == [0, 0, 1, -1, 1, -1, 0]
    assert tanh(torch.tensor([NAN])).isnan().all()


def test_a_cap_is_tanh_of_every_scaled_score_of_both_rows():
    values = 30 * torch.randn(50, REGISTERS)
    values[0, :3] = torch.tensor([INF, -INF, 1e30])
    results = floats(*values.shape)
    call(wrappers.capped, values, results, len(values), 0.125)
    torch.testing.assert_close(results.double(), (0.125 * values.double()).tanh(), rtol=0, atol=2e-7)


# modifications ------------------------------------------------------------------------------------

#: (first row, query heads in a head of tiles, head of tiles, batch, first key)
CASES = [(0, 1, 2, 1, 0), (0, 1, 5, 0, 32), (64, 3, 1, 1, 224), (0, 2, 3, 0, 96), (128, 8, 0, 1, 64), (64, 4, 1, 0, 0)]

# The instruction's layout, from its description in the PTX manual.
_THREAD, _REGISTER = torch.meshgrid(torch.arange(128), torch.arange(REGISTERS), indexing="ij")
ROW_OF = 16 * (_THREAD // 32) + _THREAD % 32 // 4 + 8 * (_REGISTER // 2 % 2)
KEY_OF = 8 * (_REGISTER // 4) + 2 * (_THREAD % 4) + _REGISTER % 2


def places() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch, head, query and key of each register of each thread in all CASES."""
    first_row, group, head, batch, first_key = torch.tensor(CASES)[:, :, None, None].unbind(1)
    row = first_row + ROW_OF
    zero = torch.zeros_like(row)
    return batch + zero, head * group + row % group, row // group, first_key + KEY_OF


def changed(mod: ScoreMod | MaskMod | str, is_mask: bool) -> Tensor:
    """What the kernel makes of scores, by a modification that reads one tensor of two dims, or by a name without."""
    results = floats(len(CASES), 128, REGISTERS)
    aux, codes, name = ints(1, 1), "", mod
    if not isinstance(mod, str):
        (aux,) = mod.aux
        codes, name = f"{mods.AUX_DTYPES[aux.dtype]}2", mod.cute
    cases = torch.tensor(CASES, dtype=torch.int32)
    call(wrappers.changed_tiles, cases, aux, results, len(CASES), *aux.shape, constants=(name, codes, is_mask))
    return results


def test_a_modification_gets_the_scaled_score_and_its_place():
    batch, head, query, key = places()
    assert query.max() < 64
    assert head.max() < 8
    expected = 0.5 * _REGISTER + 16 * (key + 256 * (query + 64 * (head + 8 * batch)))
    assert expected.max() < 2**24, "exact in float32"
    assert torch.equal(changed("score_wrappers:name_place", is_mask=False), expected)


def test_a_mask_hides_where_its_function_says_no():
    batch, head, query, key = places()
    visible = (key + 2 * query + 3 * head + 5 * batch) % 7 < 4
    expected = torch.where(visible, _REGISTER.float(), -INF)
    assert torch.equal(changed("score_wrappers:sees_some", is_mask=True), expected)


def test_modifications_read_their_tensors_in_place():
    bias = mods.relative_bias(torch.randn(8, 2 * 100 + 1))
    expected = bias.torch(0.5 * _REGISTER, *places(), *bias.aux)
    assert torch.equal(changed(bias, is_mask=False), expected)

    document = mods.document(torch.randint(0, 3, (2, 256), dtype=torch.int32))
    expected = torch.where(document.torch(*places(), *document.aux), _REGISTER.float(), -INF)
    assert torch.equal(changed(document, is_mask=True), expected)
    assert 0.1 < (expected == -INF).float().mean() < 0.9


def test_tensors_of_every_dtype_and_rank_are_read_row_by_row():
    sizes = (3, 5, 7)
    given = torch.randn(3), torch.randint(-(2**31), 2**31, (3, 5), dtype=torch.int32), torch.randn(3, 5, 7)
    results = floats(3), ints(3, 5), floats(3, 5, 7)
    call(wrappers.elements_of_aux, *given, *results, *sizes)
    for tensor, result in zip(given, results, strict=True):
        assert torch.equal(tensor, result)


def test_a_modification_is_found_by_module_and_name():
    assert scores.find_mod("") is None
    assert scores.find_mod("score_wrappers:sees_some") is wrappers.sees_some
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        scores.find_mod("no_such_module:sees_some")
    with pytest.raises(AttributeError, match="sees_nothing"):
        scores.find_mod("score_wrappers:sees_nothing")
