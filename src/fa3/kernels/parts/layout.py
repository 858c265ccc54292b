"""How a WGMMA accumulator lies in the registers of a warpgroup.

A 64 x N float32 accumulator gives each of the 128 threads 2 rows and N/4 columns. Thread ``t`` of the
warpgroup, in lane ``t % 32`` of warp ``t // 32``, holds rows ``16 * warp + lane // 4`` and that plus 8,
and in each group of 8 columns the two columns ``2 * (lane % 4)`` and that plus 1. In register order the
two columns run fastest, then the two rows, then the groups of 8 columns.

The A operand of a 16-bit WGMMA has the same order with 16 columns to a step, so the scores, converted in
place, are the probabilities' operand without any shuffle.

That of an 8-bit WGMMA, with 32 columns to a step, gives a thread four neighbouring columns, ``4 * (lane % 4)`` on, of
each 16. The order of keys is of no matter to the sum over them, so the second operand brings its keys in the order in
which threads hold the scores (`fa3.e4m3.key_of_slot`).
"""

import cutlass
import cutlass.cute as cute

#: Rows of the accumulator that one thread holds.
ROWS_PER_THREAD = 2


def flat(fragment: cute.Tensor) -> cute.Tensor:
    """View a fragment as one row of registers."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))


def rows_and_columns(accumulator: cute.Tensor) -> cute.Tensor:
    """View an accumulator fragment as (2 rows, N/4 columns) of this thread."""
    columns = cute.size(accumulator) // 4
    layout = cute.make_layout((2, (2, columns)), stride=(2, (1, 4)))
    return cute.make_tensor(accumulator.iterator, layout)


def make_probability_operand(tile_n: int, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Registers for the A operand of the PV product: (values, 1, steps), 8 of 16 bits or 16 of 8 bits to a step."""
    if dtype.width == 8:
        return cute.make_rmem_tensor(cute.make_layout(((4, 2, 2), 1, tile_n // 32)), dtype)
    return cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, tile_n // 16)), dtype)


def column_in_tile(index: int) -> int:
    """Column of the tile, for lane 0 of a quad, that the thread's column ``index`` stands for."""
    return 8 * (index // 2) + index % 2


def first_column(lane: cutlass.Int32) -> cutlass.Int32:
    """Offset that a lane adds to ``column_in_tile``."""
    return 2 * (lane % 4)


def first_row(warp_in_group: cutlass.Int32, lane: cutlass.Int32) -> cutlass.Int32:
    """Row, in the warpgroup's 64, of the thread's row 0; its row 1 is 8 further down."""
    return 16 * warp_in_group + lane // 4
