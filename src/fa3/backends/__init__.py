"""The backends, and which one computes a call.

| backend | device |
| --- | --- |
| hopper | GPUs of compute capability 9.0: fa3's own kernels |
| sdpa | other NVIDIA GPUs from 8.0 on: PyTorch's FlashAttention-2; what that cannot take goes to tiled |
| tiled | every other device; of meta tensors, which have shapes alone, whatever is forced |

On a Hopper GPU nothing falls to another backend silently. The environment variable ``FA3_BACKEND`` forces one;
it is read at every call.

Gradients exist on every one of them. Those of a hopper call are computed by its kernels, or, with a warning, by the
tiled backend where there is none; those of an sdpa call by the tiled backend.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any, Protocol

import torch
from torch import Tensor

from fa3.errors import BackendError
from fa3.mods import derivative_of
from fa3.options import Options
from fa3.problem import Problem, check_forward
from fa3.quantization import Quantizer, quantize_tensor

NAMES = ("hopper", "sdpa", "tiled")


class Forward(Protocol):
    """What a backend is called by; ``options`` is ``None`` for a plain call, and then not passed at all."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        causal: bool,
        return_lse: bool,
        options: Options | None = None,
        /,
    ) -> tuple[Tensor, Tensor | None]: ...


class Backward(Protocol):
    """What the gradients of a backend's forward are computed by.

    ``dlse`` and ``options`` may be ``None``; ``options.deterministic`` asks for gradients that are bitwise the same
    from run to run. ``into`` are tensors of the shapes and dtypes of q, k and v, of last stride 1 and any others, that
    their gradients are written into and that are returned then. dsink and dqv are ``None`` for a call without such.
    """

    def __call__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        softmax_scale: float | None,
        causal: bool,
        options: Options | None = None,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
        /,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]: ...


_VARIABLE = "FA3_BACKEND"

# os.environ.get costs 0.7 microseconds, a tenth of a kernel launch; the dict behind it costs 0.02.
_environment = getattr(os.environ, "_data", os.environ)
_variable = os.environ.encodekey(_VARIABLE) if _environment is not os.environ else _VARIABLE

#: CUDA device index -> forward function of the backend that the device gets when none is forced.
_forward_of_gpu: dict[int, Forward] = {}
#: CUDA device index -> the name of that backend.
_name_of_gpu: dict[int, str] = {}

#: Where the gradients of each backend are computed.
_BACKWARD = {"hopper": "hopper_backward", "sdpa": "tiled", "tiled": "tiled"}

#: Plain calls for which `_hopper_lacks` has answered: describing a problem takes longer than all else of a backward.
_lacking: dict[Any, str | None] = {}
_MAX_REMEMBERED = 8192


def forced() -> str | None:
    """The backend that ``FA3_BACKEND`` names, or ``None``. Raises ``ValueError`` for an unknown name."""
    name = os.environ.get(_VARIABLE)
    if not name:
        return None
    if name not in NAMES:
        raise ValueError(f"{_VARIABLE}={name!r}: allowed are {', '.join(NAMES)}, or leave it unset")
    return name


def _capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU, ``None`` for any other device."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def _device_words(device: torch.device) -> str:
    capability = _capability(device)
    if capability is None:
        return f"device {device} is no NVIDIA GPU"
    return f"device {device} has compute capability {capability[0]}.{capability[1]}"


def for_device(device: torch.device) -> str:
    """The backend of a device, before any look at the problem.

    Raises:
        ValueError: ``FA3_BACKEND`` is unknown.
        BackendError: ``FA3_BACKEND`` forces a backend that cannot run on this device.
    """
    name = forced()
    if device.type == "meta":
        return "tiled"
    capability = _capability(device)
    if name is None:
        if capability is None or capability < (8, 0):
            return "tiled"
        return "hopper" if capability == (9, 0) else "sdpa"
    if name == "hopper" and capability != (9, 0):
        raise BackendError(
            f"{_VARIABLE}=hopper, but {_device_words(device)}: the hopper backend needs tensors on a GPU of "
            f"compute capability 9.0 (H100, H800, H200); unset {_VARIABLE} or set {_VARIABLE}=tiled"
        )
    if name == "sdpa" and (capability is None or capability < (8, 0)):
        raise BackendError(
            f"{_VARIABLE}=sdpa, but {_device_words(device)}: the sdpa backend needs tensors on an NVIDIA GPU of "
            f"compute capability 8.0 or later; unset {_VARIABLE} or set {_VARIABLE}=tiled"
        )
    return name


def choose(problem: Problem, device: torch.device) -> str:
    """``"hopper"``, ``"sdpa"`` or ``"tiled"``: who computes this problem on this device. Errors as `for_device`."""
    from fa3.backends import sdpa

    name = for_device(device)
    if name == "sdpa" and forced() is None and sdpa.why_not(problem) is not None:
        return "tiled"
    return name


def backend_reason(problem: Problem, device: torch.device) -> str:
    """One sentence: why `choose` answers what it does."""
    from fa3.backends import sdpa

    name = choose(problem, device)
    if forced() is not None:
        return f"{name}: forced by {_VARIABLE}"
    if name == "hopper":
        return f"hopper: {_device_words(device)}"
    if name == "sdpa":
        return f"sdpa: {_device_words(device)}, not 9.0, and FlashAttention-2 can take the problem"
    if for_device(device) == "sdpa":
        return f"tiled: {_device_words(device)}, but FlashAttention-2 cannot take {sdpa.why_not(problem)}"
    return f"tiled: {_device_words(device)}" + ("" if _capability(device) is None else ", below 8.0")


def forward_of(name: str) -> Forward:
    """The forward function of a backend, imported at its first use."""
    forward: Forward = importlib.import_module(f"fa3.backends.{name}").forward
    return forward


def forward_for(q: Tensor) -> Forward:
    """The forward function for tensors on the device of q: on the hot path of every call. Errors as `for_device`."""
    if q.is_cuda and not _environment.get(_variable):
        index = q.get_device()
        if index not in _forward_of_gpu:
            _forward_of_gpu[index] = forward_of(for_device(q.device))
        return _forward_of_gpu[index]
    return forward_of(for_device(q.device))


def quantizer_for(x: Tensor) -> Quantizer:
    """What quantizes tensors on the device of x, by the signature of `fa3.quantization.quantize_tensor`.

    Raises:
        ValueError, BackendError: as `for_device`.
    """
    if for_device(x.device) == "hopper":
        quantize: Quantizer = importlib.import_module("fa3.backends.hopper_quantize").quantize_tensor
        return quantize
    return quantize_tensor


def _hopper_lacks(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, options: Options | None
) -> str | None:
    """Why the hopper backend has no backward kernel for a call, or ``None`` if it has one."""
    key = None
    if options is None:
        key = (q.shape, k.shape, v.shape, q.dtype, softmax_scale, causal)
        if key in _lacking:
            return _lacking[key]
    problem = check_forward(q, k, v, softmax_scale, causal, True, options)
    reason: str | None = importlib.import_module("fa3.backends.hopper_backward").why_no_backward(problem)
    if problem.score_mod and not derivative_of(problem.score_mod):
        reason = f"score_mod {problem.score_mod!r} without a derivative (fa3.ScoreMod takes one)"
    if key is not None:
        if len(_lacking) >= _MAX_REMEMBERED:
            _lacking.clear()
        _lacking[key] = reason
    return reason


def backward_for(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, options: Options | None = None
) -> Backward:
    """The function that computes the gradients of a call, by the device of q and what it has kernels for.

    It warns, once a reason, where a call on a Hopper GPU has no backward kernel and is left to the tiled backend.

    Raises:
        ValueError, BackendError: as `for_device`.
    """
    if q.is_cuda and not _environment.get(_variable):
        index = q.get_device()
        if index not in _name_of_gpu:
            _name_of_gpu[index] = for_device(q.device)
        name = _name_of_gpu[index]
    else:
        name = for_device(q.device)
    if name == "hopper":
        reason = _hopper_lacks(q, k, v, softmax_scale, causal, options)
        if reason is not None:
            warnings.warn(
                f"the hopper backend has no backward kernel for this call, {reason}: the tiled backend computes its "
                "gradients in PyTorch, which is much slower",
                stacklevel=2,
            )
            name = "tiled"
    backward: Backward = importlib.import_module(f"fa3.backends.{_BACKWARD[name]}").backward
    return backward
