"""The implementations of attention that this machine has, each behind the same two calls, for `fa3 bench`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fa3
from fa3.cli import gradients

#: A call with its arguments bound: one forward, without LSE where the peer leaves a choice.
Call = Callable[[], object]
#: Binds q, k, v of shape (batch, seqlen, heads, dim) and the mask into a call.
Prepare = Callable[[Tensor, Tensor, Tensor, bool], Call]

#: Every name that a result file may hold, in the order of the tables.
NAMES = ("fa3", "fa3-det", "official", "fa4", "cudnn", "fa2", "tiled")
#: Packages with the official kernels: module, distribution. The first one has the forward alone.
OFFICIAL = (("fa3_fwd_interface", "fa3-fwd"), ("flash_attn_interface", "flash-attn-3"))
#: Those whose output is (batch, heads, seqlen, dim).
HEADS_FIRST = ("cudnn", "fa2")


@dataclass(frozen=True)
class Impl:
    """One implementation found on this machine.

    Attributes:
        name: one of ``NAMES``.
        version: of the package that holds it.
        prepare: binds the arguments; what it does is not timed.
        context: entered once around a run of calls, not timed either.
        direction: what a call computes, one of ``gradients.DIRECTIONS``; unless it is ``fwd`` a call returns gradients.
    """

    name: str
    version: str
    prepare: Prepare
    context: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    direction: str = "fwd"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _flash_attn_func(module: str) -> Prepare:
    """Prepare of a package whose ``flash_attn_func`` has the signature of FlashAttention."""
    function = importlib.import_module(module).flash_attn_func
    return lambda q, k, v, causal: lambda: function(q, k, v, causal=causal)


def official_function() -> Callable[..., object] | None:
    """``flash_attn_func`` of the official package that `find` finds, if there is one."""
    module = next((module for module, _ in OFFICIAL if _importable(module)), None)
    return None if module is None else importlib.import_module(module).flash_attn_func


def _deterministic(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    return lambda: fa3.flash_attn_func(q, k, v, causal=causal, deterministic=True)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    attend = torch.nn.functional.scaled_dot_product_attention
    # SDPA's layout is (batch, heads, seqlen, dim); the views keep the strides that every other peer gets.
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.shape[1] == k.shape[1]:
        return lambda: attend(q, k, v, is_causal=causal)
    return lambda: attend(q, k, v, is_causal=causal, enable_gqa=True)


def _sdpa_backend(name: str) -> Callable[[], AbstractContextManager[object]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return lambda: sdpa_kernel([getattr(SDPBackend, name)])


def _tiled(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    from fa3.backends import tiled

    softmax_scale = q.shape[-1] ** -0.5
    return lambda: tiled.forward(q, k, v, softmax_scale, causal, False)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False


def find(
    device: torch.device, names: tuple[str, ...] | None = None, direction: str = "fwd"
) -> tuple[list[Impl], dict[str, str]]:
    """The implementations that can be imported here, and for each one left out the reason.

    Args:
        device: where the tensors live. On a CPU the only implementation is ``tiled``.
        names: keep these only, in this order.
        direction: what their calls compute, one of ``gradients.DIRECTIONS``.
    """
    # Forward it is fa3 once more.
    by_default = tuple(name for name in NAMES if name != "fa3-det" or direction != "fwd")
    wanted = by_default if names is None else names
    for name in wanted:
        if name not in NAMES:
            raise ValueError(f"impl {name!r}: known are {', '.join(NAMES)}")
    found: list[Impl] = []
    missing: dict[str, str] = {}
    for name in wanted:
        try:
            impl = _find_one(name, device, names is not None, direction)
        except Exception as error:  # a package may break at its import in any way
            missing[name] = f"import failed: {type(error).__name__}: {error}"
            continue
        if isinstance(impl, str):
            missing[name] = impl
        elif direction == "fwd":
            found.append(impl)
        else:
            prepare = gradients.differentiated(impl.prepare, direction, name in HEADS_FIRST)
            found.append(replace(impl, prepare=prepare, direction=direction))
    return found, missing


def _find_one(name: str, device: torch.device, named: bool, direction: str) -> Impl | str:
    """The implementation, or the reason why there is none. Raises whatever a broken package raises at its import."""
    on_gpu = device.type == "cuda"
    if name == "tiled":
        if on_gpu and not named:  # exact and slow: it would take most of the run
            return "measured on a GPU only when it is named"
        if direction == "fwd":
            return Impl("tiled", fa3.__version__, _tiled)
        # Autograd is in front of the backends: this one is asked for from there.
        return Impl("tiled", fa3.__version__, _flash_attn_func("fa3"), lambda: gradients.forced_backend("tiled"))
    if not on_gpu:
        return "needs a GPU"
    if name == "fa3-det":
        return "forward the same as fa3" if direction == "fwd" else Impl(name, fa3.__version__, _deterministic)
    if name == "fa3":
        return Impl("fa3", fa3.__version__, _flash_attn_func("fa3"))
    if name == "official":
        for module, distribution in OFFICIAL:
            if _importable(module):
                if direction != "fwd" and distribution == "fa3-fwd":
                    return "fa3-fwd has the forward alone"
                return Impl("official", f"{distribution} {_version(distribution)}", _flash_attn_func(module))
        return "neither fa3_fwd_interface nor flash_attn_interface is installed"
    if name == "fa4":
        if _importable("flash_attn.cute"):
            return Impl("fa4", _version("flash-attn-4"), _flash_attn_func("flash_attn.cute"))
        return "flash_attn.cute is not installed"
    if name == "cudnn":
        version = torch.backends.cudnn.version()
        return Impl("cudnn", f"cuDNN {version}, torch {torch.__version__}", _sdpa, _sdpa_backend("CUDNN_ATTENTION"))
    return Impl("fa2", f"torch {torch.__version__}", _sdpa, _sdpa_backend("FLASH_ATTENTION"))
