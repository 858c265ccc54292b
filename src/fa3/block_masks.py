"""From a mask to the blocks of queries and keys that it leaves empty, cuts, or leaves whole."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fa3.mods import BLOCK, CUT, EMPTY, WHOLE, BlockMask, MaskMod, check_answer, check_sizes, ordered_blocks

#: (query, key) pairs that are looked at together: a PyTorch twin may make several int64 tensors of so many elements.
_PAIRS_PER_STEP = 1 << 24


def create_block_mask(
    mask_mod: MaskMod,
    batch: int | None,
    heads: int | None,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | str | None = None,
) -> BlockMask:
    """Find out which blocks ``mask_mod`` leaves empty, by its PyTorch twin, a part of the mask at a time.

    A block is whole if all of its queries see 128 keys, and cut if some pair of it is visible but not all: so a block
    that ends behind the last key is never whole, and queries behind the last one have no say.

    Args:
        mask_mod: the mask. Its twin may return fewer dims than its arguments have, as far as they broadcast.
        batch, heads: those of the call; ``None`` or 1 says that the mask is the same for all.
        seqlen_q, seqlen_k: lengths of the call.
        device: where to work and where the result lives; by default that of the mask's tensors, and without any
            PyTorch's default device.

    Raises:
        TypeError: ``mask_mod`` is no `MaskMod`, a size is no int, or the twin returns no bool tensor.
        ValueError: a size is negative, the mask's tensors are on another device or of other sizes, or the twin's
            result does not broadcast to (batch, heads, queries, keys).
    """
    if not isinstance(mask_mod, MaskMod):
        raise TypeError(f"mask_mod must be a MaskMod, not {type(mask_mod).__name__}")
    batch, heads = (1 if size is None else size for size in (batch, heads))
    for name, size in (("batch", batch), ("heads", heads), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name}={size!r}: must be an int, not {type(size).__name__}")
        if size < 0:
            raise ValueError(f"{name}={size}: must not be negative")
    check_sizes(mask_mod, batch, heads, seqlen_q, seqlen_k)
    if device is None:
        device = mask_mod.aux[0].device if mask_mod.aux else torch.get_default_device()
    pairs = _visible_pairs(mask_mod, batch, heads, seqlen_q, seqlen_k, torch.device(device))

    queries = torch.full((pairs.shape[2], 1), BLOCK, device=device)
    queries[-1:] = seqlen_q - BLOCK * (pairs.shape[2] - 1)
    kinds = torch.where(pairs == 0, EMPTY, torch.where(pairs == queries * BLOCK, WHOLE, CUT))
    return BlockMask(mask_mod, seqlen_q, seqlen_k, *ordered_blocks(kinds))


def _visible_pairs(
    mask_mod: MaskMod, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device
) -> Tensor:
    """How many (query, key) pairs of each block are visible: int32 (batch, heads, query blocks, key blocks)."""
    sizes = (batch, heads, -(-seqlen_q // BLOCK), -(-seqlen_k // BLOCK))
    pairs = torch.zeros(sizes, dtype=torch.int32, device=device)
    if 0 in sizes:
        return pairs
    # Blocks of one step along each dim, as many keys as possible first.
    budget = max(1, _PAIRS_PER_STEP // BLOCK**2)
    steps = [0, 0, 0, 0]
    for dim in (3, 2, 1, 0):
        steps[dim] = min(sizes[dim], budget)
        budget //= steps[dim]
        budget = max(budget, 1)
    spans = [range(0, size, step) for size, step in zip(sizes, steps, strict=True)]
    lengths = (batch, heads, seqlen_q, seqlen_k)
    for starts in itertools.product(*spans):
        index = []
        for dim, (start, step, length) in enumerate(zip(starts, steps, lengths, strict=True)):
            scale = BLOCK if dim >= 2 else 1
            numbers = torch.arange(start * scale, min((start + step) * scale, length), device=device)
            index.append(numbers.view([-1 if dim == d else 1 for d in range(4)]))
        here = tuple(slice(start, start + step) for start, step in zip(starts, steps, strict=True))
        pairs[here] = _sum_of_blocks(_evaluate(mask_mod, index))
    return pairs


def _evaluate(mask_mod: MaskMod, index: list[Tensor]) -> Tensor:
    """The mask of all queries and keys of ``index``: bool (batch or 1, heads or 1, queries, keys)."""
    shape = torch.broadcast_shapes(*(numbers.shape for numbers in index))
    for i, tensor in enumerate(mask_mod.aux):
        if tensor.device != index[0].device:
            raise ValueError(f"aux[{i}] of mask_mod is on {tensor.device}: must be on device={str(index[0].device)!r}")
    visible = mask_mod.torch(*index, *mask_mod.aux)
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        kind = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
        raise TypeError(f"the PyTorch twin of mask_mod {mask_mod.cute!r} returned {kind}: must be a bool tensor")
    check_answer(mask_mod, visible, shape)
    # A mask that is the same for all sequences and heads is counted once.
    visible = visible[(None,) * (4 - visible.dim())]
    return visible.expand(*visible.shape[:2], *shape[2:])


def _sum_of_blocks(visible: Tensor) -> Tensor:
    """(batch, heads, queries, keys) -> number of True in each block; what is missing of the last ones is False."""
    beyond = [-length % BLOCK for length in visible.shape[2:]]
    if any(beyond):
        visible = torch.nn.functional.pad(visible, (0, beyond[1], 0, beyond[0]))
    blocks = visible.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    return blocks.sum((3, 5), dtype=torch.int32)
