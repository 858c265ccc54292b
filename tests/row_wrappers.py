"""Packed rows as functions of the host: loops over cases that read and write plain tables in memory.

Every pointer is the address of a contiguous CPU tensor. Functions of the DSL must stand in a real file.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from brick_wrappers import WARPGROUP_THREADS, table
from fa3.kernels.parts import rows
from fa3.kernels.parts.mask import Mask
from fa3.kernels.parts.work import Consumer, Extras, Sizes, Work


def _fields(kind: type, **known: object) -> tuple:
    """A named tuple of which only what matters here is given."""
    return kind(**{name: known.get(name, Int32(0)) for name in kind._fields})


def _work(rows_in_all: Int32, group: Int32, first_row: Int32, head: Int32, batch: Int32, extras: tuple) -> tuple:
    sizes = _fields(Sizes, rows=rows_in_all, group=group, mask=_fields(Mask))
    return _fields(Work, sizes=sizes, extras=extras, first_row=first_row, head=head, batch_index=batch)


@cute.jit
def places_of_rows(cases_address: Int64, out_address: Int64, count: Int32):
    """cases (count, 3: row, head of tiles, group) -> out (count, packed, 2: query, query head)."""
    cases, out = table(cases_address, Int32, (count, 3)), table(out_address, Int32, (count, 2, 2))
    for i in cutlass.range(count, unroll=1):
        for packed in cutlass.range_constexpr(2):
            out[i, packed, 0] = rows.query_of(cases[i, 0], cases[i, 2], packed == 1)
            out[i, packed, 1] = rows.head_of(cases[i, 0], cases[i, 1], cases[i, 2], packed == 1)


@cute.jit
def packed_tile(
    tensor: Int64,
    tile_address: Int64,
    numbers_address: Int64,
    first_row: Int32,
    head: Int32,
    batch: Int32,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    load: cutlass.Constexpr,
):
    """Move the rows of one warpgroup between a (batch, seqlen, heads, head dim) tensor and a tile (64, columns).

    numbers (6): batch, row and head stride, head dim, rows in all, group.
    """
    numbers = table(numbers_address, Int32, (6,))
    strides = (Int64(numbers[n]) for n in range(3))
    packed = rows.GlobalRows(tensor, *strides, numbers[3])
    work = _work(numbers[4], numbers[5], first_row, head, batch, _fields(Extras))
    # 16 bytes are moved at a time.
    pointer = cute.make_ptr(dtype, tile_address, cute.AddressSpace.generic, assumed_align=16)
    tile = cute.make_tensor(pointer, cute.make_layout((64, columns), stride=(columns, 1)))
    for thread in cutlass.range(WARPGROUP_THREADS, unroll=1):
        # The second warpgroup of a block: its rows begin 64 further down.
        me = Consumer(Int32(1), thread // 32, thread % 32, False)
        if cutlass.const_expr(load):
            rows.load_packed(dtype, columns, packed, work, me, tile)
        else:
            rows.store_packed(dtype, columns, packed, work, me, tile)


@cute.jit
def sinks_of_rows(
    sinks: Int64, cases_address: Int64, out_address: Int64, count: Int32, bytes_of_one: Int32, packed: cutlass.Constexpr
):
    """cases (count, 3: row, head of tiles, group) -> out (count,) in log2 units."""
    cases, out = table(cases_address, Int32, (count, 3)), table(out_address, Float32, (count,))
    extras = _fields(Extras, sink=sinks, sink_bytes=bytes_of_one)
    for i in cutlass.range(count, unroll=1):
        work = _work(Int32(0), cases[i, 2], Int32(0), cases[i, 1], Int32(0), extras)
        out[i] = rows.sink_log2(work, cases[i, 0], packed)
