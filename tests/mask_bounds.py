"""Masks from their definition, to measure the kernels' own against: which key a query sees."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

#: Kinds of masks that are an interval of keys.
KINDS = ("full", "causal", "window")

#: An open side of a window, which the kernel gets as the length.
OPEN = None

LENGTHS = (0, 1, 2, 5, 17, 40)
SIDES = (0, 1, 3, 17, OPEN)
CHUNKS = (0, 1, 2, 5, 16, 64)

#: (seqlen_q, seqlen_k, left, right, chunk)
Bounds = tuple[int, int, "int | None", "int | None", int]

ALL_BOUNDS: list[Bounds] = list(itertools.product(LENGTHS, LENGTHS, SIDES, SIDES, CHUNKS))
LONGEST = max(LENGTHS)


def for_kernel(bounds: Bounds) -> tuple[int, int, int, int, int]:
    """Open sides become the lengths."""
    seqlen_q, seqlen_k, left, right, chunk = bounds
    return seqlen_q, seqlen_k, seqlen_k if left is OPEN else left, seqlen_q if right is OPEN else right, chunk


def sees(kind: str, bounds: Bounds, queries: Tensor, keys: Tensor) -> Tensor:
    """(queries, keys) -> whether the query sees the key, straight from the definition."""
    seqlen_q, seqlen_k, left, right, chunk = bounds
    position = queries[:, None] + seqlen_k - seqlen_q
    visible = (keys < seqlen_k).expand(len(queries), -1)
    if kind == "causal":
        return visible & (keys <= position)
    if kind == "window":
        if left is not OPEN:
            visible = visible & (keys >= position - left)
        if right is not OPEN:
            visible = visible & (keys <= position + right)
        if chunk:
            visible = visible & (keys // chunk == position.div(chunk, rounding_mode="floor"))
    return visible


@functools.cache
def visible_keys() -> Tensor:
    """(bounds, kind, query, key) of all that a query may see, for every query of every one of ALL_BOUNDS."""
    queries, keys = torch.arange(LONGEST), torch.arange(LONGEST)
    return torch.stack([torch.stack([sees(kind, bounds, queries, keys) for kind in KINDS]) for bounds in ALL_BOUNDS])
