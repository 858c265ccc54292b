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
    """64 x ``columns`` x 16 WGMMA with float32 accumulation, of FP8 x 32 with about 14 bits of it.

    Made anew at each use: its accumulate flag is state of the object, which must not cross the boundary of a
    staged loop.
    """
    if dtype.width == 8:
        shape = (WGMMA_ROWS, columns, 32)
        return cute.make_tiled_mma(warpgroup.MmaF8Op(dtype, dtype, Float32, shape, a_source, a_major, b_major))
    shape = (WGMMA_ROWS, columns, 16)
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, Float32, shape, a_source, a_major, b_major))


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
def add_up(total: cute.Tensor, part: cute.Tensor):
    """total += part, in float32 registers."""
    for i in cutlass.range_constexpr(cute.size(total)):
        total[i] = total[i] + part[i]
