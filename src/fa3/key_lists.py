"""The lists of a block mask the other way round: the query tiles that see each block of keys, for the backward.

Made on the mask's device by a few operations of PyTorch, without waiting for it, and kept as long as the mask's own
lists live and stay as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fa3.mods import BLOCK, EMPTY, BlockMask, ordered_blocks


class KeyLists(NamedTuple):
    """For each block of keys the tiles of ``tile_m`` queries that see some of them.

    Attributes:
        counts: int32 (batch or 1, heads or 1, key blocks, 2): how many of the tiles are cut, and how many whole.
        indices: int32 (batch or 1, heads or 1, key blocks, query tiles): the tiles, in the order of
            `fa3.mods.BlockMask`; what follows is not read. No tile begins behind the last query.
        turns: int32 of the same shape: how many tiles of ``tile_n`` keys behind the block are visited by that query
            tile, tile by tile of ``indices``.
    """

    counts: Tensor
    indices: Tensor
    turns: Tensor


class _Known(NamedTuple):
    """Lists that were made, and of what: the mask's counts, and versions of its counts and indices."""

    stamps: tuple[int, int]
    counts: Tensor
    lists: KeyLists


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def key_lists(block_mask: BlockMask, tile_m: int, tile_n: int) -> KeyLists:
    """The lists of a block mask by keys, in tiles of ``tile_m`` queries; remembered where that is safe."""
    counts, indices = block_mask.counts, block_mask.indices
    if not _can_be_kept(indices, counts):
        return make_key_lists(block_mask, tile_m, tile_n)
    of_mask = _known.setdefault(indices, {})
    key = (tile_m, tile_n, block_mask.seqlen_q, block_mask.seqlen_k)
    stamps = counts._version, indices._version
    known = of_mask.get(key)
    if known is None or known.stamps != stamps or known.counts is not counts:
        known = of_mask[key] = _Known(stamps, counts, make_key_lists(block_mask, tile_m, tile_n))
    return known.lists


def _can_be_kept(*tensors: Tensor) -> bool:
    """Whether what is made of these tensors now is there for later calls, and told when they change."""
    # On other streams than the default one memory may be a graph's, and who reads would have to wait for who makes.
    return _stream_of(tensors[0]) == 0 and not any(tensor.is_inference() for tensor in tensors)


def _stream_of(tensor: Tensor) -> int:
    """CUDA's handle of the current stream of the tensor's device; the default one is 0."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def make_key_lists(block_mask: BlockMask, tile_m: int, tile_n: int) -> KeyLists:
    """The same, made anew."""
    kinds = block_mask.kinds()
    query_tiles = -(-block_mask.seqlen_q // tile_m)
    key_tiles = -(-block_mask.seqlen_k // tile_n)
    # Of the last block of queries not all tiles need exist; those that do not have no statistics.
    by_keys = kinds.mT.repeat_interleave(BLOCK // tile_m, dim=-1)[..., :query_tiles]
    counts, indices = ordered_blocks(by_keys)
    # Tiles of keys in each block, if it is visited; then those in all blocks behind it.
    per_block = BLOCK // tile_n
    blocks = torch.arange(kinds.shape[-1], device=kinds.device)
    visits = torch.where(kinds == EMPTY, 0, (key_tiles - blocks * per_block).clamp(max=per_block))
    behind = visits.sum(-1, keepdim=True) - visits.cumsum(-1)
    behind = behind.mT.repeat_interleave(BLOCK // tile_m, dim=-1)[..., :query_tiles]
    return KeyLists(counts, indices, behind.gather(-1, indices.long()).int())
