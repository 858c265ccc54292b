"""TMA copies: views of tensors in global memory, layouts of tiles in shared memory, and issuing a load."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from fa3.spec import TMA_ALIGNMENT

from .work import Load


def global_tensor(
    dtype: type[cutlass.Numeric], address: Int64, shape: tuple, strides: tuple[Int64, Int64, Int64]
) -> cute.Tensor:
    """(rows, columns, heads, batch) view of a tensor; strides of rows, heads and batch, columns are contiguous."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=TMA_ALIGNMENT)
    row, head, batch = (cute.assume(stride, divby=8 * TMA_ALIGNMENT // dtype.width) for stride in strides)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=(row, 1, head, batch)))


def swizzle_span(contiguous: int) -> int:
    """Bytes over which the layout of a tile swizzles, by its contiguous bytes."""
    return next(span for span in (128, 64, 32) if contiguous % span == 0)


def shared_layout(
    dtype: type[cutlass.Numeric], shape: tuple, major: OperandMajorMode, pitch: int | None = None, part: int = 0
) -> cute.ComposedLayout:
    """Swizzled layout of tiles in shared memory, (rows, columns, stage); the swizzle spans 128 bytes, or 64, or 32.

    ``pitch`` is the number of elements from one tile to the next, if it is not that of a tile. Operands may begin at
    multiples of ``part`` contiguous elements, if it is given.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    contiguous = part or (shape[1] if major == OperandMajorMode.K else shape[0])
    if major == OperandMajorMode.K:
        spans, order = {128: kinds.K_SW128, 64: kinds.K_SW64, 32: kinds.K_SW32}, (0, 1, 2)
    else:
        spans, order = {128: kinds.MN_SW128, 64: kinds.MN_SW64, 32: kinds.MN_SW32}, (1, 0, 2)
    kind = spans[swizzle_span(contiguous * dtype.width // 8)]
    layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order)
    if pitch is None:
        return layout
    rows, columns, _ = layout.outer.stride
    outer = cute.make_layout((*layout.outer.shape[:2], shape[2]), stride=(rows, columns, pitch))
    return cute.make_composed_layout(layout.inner, 0, outer)


def make_tma(op: cpasync.TmaCopyOp, view: cute.Tensor, shared: cute.ComposedLayout) -> tuple:
    """(copy atom, tensor of coordinates) that move a tile between the view and one stage of the shared layout."""
    tile = cute.select(shared, mode=[0, 1])
    return cpasync.make_tiled_tma_atom(op, view, tile, (cute.size(shared, mode=[0]), cute.size(shared, mode=[1])))


def partition(tma: cute.CopyAtom, in_shared: cute.Tensor, in_global: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """(bytes of a tile, stage) and (bytes of a tile, tile, head, batch) views for a TMA copy between the two."""
    return cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(in_shared, 0, 2), cute.group_modes(in_global, 0, 2)
    )


@cute.jit
def issue_bulk(full: cute.Pointer, source: Int64, target: cute.Tensor):
    """Start the copy of contiguous float32 at an address, as many as the target has; counted at a barrier armed before.

    The address is a multiple of 16 bytes; called by one whole warp.
    """
    pointer = cute.make_ptr(Float32, source, cute.AddressSpace.gmem, assumed_align=TMA_ALIGNMENT)
    with cute.arch.elect_one():
        cute.copy(
            cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32),
            cute.make_tensor(pointer, cute.make_layout(cute.size(target))),
            target,
            mbar_ptr=full,
        )


@cute.jit
def issue(load: Load, stage: Int32, tile: Int32, head: Int32, batch_index: Int32):
    """Start the copy of a tile into a stage; called by one whole warp."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(load.full + stage, load.bytes)
    source = load.source[None, tile, head, batch_index]
    cute.copy(load.tma, source, load.target[None, stage], tma_bar_ptr=load.full + stage)
