"""WGMMA products of one warpgroup, and rounding their results for the next one."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from fa3.spec import WGMMA_ROWS

from . import layout, ptx


def make_mma(
    dtype: type[cutlass.Numeric],
    columns: int,
    a_source: warpgroup.OperandSource,
    b_major: OperandMajorMode,
    a_major: OperandMajorMode = OperandMajorMode.K,
) -> cute.TiledMma:
    """64 x ``columns`` x 16 WGMMA with float32 accumulation; of FP8 x 32 with about 14 bits of it, of int8 in int32.

    Made anew at each use: its accumulate flag is state of the object, which must not cross the boundary of a
    staged loop.
    """
    if dtype is cutlass.Int8:
        shape = (WGMMA_ROWS, columns, 32)
        return cute.make_tiled_mma(warpgroup.MmaI8Op(dtype, dtype, Int32, shape, a_source, a_major, b_major))
    if dtype.width == 8:
        shape = (WGMMA_ROWS, columns, 32)
        return cute.make_tiled_mma(warpgroup.MmaF8Op(dtype, dtype, Float32, shape, a_source, a_major, b_major))
    shape = (WGMMA_ROWS, columns, 16)
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, Float32, shape, a_source, a_major, b_major))


#: Columns of ones whose product with P makes row sums, as few as WGMMA takes.
SUM_COLUMNS = 8


@cute.jit
def issue(
    mma: cute.TiledMma,
    accumulator: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: Boolean | bool,
):
    """Issue accumulator (+)= A B as one group of WGMMAs."""
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(mma, accumulator, a[None, None, k], b[None, None, k], accumulator)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def issue_with_row_sums(
    mma: cute.TiledMma,
    accumulator: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: Boolean | bool,
    sums_mma: cute.TiledMma,
    sums: cute.Tensor,
    ones: cute.Tensor,
):
    """Issue accumulator (+)= A B and sums = A 1, the row sums of A, as one group of WGMMAs."""
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    sums_mma.set(warpgroup.Field.ACCUMULATE, False)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(mma, accumulator, a[None, None, k], b[None, None, k], accumulator)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        cute.gemm(sums_mma, sums, a[None, None, k], ones[None, None, 0, 0], sums)
        sums_mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def to_float(values: cute.Tensor, target: cute.Tensor):
    """target = values, int32 registers in float32."""
    source, floats = layout.flat(values), layout.flat(target)
    for i in cutlass.range_constexpr(cute.size(floats)):
        floats[i] = Float32(source[i])


@cute.jit
def round_to(dtype: cutlass.Constexpr, values: cute.Tensor, target: cute.Tensor):
    """Round float32 registers to fp16 or bf16; both fragments lie in the same order."""
    source = layout.flat(values)
    pairs = cute.recast_tensor(layout.flat(target), Int32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = ptx.pack_pair(source[2 * i], source[2 * i + 1], dtype)


@cute.jit
def round_to_fp8(values: cute.Tensor, target: cute.Tensor):
    """Round an accumulator of probabilities to e4m3 as the A operand of the PV product, saturating at 448.

    Of two neighbouring groups of 8 columns a thread's four values of a row become one word.
    """
    source = layout.flat(values)
    words = cute.recast_tensor(layout.flat(target), Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        row, pair = i % 2, i // 2
        left, right = 8 * pair + 2 * row, 8 * pair + 4 + 2 * row
        words[i] = ptx.pack_four(source[left], source[left + 1], source[right], source[right + 1])


@cute.jit
def copy_words(source: cute.Tensor, target: cute.Tensor, zero: Int32):
    """target = source, of two fragments alike.

    ``zero`` is 0, which the assembler must not know: without an operation it would let source and target share their
    registers, and then, since source is written while a product reads target, run one product after the other.
    """
    words, copies = (cute.recast_tensor(layout.flat(fragment), Int32) for fragment in (source, target))
    for i in cutlass.range_constexpr(cute.size(words)):
        copies[i] = words[i] ^ zero


@cute.jit
def any_of(words: cute.Tensor) -> Int32:
    """All words of a fragment or'ed together."""
    values = cute.recast_tensor(layout.flat(words), Int32)
    result = values[0]
    for i in cutlass.range_constexpr(1, cute.size(values)):
        result = result | values[i]
    return result


@cute.jit
def add_up(total: cute.Tensor, part: cute.Tensor):
    """total += part, in float32 registers."""
    for i in cutlass.range_constexpr(cute.size(total)):
        total[i] = total[i] + part[i]
