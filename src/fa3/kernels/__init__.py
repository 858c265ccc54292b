"""Kernels in CuTe DSL, and how a spec becomes a compiled one. cutlass is imported only to compile."""

from __future__ import annotations

import importlib
from typing import Any

from fa3.kernel_spec import KernelSpec

#: Kernel of a spec -> its module here and what compiles it there.
_COMPILERS = {
    "forward": ("forward", "compile_forward"),
    "backward": ("backward", "compile_backward"),
    "prepare": ("backward_prepare", "compile_prepare"),
    "backward_dq": ("backward_dq", "compile_query_gradient"),
    "finish": ("backward_finish", "compile_finish"),
    "quantize": ("quantize", "compile_quantize"),
    "transpose": ("transpose_values", "compile_transpose"),
}


def entry_symbol(spec: KernelSpec) -> str:
    """C symbol of the spec's host entry in its artifact; a fixed name, since each artifact holds one kernel."""
    return f"fa3_{spec.kernel}"


def compile_spec(spec: KernelSpec, options: str) -> Any:
    """Compile a spec with ``cute.compile`` and return the compiled function.

    Args:
        spec: what to compile.
        options: the options string of ``cute.compile``.

    Raises:
        ValueError: no kernel can be compiled from this spec.
    """
    spec.validate()
    module, function = _COMPILERS[spec.kernel]
    return getattr(importlib.import_module(f"fa3.kernels.{module}"), function)(spec, options)
