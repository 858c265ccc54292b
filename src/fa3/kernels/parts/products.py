"""WGMMA products of one warpgroup, and rounding their results for the next one."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from fa3.spec import WGMMA_ROWS

from . import ptx


def make_mma(
    dtype: type[cutlass.Numeric],
    columns: int,
    a_source: warpgroup.OperandSource,
    b_major: OperandMajorMode,
    a_major: OperandMajorMode = OperandMajorMode.K,
) -> cute.TiledMma:
    """64 x ``columns`` x 16 WGMMA with float32 accumulation.

    Made anew at each use: its accumulate flag is state of the object, which must not cross the boundary of a
    staged loop.
    """
    shape = (WGMMA_ROWS, columns, 16)
    op = warpgroup.MmaF16BF16Op(dtype, Float32, shape, a_source, a_major, b_major)
    return cute.make_tiled_mma(op)


@cute.jit
def issue(
    mma: cute.TiledMma,
    accumulator: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: cutlass.Constexpr,
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
    source = cute.make_tensor(values.iterator, cute.make_layout(cute.size(values)))
    pairs = cute.recast_tensor(cute.make_tensor(target.iterator, cute.make_layout(cute.size(target))), Int32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = ptx.pack_pair(source[2 * i], source[2 * i + 1], dtype)
