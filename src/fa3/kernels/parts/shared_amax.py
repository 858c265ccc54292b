"""The largest of all values whose rows share a scale: of a warp, of a thread block, of the thread blocks of a cluster.

Two buffers take turns from head to head: a warp that tells its largest value of the next head has read those of this
one, and none tells that of the head after the next before all have told theirs of the next.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fa3.spec import QuantizeSpec


class SharedAmax:
    """Device code of a ``QuantizeSpec``: shared memory, and what warps and thread blocks tell each other there."""

    def __init__(self, spec: QuantizeSpec):
        self.spec = spec
        self.warps = spec.threads // 32

    @cute.jit
    def storage(self, thread: Int32) -> tuple[cute.Tensor, Any]:
        """The largest values, (warps of the cluster or more, 2), and in a cluster the barriers that they arrive at."""
        cluster, count = self.spec.cluster, self.spec.warp_values

        @cute.struct
        class Storage:
            of_warps: cute.struct.MemRange[Int32, 2 * count]
            arrived: cute.struct.MemRange[Int64, 2 if cluster > 1 else 0]

        shared = cutlass.utils.SmemAllocator().allocate(Storage)
        arrived = shared.arrived.data_ptr() if cluster > 1 else None
        if const_expr(cluster > 1):
            if thread == 0:
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(arrived + i, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.cluster_arrive_relaxed()
        return shared.of_warps.get_tensor(cute.make_layout((count, 2))), arrived

    @cute.jit
    def wait_for_start(self):
        """Before the first `find`: wait until all thread blocks of the cluster have started and made their barriers."""
        if const_expr(self.spec.cluster > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def find(self, amax: Float32, thread: Int32, part: Int32, shared: tuple[cute.Tensor, Any], turn: Int32) -> Float32:
        """The largest of the threads' ``amax``, none of which is negative, in all of them.

        Args:
            part: which thread block of its cluster this is.
            shared: as of `storage`.
            turn: how often all have called this.
        """
        # As integers: the bits of floats that are not negative are in their order, and a warp reduces in one step.
        bits = cute.arch.warp_redux_sync(amax.bitcast(Int32), "max")
        of_warps, arrived = shared
        lane, members = thread % 32, self.warps * self.spec.cluster
        if const_expr(members > 1):
            self.tell(bits, thread, part, of_warps, arrived, turn)
            bits = Int32(0)
            for first in cutlass.range_constexpr(0, members, 32):
                if lane + first < members:
                    bits = cutlass.max(bits, of_warps[lane + first, turn & 1])
            bits = cute.arch.warp_redux_sync(bits, "max")
        return bits.bitcast(Float32)

    @cute.jit
    def tell(self, bits: Int32, thread: Int32, part: Int32, of_warps: cute.Tensor, arrived: Any, turn: Int32):
        """Write a warp's largest value to the shared memory of all thread blocks, and wait for those of all warps."""
        cluster, lane, buffer = self.spec.cluster, thread % 32, turn & 1
        if const_expr(cluster == 1):
            if lane == 0:
                of_warps[thread // 32, buffer] = bits
            cute.arch.sync_threads()
        else:
            # Not by a barrier of the cluster: that would wait for all that was written to global memory.
            barrier = arrived + buffer
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * self.warps * cluster)
            # Lane i tells thread block i.
            if lane < cluster:
                place = of_warps.iterator + (part * self.warps + thread // 32 + buffer * self.spec.warp_values)
                cute.arch.store_async_dsmem(place, bits, barrier, lane)
            cute.arch.mbarrier_wait(barrier, (turn >> 1) & 1)
