"""The functions that a name of a CuTe DSL function stands for: its PyTorch twin, and the name of its derivative.

Operators carry names, and so do the specs of kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, MethodType

from torch import Tensor

_twins: dict[str, Callable[..., Tensor]] = {}
_derivatives: dict[str, str] = {}


def register(cute: str, torch: Callable[..., Tensor], derivative: str = "") -> None:
    """Note the PyTorch twin of the CuTe DSL function named ``cute``, and the name of its derivative if it has one.

    Operators carry the name alone, so a name has one PyTorch twin in a process, and at most one derivative. Making a
    modification registers both. A function that its module or notebook defines anew takes the place of the old one.

    Raises:
        ValueError: another PyTorch twin or derivative has this name, or a name is not ``"module:function"``.
    """
    check_name(cute)
    if derivative and _derivatives.get(cute, check_name(derivative, "derivative")) != derivative:
        raise ValueError(
            f"cute={cute!r} already has the derivative {_derivatives[cute]!r}, and now comes {derivative!r}: a CuTe "
            "DSL function has one derivative; another function has another name"
        )
    known = _twins.setdefault(cute, torch)
    if not _is_same_function(known, torch):
        raise ValueError(
            f"cute={cute!r} already has the PyTorch twin {known!r}, and now comes torch={torch!r}: a CuTe DSL function "
            "has one PyTorch twin; what changes from call to call goes into aux, and another function has another name"
        )
    _twins[cute] = torch
    if derivative:
        _derivatives[cute] = derivative


def twin(cute: str) -> Callable[..., Tensor]:
    """The PyTorch twin of the CuTe DSL function named ``cute``.

    Raises:
        ValueError: none is registered.
    """
    try:
        return _twins[cute]
    except KeyError:
        raise ValueError(
            f"cute={cute!r} has no PyTorch twin in this process: make its ScoreMod or MaskMod, or fa3.mods.register it"
        ) from None


def derivative_of(cute: str) -> str:
    """``"module:function"`` of the derivative of the CuTe DSL function named ``cute``, or empty where none is known."""
    return _derivatives.get(cute, "")


def _is_same_function(one: Callable[..., Tensor], other: Callable[..., Tensor]) -> bool:
    """Whether two objects are one function to whoever wrote it."""
    if one is other:
        return True
    if isinstance(one, MethodType) and isinstance(other, MethodType):
        return one == other
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return False
    if one.__globals__ is not other.__globals__:
        return False
    if one.__qualname__ == other.__qualname__ and one.__name__ == one.__qualname__ != "<lambda>":
        # A name at the top level of a module, defined anew: a reload, or a cell of a notebook that ran again.
        return True
    # A lambda or a nested function is a new object each time that its line runs. It may carry other values with it.
    carried = (one.__closure__, other.__closure__, one.__defaults__, other.__defaults__, one.__kwdefaults__)
    return one.__code__ == other.__code__ and not any(carried)


def check_name(cute: str, argument: str = "cute") -> str:
    """``cute``, if it is ``"module:function"`` and can be imported elsewhere; ``argument`` is what messages call it.

    Raises:
        ValueError: it is not.
    """
    module, colon, function = cute.partition(":")
    if not colon or not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(
            f"{argument}={cute!r}: must be 'module:function', with a function at the top level of its module"
        )
    if module == "__main__":
        raise ValueError(
            f"{argument}={cute!r}: kernels are compiled in another process, where __main__ is another program; "
            "put the function into a module of its own and import it"
        )
    return cute


def name_of(function: str | Callable[..., object], argument: str) -> str:
    """``"module:function"`` of a function at the top level of a module that another process can import, or of its name.

    Raises:
        TypeError: neither a name nor a function.
        ValueError: another process cannot import it by this name.
    """
    if isinstance(function, str):
        return check_name(function, argument)
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not callable(function) or module is None or name is None:
        raise TypeError(
            f"{argument}={function!r}: must be 'module:function' or a function, not {type(function).__name__}"
        )
    where = "kernels are compiled in another process, which imports it from its file by its name"
    if not name.isidentifier():
        # <lambda>, outer.<locals>.inner, Class.method.
        raise ValueError(
            f"{argument}={name} of {module}: must be a named function at the top level of a module; {where}"
        )
    checked = check_name(f"{module}:{name}", argument)
    found = sys.modules.get(module)
    if found is None or getattr(found, "__file__", None) is None:
        raise ValueError(f"{argument}={name} of {module}: that is no module with a file; {where}")
    if getattr(found, name, None) is not function:
        raise ValueError(f"{argument}={name} of {module}: {checked} is another object; {where}")
    return checked
