"""The extra arguments of a launch: those that only some specs have, in one tuple."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64

from fa3.backward_spec import BackwardSpec, QueryGradientSpec
from fa3.spec import ForwardSpec

from .scales import SCALE_TYPES


def extra_types(
    spec: ForwardSpec | BackwardSpec | QueryGradientSpec,
) -> list[tuple[str, tuple[type[cutlass.Numeric], ...]]]:
    """Name and types of the launch's extra arguments, in order: only those that the spec uses."""
    extras: list[tuple[str, tuple[type[cutlass.Numeric], ...]]] = []
    if spec.mask == "window":
        extras.append(("window", (Int32,) * 3))  # left, right, chunk
    if spec.softcap:
        extras.append(("softcap", (Float32,)))
    if spec.qv:
        extras.append(("qv", (Int64,) * 4))  # address; batch, row and head stride, in the order of q's
    for name, codes in (("score_aux", spec.score_aux), ("mask_aux", spec.mask_aux)):
        types: list[type[cutlass.Numeric]] = []
        for code in filter(None, codes.split(",")):
            types += [Int64, *[Int32] * int(code[1:])]
        if types:
            extras.append((name, tuple(types)))
    if spec.mask == "blocks":
        extras.append(("blocks", (Int64, Int64, Int32, Int32, Int32)))
        if isinstance(spec, BackwardSpec) and spec.deterministic:
            extras.append(("list_turns", (Int64,)))
    if isinstance(spec, ForwardSpec) and spec.fp8:
        extras.append(("scales", SCALE_TYPES))
    return extras


def name_extra_numbers(spec: ForwardSpec | BackwardSpec | QueryGradientSpec, numbers: tuple | None) -> dict[str, Any]:
    """The extra arguments of the launch by name; what the spec does not use is 0."""
    zero = Int32(0)
    named: dict[str, Any] = {"window": (zero,) * 3, "softcap": Float32(1.0)}
    named |= dict.fromkeys(("score_aux", "mask_aux", "blocks", "list_turns", "scales"), ())
    for name, types in extra_types(spec):
        named[name], numbers = numbers[: len(types)], numbers[len(types) :]
    if spec.softcap:
        (named["softcap"],) = named["softcap"]
    return named


def score_factors(
    spec: ForwardSpec | BackwardSpec | QueryGradientSpec, softcap: Float32, softmax_scale: Float32
) -> tuple[Float32, Float32, Float32]:
    """What scores are multiplied by before the hyperbolic tangent, before ``score_mod``, and in the softmax.

    With a cap, scores become the tanh of themselves, and the cap the softmax scale; a score_mod gets real scores, so
    nothing is left to scale.
    """
    tanh_factor, mod_factor, scale = Float32(0.0), Float32(0.0), softmax_scale
    if spec.softcap:
        tanh_factor, scale = softmax_scale / softcap, softcap
    if spec.score_mod:
        mod_factor, scale = scale, Float32(1.0)
    return tanh_factor, mod_factor, scale
