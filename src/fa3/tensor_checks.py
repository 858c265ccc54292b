"""Complaints about one tensor, in the words that every check of arguments uses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def check_tensors(**tensors: object) -> None:
    """Raise for the first argument that is no tensor (``TypeError``), or a nested or sparse one (``ValueError``)."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
        if value.is_nested:
            raise ValueError(
                f"{name} is a nested tensor, layout {value.layout}: must be a dense (torch.strided) tensor "
                f"(batch, seqlen, heads, head_dim)"
            )
        if value.layout is not torch.strided:
            raise ValueError(f"{name} has layout {value.layout}: must be a dense (torch.strided) tensor")


def listed(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


def check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise ValueError(f"{name} is on device {tensor.device}, q on {q.device}: must be the same")


def check_strides(name: str, tensor: Tensor) -> None:
    if tensor.numel() and tensor.stride(3) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}: the last must be 1, the others are free "
            f"({name}.contiguous() makes such a copy)"
        )


def check_shape(name: str, tensor: Tensor, dims: str, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must be {dims} = {expected}")
