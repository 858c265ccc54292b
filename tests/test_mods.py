"""Modifications of scores and masks: their twins, their tensors, and the ready-made ones in PyTorch and in CuTe DSL."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import sys
import types

import numpy as np
import pytest
import torch
from torch import Tensor

from fa3 import mods
from fa3.mods import MaskMod, ScoreMod

# Twins ------------------------------------------------------------------------------------------------------------


def double(score, batch, head, q_index, kv_index):
    return score * 2


def triple(score, batch, head, q_index, kv_index):
    return score * 3


def test_making_a_modification_registers_its_pytorch_twin():
    with pytest.raises(ValueError, match="'modified:registers' has no PyTorch twin"):
        mods.twin("modified:registers")
    ScoreMod("modified:registers", double)
    assert mods.twin("modified:registers") is double
    ScoreMod("modified:registers", double)


def test_a_name_has_one_pytorch_twin():
    ScoreMod("modified:one", double)
    with pytest.raises(ValueError, match=r"'modified:one' already has the PyTorch twin .*double.*triple"):
        ScoreMod("modified:one", triple)
    assert mods.twin("modified:one") is double


def test_a_lambda_may_come_again_from_the_same_line_but_not_from_another():
    for _ in range(2):
        ScoreMod("modified:again", lambda score, *_: score + 1)
    with pytest.raises(ValueError, match="already has"):
        ScoreMod("modified:again", lambda score, *_: score + 2)


def test_functions_with_closures_are_never_taken_for_each_other():
    def by(factor):
        return lambda score, *_: score * factor

    ScoreMod("modified:closure", by(2))
    with pytest.raises(ValueError, match="already has"):
        ScoreMod("modified:closure", by(3))


def test_functions_with_defaults_are_never_taken_for_each_other():
    def by(factor):
        return lambda score, *_, scale=factor: score * scale

    ScoreMod("modified:defaults", by(2))
    with pytest.raises(ValueError, match="already has"):
        ScoreMod("modified:defaults", by(3))


def test_a_function_that_its_module_defines_anew_takes_the_place_of_the_old_one():
    module = {"ScoreMod": ScoreMod}
    source = "def change(score, *_): return score * {}\nScoreMod('modified:anew', change)"
    exec(source.format(2), module)
    exec(source.format(3), module)
    assert mods.twin("modified:anew") is module["change"]
    with pytest.raises(ValueError, match="already has"):
        exec(source.format(3), {"ScoreMod": ScoreMod})


def test_a_bound_method_may_come_again_but_not_that_of_another_object():
    class Layer:
        def change(self, score, *_):
            return score

    layer = Layer()
    ScoreMod("modified:method", layer.change)
    ScoreMod("modified:method", layer.change)
    with pytest.raises(ValueError, match="already has"):
        ScoreMod("modified:method", Layer().change)


def test_ready_made_twins_are_known_before_any_is_made():
    for name in ("alibi", "relative_bias", "prefix_lm", "document", "document_causal"):
        assert callable(mods.twin(f"fa3.kernels.mods:{name}"))


@pytest.mark.parametrize(
    "cute",
    ["", "module", ":function", "module:", "module:two words", "a..b:f", "module:Class.method", "module:a:b", "a/b:f"],
)
def test_a_name_that_is_no_module_and_function_is_refused(cute):
    with pytest.raises(ValueError, match=r"must be 'module:function'"):
        ScoreMod(cute, double)
    with pytest.raises(ValueError, match=r"must be 'module:function'"):
        mods.register(cute, double)


@pytest.fixture
def module_of_twins(tmp_path, monkeypatch):
    (tmp_path / "file_of_twins.py").write_text(
        "def top(): pass\n"
        "def outer():\n    def inner(): pass\n    return inner\n"
        "class Class:\n    def method(self): pass\n"
        "nameless = lambda: None\n"
        "renamed = top\n"
        "def top(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("file_of_twins")
    monkeypatch.delitem(sys.modules, "file_of_twins")


def test_a_function_stands_for_its_name(module_of_twins):
    assert ScoreMod(module_of_twins.top, double).cute == "file_of_twins:top"
    assert MaskMod(cute=module_of_twins.top, torch=double).cute == "file_of_twins:top"


def test_functions_that_another_process_cannot_import_are_refused(module_of_twins):
    for function in (module_of_twins.outer(), module_of_twins.nameless, module_of_twins.Class.method):
        with pytest.raises(ValueError, match="must be a named function at the top level of a module"):
            ScoreMod(function, double)
    with pytest.raises(ValueError, match="file_of_twins:top is another object"):
        ScoreMod(module_of_twins.renamed, double)

    def of_main():
        pass

    of_main.__module__, of_main.__qualname__ = "__main__", "of_main"
    for cute in (of_main, "__main__:of_main"):
        with pytest.raises(ValueError, match="compiled in another process, where __main__ is another program"):
            ScoreMod(cute, double)
    of_main.__module__ = "made_by_exec"
    with pytest.raises(ValueError, match="no module with a file"):
        ScoreMod(of_main, double)
    sys.modules["made_by_exec"] = types.ModuleType("made_by_exec")
    try:
        with pytest.raises(ValueError, match="no module with a file"):
            ScoreMod(of_main, double)
    finally:
        del sys.modules["made_by_exec"]


@pytest.mark.parametrize("cute", [None, 3, functools.partial(double)])
def test_what_is_neither_name_nor_function_is_refused(cute):
    with pytest.raises(TypeError, match=r"cute=.*must be 'module:function' or a function"):
        ScoreMod(cute, double)


# Derivatives --------------------------------------------------------------------------------------------------------


def test_a_derivative_is_known_by_the_name_of_its_modification():
    assert mods.derivative_of("modified:derived") == ""
    assert ScoreMod("modified:derived", double).derivative == ""
    assert ScoreMod("modified:derived", double, derivative="modified:doubled").derivative == "modified:doubled"
    assert mods.derivative_of("modified:derived") == "modified:doubled"
    # As operators make it again.
    again = ScoreMod("modified:derived", double, (FLOATS,))
    assert again.derivative == "modified:doubled"
    assert dataclasses.replace(again, aux=()).derivative == "modified:doubled"


def test_a_name_has_one_derivative():
    ScoreMod("modified:two_derivatives", double, derivative="modified:doubled")
    with pytest.raises(
        ValueError, match=r"already has the derivative 'modified:doubled', and now comes 'modified:other'"
    ):
        ScoreMod("modified:two_derivatives", double, derivative="modified:other")
    assert mods.derivative_of("modified:two_derivatives") == "modified:doubled"


def test_what_is_refused_as_a_twin_leaves_no_derivative():
    ScoreMod("modified:refused", double)
    with pytest.raises(ValueError, match="already has the PyTorch twin"):
        ScoreMod("modified:refused", triple, derivative="modified:tripled")
    assert mods.derivative_of("modified:refused") == ""


def test_a_derivative_is_named_as_a_modification_is(module_of_twins):
    assert ScoreMod("modified:by_function", double, derivative=module_of_twins.top).derivative == "file_of_twins:top"
    with pytest.raises(ValueError, match=r"^derivative='no name': must be 'module:function'"):
        ScoreMod("modified:badly_derived", double, derivative="no name")
    with pytest.raises(ValueError, match=r"^derivative=outer.*must be a named function at the top level"):
        ScoreMod("modified:badly_derived", double, derivative=module_of_twins.outer())
    with pytest.raises(TypeError, match=r"^derivative=3: must be 'module:function' or a function"):
        ScoreMod("modified:badly_derived", double, derivative=3)
    with pytest.raises(TypeError, match="derivative"):
        MaskMod("modified:mask", double, derivative="modified:doubled")


def test_ready_made_score_modifications_have_derivatives():
    for mod in ready_made().values():
        if isinstance(mod, ScoreMod):
            assert mod.derivative == "fa3.kernels.mods:additive"


# Tensors of modifications -----------------------------------------------------------------------------------------

FLOATS = torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("aux", "error", "message"),
    [
        (FLOATS, TypeError, "aux must be a tuple of tensors, not Tensor"),
        ([FLOATS], TypeError, "aux must be a tuple of tensors, not list"),
        ((FLOATS, FLOATS, FLOATS), ValueError, "aux has 3 tensors: allowed are at most 2"),
        ((FLOATS, 1.0), TypeError, r"aux\[1\] must be a torch.Tensor, not float"),
        ((FLOATS.double(),), TypeError, r"aux\[0\] has dtype torch.float64: allowed are torch.float32 and torch.int32"),
        ((FLOATS.long(),), TypeError, r"aux\[0\] has dtype torch.int64"),
        ((FLOATS.sum(),), ValueError, r"aux\[0\] has 0 dims: allowed are 1 to 3"),
        ((FLOATS.view(1, 1, 4, 4),), ValueError, r"aux\[0\] has 4 dims"),
        ((FLOATS, FLOATS.int().T[:3]), ValueError, r"aux\[1\] must be contiguous"),
        ((FLOATS.to_sparse(),), ValueError, r"aux\[0\] must be contiguous"),
    ],
)
def test_bad_tensors_are_named(aux, error, message):
    for kind in (ScoreMod, MaskMod):
        with pytest.raises(error, match=message):
            kind("modified:tensors", double, aux)


def test_a_pytorch_twin_must_be_a_function():
    with pytest.raises(TypeError, match="torch='double': must be a function, not str"):
        ScoreMod("modified:twin", "double")


def test_modifications_are_immutable_and_can_be_copied_with_other_tensors():
    mod = ScoreMod("modified:copied", double, (FLOATS,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        mod.aux = ()
    other = dataclasses.replace(mod, aux=(FLOATS.int(),))
    assert isinstance(other, ScoreMod)
    assert (other.cute, other.torch) == (mod.cute, mod.torch)
    assert other.aux[0].dtype == torch.int32


# Ready-made modifications -----------------------------------------------------------------------------------------

HEADS, SEQLEN = 3, 40


def ready_made() -> dict[str, ScoreMod | MaskMod]:
    ids = torch.randint(0, 4, (2, SEQLEN), dtype=torch.int32)
    return {
        "alibi": mods.alibi(torch.randn(HEADS)),
        "relative_bias": mods.relative_bias(torch.randn(HEADS, 2 * 5 + 1)),
        "relative_bias_of_one": mods.relative_bias(torch.randn(HEADS, 1)),
        "prefix_lm": mods.prefix_lm(torch.tensor([0, 17], dtype=torch.int32)),
        "document": mods.document(ids),
        "document_causal": mods.document(ids, causal=True),
    }


def definition(name: str, aux: list, score: float, b: int, h: int, i: int, j: int) -> float | bool:
    """What each says of one score, in plain Python."""
    if name == "alibi":
        return score - aux[h] * abs(i - j)
    if name.startswith("relative_bias"):
        most = (len(aux[h]) - 1) // 2
        return score + aux[h][max(-most, min(most, j - i)) + most]
    if name == "prefix_lm":
        return j < aux[b] or j <= i
    return aux[b][i] == aux[b][j] and (name == "document" or j <= i)


def broadcast_indices(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> list[Tensor]:
    sizes = (batch, heads, seqlen_q, seqlen_k)
    return [torch.arange(n).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in enumerate(sizes)]


@pytest.mark.parametrize("name", list(ready_made()))
def test_pytorch_twins_say_what_their_definitions_say(name):
    mod = ready_made()[name]
    index = broadcast_indices(2, HEADS, SEQLEN, SEQLEN)
    shape = (2, HEADS, SEQLEN, SEQLEN)
    scores = torch.randn(shape)
    found = mod.torch(*([scores] if isinstance(mod, ScoreMod) else []), *index, *mod.aux).expand(shape)
    aux = mod.aux[0].tolist()
    for b, h, i, j in torch.stack([torch.randint(0, n, (400,)) for n in shape], dim=1).tolist():
        expected = definition(name, aux, scores[b, h, i, j].item(), b, h, i, j)
        assert found[b, h, i, j].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_scores_of_a_pytorch_twin_keep_their_dtype():
    for dtype in (torch.float32, torch.float64):
        for name in ("alibi", "relative_bias"):
            mod = ready_made()[name]
            scores = torch.zeros(2, HEADS, 5, 6, dtype=dtype)
            assert mod.torch(scores, *broadcast_indices(2, HEADS, 5, 6), *mod.aux).dtype == dtype


def test_slopes_of_alibi_are_those_of_the_paper():
    assert mods.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert mods.alibi_slopes(16)[:2].tolist() == pytest.approx([math.sqrt(0.5), 0.5])
    # 12 heads: the 8 of a power of two, and every other one of 16.
    assert mods.alibi_slopes(12).tolist() == mods.alibi_slopes(8).tolist() + mods.alibi_slopes(16)[:8:2].tolist()
    assert mods.alibi_slopes(1).tolist() == [2.0**-8]
    with pytest.raises(ValueError, match="heads=0: allowed are 1 and up"):
        mods.alibi_slopes(0)


@pytest.mark.parametrize(
    ("make", "tensor", "error", "message"),
    [
        (mods.alibi, FLOATS, ValueError, r"slopes has shape \(4, 4\): must be \(heads\)"),
        (mods.alibi, FLOATS[0].int(), TypeError, "slopes has dtype torch.int32: must be torch.float32"),
        (mods.alibi, 0.5, TypeError, "slopes must be a torch.Tensor, not float"),
        (mods.relative_bias, FLOATS, ValueError, r"bias has shape \(4, 4\): .* an odd number of distances"),
        (mods.prefix_lm, FLOATS[0], TypeError, "prefix_lengths has dtype torch.float32: must be torch.int32"),
        (mods.document, FLOATS[0].int(), ValueError, r"document_ids has shape \(4,\): must be \(batch, seqlen\)"),
    ],
)
def test_bad_tensors_of_ready_made_modifications_are_named(make, tensor, error, message):
    with pytest.raises(error, match=message):
        make(tensor)


def test_sizes_of_ready_made_modifications_are_held_against_the_call():
    made = ready_made()
    for mod in made.values():
        mods.check_sizes(mod, 2, HEADS, SEQLEN, SEQLEN)
        mods.check_sizes(mod, 2, HEADS, 1, SEQLEN - 1)
    for name in ("alibi", "relative_bias"):
        with pytest.raises(ValueError, match=r"has shape \(3.*heads must be 6, as that of the call"):
            mods.check_sizes(made[name], 2, 6, SEQLEN, SEQLEN)
    for name in ("prefix_lm", "document", "document_causal"):
        with pytest.raises(ValueError, match=r"has shape \(2.*batch must be 3"):
            mods.check_sizes(made[name], 3, HEADS, SEQLEN, SEQLEN)
    for lengths in ((SEQLEN + 1, 1), (1, SEQLEN + 1)):
        with pytest.raises(ValueError, match=r"document_ids has shape \(2, 40\).*seqlen must be at least 41"):
            mods.check_sizes(made["document"], 2, HEADS, *lengths)


# CuTe DSL twins, compiled for the host ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ready_made()))
def test_cute_twins_say_exactly_what_pytorch_twins_say(name):
    pytest.importorskip("cutlass")
    from mod_wrappers import run_cute_twin

    mod = ready_made()[name]
    count = 3000
    # Behind the last query and key too: both twins then read their tensors at the last one.
    sizes = (2, HEADS, SEQLEN + 300, SEQLEN + 300)
    cases = torch.stack([torch.randint(0, n, (count,)) for n in sizes], dim=1)
    cases[: count // 2, 2:] %= SEQLEN
    scores = torch.randn(count)
    found = run_cute_twin(mod, cases, scores)
    if isinstance(mod, ScoreMod):
        expected = mod.torch(scores, *cases.unbind(1), *mod.aux)
        assert found.tolist() == expected.tolist()
    else:
        expected = mod.torch(*cases.unbind(1), *mod.aux)
        assert found.tolist() == expected.int().tolist()
        assert 0 < expected.sum() < count, "both answers are asked for"


@pytest.mark.parametrize("heads", [4.0, True, "4"])
def test_slopes_are_made_for_a_number_of_heads_that_is_an_int(heads):
    with pytest.raises(TypeError, match=r"heads=.*: must be an int"):
        mods.alibi_slopes(heads)
    assert torch.equal(mods.alibi_slopes(np.int64(4)), mods.alibi_slopes(4))


def test_a_document_mask_is_causal_or_not():
    with pytest.raises(TypeError, match="causal=1: must be True or False"):
        mods.document(torch.zeros(1, 4, dtype=torch.int32), causal=1)


@pytest.mark.parametrize("name", [name for name, mod in ready_made().items() if isinstance(mod, ScoreMod)])
def test_cute_derivatives_say_what_autograd_says_of_pytorch_twins(name):
    pytest.importorskip("cutlass")
    from mod_wrappers import run_cute_derivative

    mod = ready_made()[name]
    cases = torch.stack([torch.randint(0, n, (3000,)) for n in (2, HEADS, SEQLEN, SEQLEN)], dim=1)
    scores, gradients = torch.randn(3000, requires_grad=True), torch.randn(3000)
    changed = mod.torch(scores, *cases.unbind(1), *mod.aux)
    (expected,) = torch.autograd.grad(changed, scores, gradients)
    found = run_cute_derivative(mod, cases, scores.detach(), gradients)
    torch.testing.assert_close(found, expected)
