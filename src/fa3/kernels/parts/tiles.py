"""Which tiles of the output a block works on, and where they lie."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fa3.spec import BLOCK

from . import barriers

#: Tiles that wait in shared memory between the warp that fetches them and the warps that use them.
SLOTS = 2


@cute.jit
def place_of_tile(
    tile: Int32,
    m_blocks: Int32,
    heads: Int32,
    batch: Int32,
    section: Int32,
    levels: Int32,
    longest_first: cutlass.Constexpr,
) -> tuple[Int32, Int32, Int32]:
    """(query tile, query head, batch index) of a tile.

    The query tiles of a head are cut into phases of ``levels``, and the heads of all batch entries, in one
    row, into sections of ``section`` heads whose K and V fit in L2 together. The slowest index is the phase,
    then come the section, the query tile in its phase, and the head in its section: blocks that run at the
    same time share K and V. A causal mask makes the last query tiles the longest, and they start first.
    """
    tiles_of_phase = levels * heads * batch
    phase = tile // tiles_of_phase
    first_level = phase * levels
    levels_here = cutlass.min(levels, m_blocks - first_level)
    rest = tile - phase * tiles_of_phase
    tiles_of_section = levels_here * section
    section_index = rest // tiles_of_section
    first_head = section_index * section
    heads_here = cutlass.min(section, heads * batch - first_head)
    rest = rest - section_index * tiles_of_section
    level = rest // heads_here
    head = first_head + rest - level * heads_here
    m_block = first_level + level
    if const_expr(longest_first):
        m_block = m_blocks - 1 - m_block
    batch_index = head // heads
    return m_block, head - batch_index * heads, batch_index


@cute.jit
def block_list(
    blocks: tuple, batch_index: Int32, head: Int32, m_block: Int32, tile_n: cutlass.Constexpr
) -> tuple[Int64, Int32, Int32]:
    """(address of a query block's list of key blocks, steps that the mask cuts, steps in all).

    ``blocks`` as `fa3.kernels.parts.work.Extras` has it; a key block has ``BLOCK / tile_n`` key tiles, and as many
    steps.
    """
    counts_address, indices_address, batch_stride, head_stride, key_blocks = blocks
    row = Int64(batch_index) * batch_stride + head * head_stride + m_block
    counts = cute.make_ptr(Int32, counts_address, cute.AddressSpace.gmem, assumed_align=4)
    counts = cute.make_tensor(counts + 2 * row, cute.make_layout(2))
    steps = BLOCK // tile_n
    cut = counts[0] * steps
    return indices_address + 4 * row * key_blocks, cut, cut + counts[1] * steps


@cute.jit
def listed_key_tile(address: Int64, step: Int32, tile_n: cutlass.Constexpr) -> Int32:
    """The key tile of a step, from the list of key blocks at ``address``; the tiles of a block run downward."""
    steps = BLOCK // tile_n
    indices = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    block = cute.make_tensor(indices + step // steps, cute.make_layout(1))[0]
    return block * steps + (steps - 1 - step % steps)


@cute.jit
def listed_steps(
    blocks: tuple, batch_index: Int32, first_head: Int32, heads: Int32, block: Int32, tile: cutlass.Constexpr
) -> Int32:
    """The steps of a block, as `block_list` has them, of some heads together."""
    _, _, steps = block_list(blocks, batch_index, first_head, block, tile)
    if blocks[3] == 0:
        # The heads share their lists.
        steps = steps * heads
    else:
        for head in cutlass.range(first_head + 1, first_head + heads, unroll=4):
            _, _, more = block_list(blocks, batch_index, head, block, tile)
            steps = steps + more
    return steps


class Supply(NamedTuple):
    """Hands the tiles of the output to the blocks, each when it has done with the one before.

    The first tile of a block may be its own number; all others come from a counter in global memory, so that no
    block waits while another has tiles left. One warp of the block, the one that loads, fetches the numbers,
    works out the places and publishes them in a ring in shared memory, where every consumer warp finds them.
    """

    #: Address of an int32 that is 0 before the launch and, of itself, after it.
    counter: Int64
    #: How often all blocks together fetch: once for each tile and once in vain for each block, less ``given``.
    fetches: Int32
    #: Tiles that are not fetched, one for each block, or 0.
    given: Int32
    #: (query tile, head, batch index) of each slot.
    slots: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer

    @cute.jit
    def fetch(self) -> Int32:
        """The next tile that no block has, or a number that is no tile's. Called by one whole warp."""
        fetched = Int32(0)
        if cute.arch.lane_idx() == 0:
            counter = cute.make_ptr(Int32, self.counter, cute.AddressSpace.gmem, assumed_align=4)
            fetched = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
            # The last fetch of the launch: the counter is free.
            if fetched == self.fetches - 1:
                cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
        return self.given + cute.arch.shuffle_sync(fetched, offset=0)

    @cute.jit
    def publish(self, number: Int32, m_block: Int32, head: Int32, batch_index: Int32):
        """Let the consumers see the block's tile ``number``; a negative query tile ends it. For one whole warp."""
        barriers.wait_empty(self.empty, number, SLOTS)
        if cute.arch.lane_idx() == 0:
            slot = barriers.stage_of(number, SLOTS)
            self.slots[0, slot] = m_block
            self.slots[1, slot] = head
            self.slots[2, slot] = batch_index
            cute.arch.mbarrier_arrive(self.full + slot)

    @cute.jit
    def take(self, number: Int32) -> tuple[Int32, Int32, Int32]:
        """The place of the block's tile ``number``, for every consumer warp; a negative query tile: no more."""
        barriers.wait_full(self.full, number, SLOTS)
        slot = barriers.stage_of(number, SLOTS)
        m_block, head, batch_index = self.slots[0, slot], self.slots[1, slot], self.slots[2, slot]
        # All lanes have read.
        cute.arch.sync_warp()
        barriers.release(self.empty, number, SLOTS)
        uniform = cute.arch.make_warp_uniform
        return uniform(m_block), uniform(head), uniform(batch_index)
