"""Which tiles of the output a block works on, and where they lie."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@cute.jit
def rounds(tiles: Int32, blocks: Int32) -> Int32:
    """Rounds until ``blocks`` blocks have taken all tiles, one each in a round; the last may be partial."""
    return (tiles + blocks - 1) // blocks


@cute.jit
def tile_of_round(index: Int32, block: Int32, blocks: Int32, paired: Int32) -> Int32:
    """The tile that a block takes in a round; beyond the last tile there is nothing to do.

    A paired block takes the two tiles of a pair one after the other. Without pairs every second round runs
    backwards, so that with the longest tiles first each block gets about as much.
    """
    place = block if (index & 1) == 0 else blocks - 1 - block
    tile = index * blocks + place
    if paired != 0:
        tile = 2 * ((index >> 1) * blocks + block) + (index & 1)
    return tile


@cute.jit
def place_of_tile(
    tile: Int32,
    m_blocks: Int32,
    heads: Int32,
    batch: Int32,
    section: Int32,
    paired: Int32,
    longest_first: cutlass.Constexpr,
) -> tuple[Int32, Int32, Int32]:
    """(query tile, query head, batch index) of a tile.

    The heads of all batch entries stand in one row, cut into sections of ``section`` heads that run side by
    side. Sections run one after the other. Inside a section the query tile is the slow index and the head the
    fast one, so that blocks that run at the same time share K and V; the longest tiles, which a causal mask
    puts last, start first.

    With ``paired``, tiles 2i and 2i + 1 are a long and a short one of the same head, and all pairs are equally
    long. If the number of query tiles is odd, the longest stands alone: its partner is query tile -1.
    """
    rows = m_blocks
    number = tile
    if paired != 0:
        rows = (m_blocks + 1) >> 1
        number = tile >> 1
    tiles_of_section = rows * section
    section_index = number // tiles_of_section
    first_head = section_index * section
    heads_here = cutlass.min(section, heads * batch - first_head)
    rest = number - section_index * tiles_of_section
    m_block = rest // heads_here
    head = first_head + rest - m_block * heads_here
    if const_expr(longest_first):
        if paired != 0 and (tile & 1) == 1:
            m_block = m_block - (m_blocks & 1)
        else:
            m_block = m_blocks - 1 - m_block
    batch_index = head // heads
    return m_block, head - batch_index * heads, batch_index
