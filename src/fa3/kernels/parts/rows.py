"""Rows of a tile: which query and head each is, and moving packed rows without TMA.

Packed, the query heads that share a K/V head are rows of one tile, the heads of a query next to each other: row r of
K/V head h is query ``r // group`` of head ``h * group + r % group``. Their rows in memory are no rectangle that a TMA
tile of fixed size could describe for every group size, so the warpgroup that owns them moves them itself.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from fa3.spec import WARPGROUP_THREADS, WGMMA_ROWS

from . import barriers
from .softmax import LOG2_E
from .work import Consumer, GlobalRows, Work

#: Elements of 16 bits that one thread moves at once: 16 bytes.
VECTOR = 8


@cute.jit
def query_of(row: Int32, group: Int32, packed: cutlass.Constexpr) -> Int32:
    """The query of a row."""
    if const_expr(packed):
        return Int32(Uint32(row) // Uint32(group))
    else:
        return row


@cute.jit
def head_of(row: Int32, head: Int32, group: Int32, packed: cutlass.Constexpr) -> Int32:
    """The query head of a row of a head of tiles."""
    if const_expr(packed):
        return head * group + Int32(Uint32(row) % Uint32(group))
    else:
        return head


def tiled_copy(columns: int, dtype: type[cutlass.Numeric]) -> tuple[cute.TiledCopy, int]:
    """How 128 threads share a tile of 64 rows, and across how many threads a row lies."""
    vectors = columns // VECTOR
    across = vectors & -vectors  # the largest power of two that divides it
    threads = cute.make_ordered_layout((WARPGROUP_THREADS // across, across), order=(1, 0))
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=dtype.width * VECTOR)
    return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, VECTOR))), across


@cute.jit
def _in_memory(
    dtype: cutlass.Constexpr, rows: GlobalRows, work: Work, row: Int32, column: Int32
) -> tuple[cute.Tensor, cutlass.Boolean]:
    """The 8 elements of a row from ``column`` on, and whether they exist."""
    group = work.sizes.group
    query, head = query_of(row, group, True), head_of(row, work.head, group, True)
    exists = row < work.sizes.rows and column < rows.columns
    offset = Int64(work.batch_index) * rows.batch_stride + Int64(query) * rows.row_stride
    offset = offset + Int64(head) * rows.head_stride + column
    pointer = cute.make_ptr(dtype, rows.address, cute.AddressSpace.gmem, assumed_align=16)
    offset = cute.assume(offset, divby=VECTOR)
    return cute.make_tensor(pointer + offset, cute.make_layout(VECTOR)), exists


@cute.jit
def load_packed(
    dtype: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    rows: GlobalRows,
    work: Work,
    me: Consumer,
    target: cute.Tensor,
):
    """Bring the warpgroup's 64 packed rows into shared memory; what does not exist becomes 0."""
    copy, across = tiled_copy(columns, dtype)
    thread = 32 * me.warp + me.lane
    in_shared = copy.get_slice(thread).partition_D(target)
    # The products and stores that used this memory before are done in every warp.
    barriers.sync_group(me.group)
    down = WARPGROUP_THREADS // across
    for i in cutlass.range_constexpr(WGMMA_ROWS // down):
        row = work.first_row + WGMMA_ROWS * me.group + i * down + thread // across
        for j in cutlass.range_constexpr(columns // (VECTOR * across)):
            column = VECTOR * (j * across + thread % across)
            values = cute.make_rmem_tensor(VECTOR, dtype)
            values.fill(0.0)
            source, exists = _in_memory(dtype, rows, work, row, column)
            if exists:
                cute.autovec_copy(source, values)
            part = in_shared[None, i, j]
            cute.copy(copy, cute.make_tensor(values.iterator, part.layout), part)
    # Ordinary writes must be visible to the tensor core.
    cute.arch.fence_proxy("async.shared", space="cta")
    barriers.sync_group(me.group)


@cute.jit
def store_packed(
    dtype: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    rows: GlobalRows,
    work: Work,
    me: Consumer,
    source: cute.Tensor,
):
    """Write the warpgroup's 64 packed rows from shared memory, after a barrier of the group."""
    copy, across = tiled_copy(columns, dtype)
    thread = 32 * me.warp + me.lane
    in_shared = copy.get_slice(thread).partition_S(source)
    down = WARPGROUP_THREADS // across
    # Not unrolled whole: the compiler would keep the places of all rows since they were loaded, and spill.
    for i in cutlass.range(WGMMA_ROWS // down, unroll=4):
        row = work.first_row + WGMMA_ROWS * me.group + i * down + thread // across
        for j in cutlass.range_constexpr(columns // (VECTOR * across)):
            column = VECTOR * (j * across + thread % across)
            part = in_shared[None, i, j]
            values = cute.make_rmem_tensor(part.layout, dtype)
            cute.copy(copy, part, values)
            target, exists = _in_memory(dtype, rows, work, row, column)
            if exists:
                cute.autovec_copy(cute.make_tensor(values.iterator, cute.make_layout(VECTOR)), target)


@cute.jit
def sink_log2(work: Work, row: Int32, packed: cutlass.Constexpr) -> Float32:
    """The sink of a row's head in log2 units; only where there are sinks. A row that does not exist may ask too."""
    head = head_of(row, work.head, work.sizes.group, packed)
    value = Float32(0.0)
    if work.extras.sink_bytes == 4:
        pointer = cute.make_ptr(Float32, work.extras.sink, cute.AddressSpace.gmem, assumed_align=4)
        value = cute.make_tensor(pointer + head, cute.make_layout(1))[0]
    else:
        narrow = cute.make_ptr(cutlass.BFloat16, work.extras.sink, cute.AddressSpace.gmem, assumed_align=2)
        value = Float32(cute.make_tensor(narrow + head, cute.make_layout(1))[0])
    return value * LOG2_E
