"""The products of a consumer of the backward: their operands, and what goes through shared memory between them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from fa3.backward_spec import DS_BUFFERS, BackwardSpec
from fa3.spec import WGMMA_ROWS

from . import barriers, layout, products
from .backward_work import KeyBarriers, KeyOperands, KeyShared
from .work import Consumer

K, MN = OperandMajorMode.K, OperandMajorMode.MN
SMEM, RMEM = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM


class KeyProducts:
    """The multiplying half of a consumer."""

    spec: BackwardSpec
    dtype: type[cutlass.Numeric]
    tile_m: int
    groups: int
    key_parts: int
    dk_columns: int
    dv_columns: int

    def scores_mma(self) -> cute.TiledMma:
        """S^T = K Q^T and dP^T = V dO^T: 64 keys by the group's queries."""
        return products.make_mma(self.dtype, self.spec.score_rows, SMEM, K)

    def dv_mma(self) -> cute.TiledMma:
        """dV += P^T dO: 64 keys by the group's columns."""
        return products.make_mma(self.dtype, self.dv_columns, RMEM if self.spec.split_keys else SMEM, MN)

    def dk_mma(self) -> cute.TiledMma:
        """dK += dS^T Q: 64 keys by the group's columns."""
        return products.make_mma(self.dtype, self.dk_columns, SMEM, MN)

    def dq_mma(self) -> cute.TiledMma:
        """dQ = dS K: 64 queries by the group's columns; dS lies transposed."""
        return products.make_mma(self.dtype, self.spec.dq_columns, SMEM, MN, a_major=MN)

    def accumulator(self, mma: cute.TiledMma, columns: int) -> cute.Tensor:
        """Registers for a product of 64 rows. Those that live no longer than a step are made anew in each.

        A WGMMA that does not accumulate reads its registers all the same, as far as the compiler knows: kept, they
        would be taken from one step to the next.
        """
        return cute.make_rmem_tensor(mma.partition_shape_C((WGMMA_ROWS, columns)), Float32)

    def make_operands(self, shared: KeyShared, me: Consumer) -> KeyOperands:
        """Descriptors of the tiles that this warpgroup multiplies, and its registers."""
        spec, group = self.spec, me.group
        scores_mma, dk_mma, dv_mma, dq_mma = (
            self.scores_mma(), self.dk_mma(), self.dv_mma(), self.dq_mma()
        )  # fmt: skip
        scores_slice, dk_slice, dv_slice, dq_slice = (mma.get_slice(0) for mma in (scores_mma, dk_mma, dv_mma, dq_mma))

        def part(tensor: cute.Tensor, size: int, mode: int = 0) -> cute.Tensor:
            """The warpgroup's ``size`` rows (or columns, mode 1) of all tiles, if not all of them."""
            if cute.size(tensor, mode=[mode]) == size:
                return tensor
            tiler = [cute.size(tensor, mode=[i]) for i in range(3)]
            tiler[mode] = size
            coordinate = [0, 0, 0]
            coordinate[mode] = group
            return cute.local_tile(tensor, tuple(tiler), tuple(coordinate))

        keys = group if spec.split_keys else 0
        queries = spec.score_rows
        q, dout = part(shared.q, queries), part(shared.dout, queries)
        k, v = shared.k[None, None, keys], shared.v[None, None, keys]
        ds_rows = part(shared.ds_rows, WGMMA_ROWS)
        k_columns = part(shared.k_columns, spec.dq_columns)
        if spec.split_keys:
            p = layout.make_probability_operand(self.tile_m, self.dtype)
        else:
            p = dv_mma.make_fragment_A(dv_slice.partition_A(shared.p))

        return KeyOperands(
            k=scores_mma.make_fragment_A(scores_slice.partition_A(k)),
            v=scores_mma.make_fragment_A(scores_slice.partition_A(v)),
            q=scores_mma.make_fragment_B(scores_slice.partition_B(q)),
            dout=scores_mma.make_fragment_B(scores_slice.partition_B(dout)),
            q_columns=dk_mma.make_fragment_B(dk_slice.partition_B(part(shared.q_columns, self.dk_columns))),
            dout_columns=dv_mma.make_fragment_B(dv_slice.partition_B(part(shared.dout_columns, self.dv_columns))),
            ds_rows=dq_mma.make_fragment_A(dq_slice.partition_A(ds_rows)),
            k_columns=dq_mma.make_fragment_B(dq_slice.partition_B(k_columns)),
            p=p,
            ds=dk_mma.make_fragment_A(dk_slice.partition_A(shared.ds)),
            dk=self.accumulator(dk_mma, self.dk_columns),
            dv=self.accumulator(dv_mma, self.dv_columns),
        )

    def rounded_scores(self) -> cute.Tensor:
        """Registers for a warpgroup's part of P or dS, rounded."""
        return layout.make_probability_operand(self.spec.score_rows, self.dtype)

    @cute.jit
    def issue_dk(self, position: Int32, group: Int32, between: KeyBarriers, operands: KeyOperands):
        """Issue dK += dS^T Q of a query tile once both warpgroups have written their dS."""
        barriers.wait_full(between.ds_full, position, DS_BUFFERS)
        q_columns = operands.q_columns[None, None, None, barriers.stage_of(position, self.spec.stages)]
        ds = operands.ds[None, None, None, self.ds_tile(position, group)]
        products.issue(self.dk_mma(), operands.dk, ds, q_columns, accumulate=True)

    def ds_tile(self, position: Int32, part: Int32 | int) -> Int32:
        """Number of the dS tile of a step, of one of its parts where each warpgroup has its own keys."""
        buffer = barriers.stage_of(position, DS_BUFFERS)
        return buffer * self.key_parts + part if self.spec.split_keys else buffer

    @cute.jit
    def issue_dq(self, position: Int32, operands: KeyOperands) -> cute.Tensor:
        """Issue dQ = dS K of a query tile, behind its dK; returns where it will be."""
        mma = self.dq_mma()
        dq = self.accumulator(mma, self.spec.dq_columns)
        if const_expr(self.spec.dq_stages == 0):
            return dq
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for part in cutlass.range_constexpr(self.key_parts):
            ds_rows = operands.ds_rows[None, None, None, self.ds_tile(position, part)]
            for k in cutlass.range_constexpr(cute.size(ds_rows, mode=[2])):
                b = operands.k_columns[None, None, k, part]
                cute.gemm(mma, dq, ds_rows[None, None, k], b, dq)
                mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        return dq

    @cute.jit
    def make_visible(self):
        """Let the tensor core and bulk copies see what this warp has written to shared memory."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    @cute.jit
    def share(self, rounded: cute.Tensor, shared: cute.Tensor, position: Int32, full: cute.Pointer, me: Consumer):
        """Put the warpgroup's part of P or dS into shared memory, and say so."""
        spec = self.spec
        if const_expr(spec.split_keys):
            tile = shared[None, None, self.ds_tile(position, me.group)]
        else:
            tile = cute.local_tile(
                shared[None, None, barriers.stage_of(position, DS_BUFFERS)],
                (WGMMA_ROWS, spec.score_rows),
                (0, me.group),
            )
        self.write(rounded, tile, me)
        self.make_visible()
        barriers.release(full, position, DS_BUFFERS)
