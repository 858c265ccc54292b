"""Which tile of the output a block works on."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@cute.jit
def tile_of_block(
    block: Int32,
    m_blocks: Int32,
    heads: Int32,
    batch: Int32,
    section: Int32,
    longest_first: cutlass.Constexpr,
) -> tuple[Int32, Int32, Int32]:
    """(query tile, query head, batch index) of a block.

    The heads of all batch entries stand in one row, cut into sections of ``section`` heads whose K and V
    fit in L2 together. Sections run one after the other. Inside a section the query tile is the slow index
    and the head the fast one, so that blocks that run at the same time share K and V; the longest tiles,
    which a causal mask puts last, start first.
    """
    blocks_of_section = m_blocks * section
    section_index = block // blocks_of_section
    first_head = section_index * section
    heads_here = cutlass.min(section, heads * batch - first_head)
    rest = block - section_index * blocks_of_section
    m_block = rest // heads_here
    head = first_head + rest - m_block * heads_here
    if const_expr(longest_first):
        m_block = m_blocks - 1 - m_block
    batch_index = head // heads
    return m_block, head - batch_index * heads, batch_index
