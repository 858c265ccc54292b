"""Any of the specs: their union, and reading one back."""

from __future__ import annotations

from typing import Any, get_args

from fa3.backward_spec import BackwardSpec, FinishSpec, PrepareSpec, QueryGradientSpec
from fa3.spec import ForwardSpec, QuantizeSpec, TransposeSpec

#: Any of them.
KernelSpec = ForwardSpec | BackwardSpec | PrepareSpec | FinishSpec | QueryGradientSpec | QuantizeSpec | TransposeSpec

_KINDS: dict[str, type] = {kind.kernel: kind for kind in get_args(KernelSpec)}


def spec_from_dict(fields: dict[str, Any]) -> Any:
    """Rebuild a spec from ``as_dict``. Raises ``ValueError`` for an unknown kernel or unknown fields."""
    fields = dict(fields)
    kernel = fields.pop("kernel", None)
    if kernel not in _KINDS:
        raise ValueError(f"kernel={kernel!r}: known kernels are {', '.join(map(repr, _KINDS))}")
    try:
        return _KINDS[kernel](**fields)
    except TypeError as error:
        raise ValueError(f"not the fields of a {_KINDS[kernel].__name__}: {sorted(fields)}") from error
