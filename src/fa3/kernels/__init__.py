"""Kernels in CuTe DSL, and how a spec becomes a compiled one. cutlass is imported only to compile."""

from __future__ import annotations

from typing import Any

from fa3.spec import ForwardSpec


def entry_symbol(spec: ForwardSpec) -> str:
    """C symbol of the spec's host entry in its artifact; a fixed name, since each artifact holds one kernel."""
    return "fa3_forward"


def compile_spec(spec: ForwardSpec, options: str) -> Any:
    """Compile a spec with ``cute.compile`` and return the compiled function.

    Args:
        spec: what to compile.
        options: the options string of ``cute.compile``.

    Raises:
        ValueError: no kernel can be compiled from this spec.
    """
    spec.validate()
    from fa3.kernels.forward import compile_forward

    return compile_forward(spec, options)
