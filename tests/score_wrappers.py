"""What is done to scores, as functions of the host: loops over cases that read and write plain tables in memory.

Every pointer is the address of a contiguous CPU tensor. Functions of the DSL must stand in a real file.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from brick_wrappers import COLUMNS, WARPGROUP_THREADS, table
from fa3.kernels.parts import layout, rows, scores

#: Codes of the tensors of ``elements_of_aux``.
AUX_CODES = "f1,i2,f3"


@cute.jit
def tanh(values_address: Int64, out_address: Int64, count: Int32):
    """values (count,) -> out (count,)."""
    values, out = table(values_address, Float32, (count,)), table(out_address, Float32, (count,))
    for i in cutlass.range(count, unroll=1):
        out[i] = scores.tanh(values[i])


@cute.jit
def capped(values_address: Int64, out_address: Int64, count: Int32, factor: Float32):
    """values (count, registers) -> out (count, registers), the registers seen as rows and columns of a thread."""
    values = table(values_address, Float32, (count, COLUMNS // 2))
    out = table(out_address, Float32, (count, COLUMNS // 2))
    registers = cute.make_rmem_tensor(COLUMNS // 2, Float32)
    for i in cutlass.range(count, unroll=1):
        for v in cutlass.range_constexpr(COLUMNS // 2):
            registers[v] = values[i, v]
        scores.cap(layout.rows_and_columns(registers), factor)
        for v in cutlass.range_constexpr(COLUMNS // 2):
            out[i, v] = registers[v]


@cute.jit
def elements_of_aux(
    first: Int64, second: Int64, third: Int64, out1: Int64, out2: Int64, out3: Int64, n0: Int32, n1: Int32, n2: Int32
):
    """Tensors (n0,), (n0, n1) and (n0, n1, n2) with the codes ``AUX_CODES`` -> the same, read element by element."""
    aux = scores.make_aux(AUX_CODES, (first, n0, second, n0, n1, third, n0, n1, n2))
    copy1, copy2 = table(out1, Float32, (n0,)), table(out2, Int32, (n0, n1))
    copy3 = table(out3, Float32, (n0, n1, n2))
    for i in cutlass.range(n0, unroll=1):
        copy1[i] = aux[0][i]
        for j in cutlass.range(n1, unroll=1):
            copy2[i, j] = aux[1][i, j]
            for k in cutlass.range(n2, unroll=1):
                copy3[i, j, k] = aux[2][i, j, k]


@cute.jit
def name_place(score: Float32, batch: Int32, head: Int32, q_index: Int32, kv_index: Int32, aux: tuple) -> Float32:
    """All that a modification of scores gets, in one number: exact for a score below 16 with one binary place."""
    return score + Float32(16 * (kv_index + 256 * (q_index + 64 * (head + 8 * batch))))


@cute.jit
def sees_some(batch: Int32, head: Int32, q_index: Int32, kv_index: Int32, aux: tuple) -> Boolean:
    """A mask in which every argument has a say."""
    return (kv_index + 2 * q_index + 3 * head + 5 * batch) % 7 < 4


@cute.jit
def changed_tiles(
    cases_address: Int64,
    aux_address: Int64,
    out_address: Int64,
    count: Int32,
    size0: Int32,
    size1: Int32,
    name: cutlass.Constexpr,
    codes: cutlass.Constexpr,
    is_mask: cutlass.Constexpr,
):
    """cases (count, 5: first row, group, head of tiles, batch, first key) -> out (count, thread, register).

    Register ``i`` of each thread holds the score ``i``, and the factor on scores is 1/2. Rows are packed. The
    modification ``name`` reads one tensor (size0, size1), or none if ``codes`` is empty.
    """
    cases = table(cases_address, Int32, (count, 5))
    out = table(out_address, Float32, (count, WARPGROUP_THREADS, COLUMNS // 2))
    aux = scores.make_aux(codes, (aux_address, size0, size1))
    mod = scores.find_mod(name)
    registers = cute.make_rmem_tensor(COLUMNS // 2, Float32)
    view = layout.rows_and_columns(registers)
    for i in cutlass.range(count, unroll=1):
        group, head, batch = cases[i, 1], cases[i, 2], cases[i, 3]
        for thread in cutlass.range(WARPGROUP_THREADS, unroll=1):
            lane = thread % 32
            row = cases[i, 0] + layout.first_row(thread // 32, lane)
            queries = rows.query_of(row, group, True), rows.query_of(row + 8, group, True)
            heads = rows.head_of(row, head, group, True), rows.head_of(row + 8, head, group, True)
            key = cases[i, 4] + layout.first_column(lane)
            for v in cutlass.range_constexpr(COLUMNS // 2):
                registers[v] = Float32(v)
            if cutlass.const_expr(is_mask):
                scores.hide(mod, view, batch, heads, queries, key, aux)
            else:
                scores.modify(mod, view, Float32(0.5), batch, heads, queries, key, aux)
            for v in cutlass.range_constexpr(COLUMNS // 2):
                out[i, thread, v] = registers[v]
