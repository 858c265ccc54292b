"""Modifications as functions of the host: loops over cases that read and write plain tables in memory.

Every pointer is the address of a contiguous CPU tensor. Functions of the DSL must stand in a real file.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64
from torch import Tensor

from fa3.mods import AUX_DTYPES, MaskMod, ScoreMod

DTYPES = {"f": Float32, "i": Int32}


def table(address: Int64, dtype: type[cutlass.Numeric], shape: tuple) -> cute.Tensor:
    """A row-major tensor in host memory."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.generic, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape))))))


@cute.jit
def scores(
    cases_address: Int64,
    scores_address: Int64,
    aux_address: Int64,
    out_address: Int64,
    count: Int32,
    size0: Int32,
    size1: Int32,
    mod: cutlass.Constexpr,
    kind: cutlass.Constexpr,
):
    """cases (count, 4: batch, head, query, key), scores (count,) -> out (count,).

    ``kind`` says what one tensor the modification reads, as in a spec: "f2" is float32 with two dims.
    """
    cases = table(cases_address, Int32, (count, 4))
    given = table(scores_address, Float32, (count,))
    out = table(out_address, Float32, (count,))
    aux = (table(aux_address, DTYPES[kind[0]], (size0, size1)[: int(kind[1])]),)
    for i in cutlass.range(count, unroll=1):
        out[i] = Float32(mod(given[i], cases[i, 0], cases[i, 1], cases[i, 2], cases[i, 3], aux))


@cute.jit
def masks(
    cases_address: Int64,
    aux_address: Int64,
    out_address: Int64,
    count: Int32,
    size0: Int32,
    size1: Int32,
    mod: cutlass.Constexpr,
    kind: cutlass.Constexpr,
):
    """cases (count, 4: batch, head, query, key) -> out (count,), 1 where the query sees the key. Else as `scores`."""
    cases = table(cases_address, Int32, (count, 4))
    out = table(out_address, Int32, (count,))
    aux = (table(aux_address, DTYPES[kind[0]], (size0, size1)[: int(kind[1])]),)
    for i in cutlass.range(count, unroll=1):
        out[i] = Int32(Boolean(mod(cases[i, 0], cases[i, 1], cases[i, 2], cases[i, 3], aux)))


@cute.jit
def derivatives(
    cases_address: Int64,
    scores_address: Int64,
    gradients_address: Int64,
    aux_address: Int64,
    out_address: Int64,
    count: Int32,
    size0: Int32,
    size1: Int32,
    derivative: cutlass.Constexpr,
    kind: cutlass.Constexpr,
):
    """cases (count, 4: batch, head, query, key), scores and gradients (count,) -> out (count,). Else as `scores`."""
    cases = table(cases_address, Int32, (count, 4))
    given = table(scores_address, Float32, (count,))
    gradients = table(gradients_address, Float32, (count,))
    out = table(out_address, Float32, (count,))
    aux = (table(aux_address, DTYPES[kind[0]], (size0, size1)[: int(kind[1])]),)
    for i in cutlass.range(count, unroll=1):
        answer = derivative(gradients[i], given[i], cases[i, 0], cases[i, 1], cases[i, 2], cases[i, 3], aux)
        out[i] = Float32(answer)


@functools.cache
def compiled(mod: Callable[..., Any], entry: Callable[..., Any], kind: str) -> Any:
    addresses = {scores: 4, masks: 3, derivatives: 5}[entry]
    types = [Int64] * addresses + [Int32] * 3
    return cute.compile(entry, *(t(0) for t in types), mod, kind, options="--gpu-arch sm_90a")


def run_cute_twin(mod: ScoreMod | MaskMod, cases: Tensor, given: Tensor) -> Tensor:
    """What the CuTe DSL twin of a modification that reads one tensor of one or two dims says.

    cases (count, 4: batch, head, query, key), given scores (count,) float32 -> scores (count,) float32, or for a mask
    int32.
    """
    (aux,) = mod.aux
    is_score = isinstance(mod, ScoreMod)
    # A result that no correct answer is equal to yet.
    out = torch.full((len(cases),), torch.nan) if is_score else torch.full((len(cases),), -1, dtype=torch.int32)
    tensors = [cases.int().contiguous(), *([given] if is_score else []), aux, out]
    _run(mod.cute, scores if is_score else masks, aux, tensors)
    return out


def run_cute_derivative(mod: ScoreMod, cases: Tensor, scores: Tensor, gradients: Tensor) -> Tensor:
    """What the derivative of a modification that reads one tensor of one or two dims says: float32 (count,).

    cases (count, 4: batch, head, query, key), scores and gradients (count,) float32.
    """
    (aux,) = mod.aux
    out = torch.full((len(cases),), torch.nan)
    _run(mod.derivative, derivatives, aux, [cases.int().contiguous(), scores, gradients, aux, out])
    return out


def _run(named: str, entry: Callable[..., Any], aux: Tensor, tensors: list[Tensor]) -> None:
    """Run a function that is named ``"module:function"`` over all cases, the first of ``tensors``."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    module, name = named.split(":")
    function = getattr(importlib.import_module(module), name)
    run = compiled(function, entry, f"{AUX_DTYPES[aux.dtype]}{aux.dim()}")
    run(*(tensor.data_ptr() for tensor in tensors), len(tensors[0]), *[*aux.shape, 1][:2])
