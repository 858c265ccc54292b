"""Setting up a forward kernel: TMA descriptors and sizes at the launch; memory, barriers and loads in a block.

`cute.struct` reads the annotations of its fields as values, so that they must not be postponed in this file.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync

from fa3.e4m3 import slots_of
from fa3.spec import FP8_KEYS, WGMMA_ROWS, ForwardSpec

from . import copies, products, tiles, transpose
from .mask import Mask
from .work import GlobalRows, Load, Loads, Ring, Shared, Sizes, Store


class Layouts(NamedTuple):
    """Layouts of tiles in shared memory, (rows, columns, warpgroup or stage); ``None`` for those that a spec lacks."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    out: cute.ComposedLayout
    qv: cute.ComposedLayout | None
    v_keys: cute.ComposedLayout | None
    v_rows: cute.ComposedLayout | None
    ones: cute.ComposedLayout | None


class Descriptor(NamedTuple):
    """What TMA moves tiles of a tensor by: the copy, and the tensor as coordinates, (rows, columns, head, batch)."""

    tma: cute.CopyAtom
    tensor: cute.Tensor


class Descriptors(NamedTuple):
    """Those of a forward kernel."""

    q: Descriptor
    k: Descriptor
    v: Descriptor
    out: Descriptor
    qv: Descriptor | None


class Rings(NamedTuple):
    """Barriers of the tiles that TMA brings, and of v as the products read it: another only where it is transposed."""

    q: Ring
    k: Ring
    v: Ring
    v_ready: Ring


class Setup:
    """The part of a forward kernel that is over before the first tile."""

    spec: ForwardSpec
    dtype: type[cutlass.Numeric]
    qk_dtype: type[cutlass.Numeric]
    out_dtype: type[cutlass.Numeric]
    v_major: OperandMajorMode
    transposes: bool
    tile_m: int
    tile_n: int
    stages: int
    v_stages: int
    head_dim: int
    head_dim_v: int
    groups: int

    def layouts(self) -> Layouts:
        """How tiles lie in shared memory."""
        rows_major = OperandMajorMode.K
        # Without a place of its own, the out tile of a warpgroup takes that of its q tile, and of no other's.
        q_pitch, out_pitch = None, None
        if not self.spec.out_has_own_tile:
            place = self.spec.q_out_bytes // self.groups
            q_pitch, out_pitch = place * 8 // self.dtype.width, place * 8 // self.out_dtype.width
        q_shape = (WGMMA_ROWS, self.head_dim, self.groups)
        out_shape = (WGMMA_ROWS, self.spec.out_columns, self.groups)
        qv, v_keys, v_rows, ones = None, None, None, None
        if self.spec.qv:
            qv = copies.shared_layout(self.dtype, (WGMMA_ROWS, self.head_dim_v, self.groups), rows_major)
            v_keys = copies.shared_layout(self.dtype, (self.tile_n, self.head_dim_v, self.stages), rows_major)
        if self.transposes:
            v_rows = copies.shared_layout(self.dtype, (self.tile_n, self.head_dim_v, self.v_stages), rows_major)
        if self.spec.fp8:
            ones = copies.shared_layout(self.dtype, (products.SUM_COLUMNS, FP8_KEYS, 1), rows_major)
        return Layouts(
            copies.shared_layout(self.qk_dtype, q_shape, rows_major, q_pitch),
            copies.shared_layout(self.qk_dtype, (self.tile_n, self.head_dim, self.stages), rows_major),
            copies.shared_layout(self.dtype, (self.head_dim_v, self.tile_n, self.stages), self.v_major),
            copies.shared_layout(self.out_dtype, out_shape, rows_major, out_pitch),
            qv,
            v_keys,
            v_rows,
            ones,
        )

    # ---- at the launch

    def descriptors(
        self,
        q: GlobalRows,
        k: GlobalRows,
        v: GlobalRows,
        out: GlobalRows,
        qv: GlobalRows | None,
        queries: tuple[Int32, Int32, Int32],
        keys: tuple[Int32, Int32, Int32],
    ) -> Descriptors:
        """The TMA descriptors; ``queries`` and ``keys`` are (seqlen, heads, batch) of q and of k."""
        layouts = self.layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        v_view = self.view_of(self.dtype, v, keys)
        if self.spec.fp8 and not self.transposes:
            # Rows of V^T are columns of v; its keys are filled up with zeros.
            seqlen_k, heads_kv, batch = keys
            v_transposed = v._replace(columns=slots_of(seqlen_k))
            v_view = self.view_of(self.dtype, v_transposed, (v.columns, heads_kv, batch))
        elif not self.spec.fp8:
            # The PV product sees V as its B operand, (head_dim_v, keys).
            v_view = cute.make_tensor(v_view.iterator, cute.select(v_view.layout, mode=[1, 0, 2, 3]))
        qv_descriptor = None
        if qv is not None:
            qv_descriptor = Descriptor(*copies.make_tma(load, self.view_of(self.dtype, qv, queries), layouts.qv))
        return Descriptors(
            Descriptor(*copies.make_tma(load, self.view_of(self.qk_dtype, q, queries), layouts.q)),
            Descriptor(*copies.make_tma(load, self.view_of(self.qk_dtype, k, keys), layouts.k)),
            Descriptor(*copies.make_tma(load, v_view, layouts.v_rows if self.transposes else layouts.v)),
            Descriptor(*copies.make_tma(store, self.view_of(self.out_dtype, out, queries), layouts.out)),
            qv_descriptor,
        )

    def view_of(self, dtype: type[cutlass.Numeric], rows: GlobalRows, size: tuple[Int32, Int32, Int32]) -> cute.Tensor:
        """(rows, columns, heads, batch) view of a tensor of so many rows, heads and batches."""
        seqlen, heads, batch = size
        strides = (rows.row_stride, rows.head_stride, rows.batch_stride)
        return copies.global_tensor(dtype, rows.address, (seqlen, rows.columns, heads, batch), strides)

    def sizes(
        self,
        batch: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        heads_q: Int32,
        heads_kv: Int32,
        section: Int32,
        levels: Int32,
        window: tuple[Int32, Int32, Int32],
    ) -> Sizes:
        """How the launch cuts its output in tiles."""
        # Packed, the query heads of a K/V head are one head of tiles.
        group = heads_q // heads_kv
        heads, tile_rows, in_one = heads_q, seqlen_q, Int32(1)
        if self.spec.pack_gqa:
            heads, tile_rows, in_one, group = heads_kv, seqlen_q * group, group, Int32(1)
        m_blocks = (tile_rows + self.tile_m - 1) // self.tile_m
        # Under a causal mask the first tile is the one that is not full, for it is the shortest.
        first_row = Int32(0)
        if self.spec.causal and not self.spec.pack_gqa:
            first_row = -((m_blocks * self.tile_m - tile_rows) // WGMMA_ROWS * WGMMA_ROWS)
        return Sizes(
            batch, tile_rows, first_row, heads, group, in_one, m_blocks, section, levels, m_blocks * heads * batch,
            Mask(seqlen_q, seqlen_k, *window),
        )  # fmt: skip

    # ---- in a block

    def allocate(self, layouts: Layouts) -> Any:
        """Shared memory: the barriers, and the tiles."""
        spec = self.spec
        q_elements, out_elements = cute.cosize(layouts.q), cute.cosize(layouts.out)
        if not spec.out_has_own_tile:
            q_elements = spec.q_out_bytes * 8 // self.dtype.width
            out_elements = 0
        ones_elements = cute.cosize(layouts.ones) if spec.fp8 else 0
        v_rows_elements = cute.cosize(layouts.v_rows) if self.transposes else 0
        qv_elements = cute.cosize(layouts.qv) if spec.qv else 0

        @cute.struct
        class SharedStorage:
            q_full: cute.struct.MemRange[Int64, self.groups]
            q_empty: cute.struct.MemRange[Int64, self.groups]
            k_full: cute.struct.MemRange[Int64, self.stages]
            k_empty: cute.struct.MemRange[Int64, self.stages]
            v_full: cute.struct.MemRange[Int64, self.stages]
            v_empty: cute.struct.MemRange[Int64, self.stages]
            v_rows_full: cute.struct.MemRange[Int64, spec.transpose_stages]
            v_rows_empty: cute.struct.MemRange[Int64, spec.transpose_stages]
            tile_full: cute.struct.MemRange[Int64, tiles.SLOTS]
            tile_empty: cute.struct.MemRange[Int64, tiles.SLOTS]
            tile_slots: cute.struct.MemRange[Int32, 3 * tiles.SLOTS]
            q: cute.struct.Align[cute.struct.MemRange[self.qk_dtype, q_elements], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.qk_dtype, cute.cosize(layouts.k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layouts.v)], 1024]
            ones: cute.struct.Align[cute.struct.MemRange[self.dtype, ones_elements], 1024]
            v_rows: cute.struct.Align[cute.struct.MemRange[self.dtype, v_rows_elements], 1024]
            out: cute.struct.Align[cute.struct.MemRange[self.out_dtype, out_elements], 1024]
            qv: cute.struct.Align[cute.struct.MemRange[self.dtype, qv_elements], 1024]

        return cutlass.utils.SmemAllocator().allocate(SharedStorage)

    def shared_tiles(self, storage: Any, layouts: Layouts) -> Shared:
        """The tiles in shared memory."""

        def tensor(place: Any, layout: cute.ComposedLayout | None, dtype: Any = None) -> cute.Tensor | None:
            return None if layout is None else place.get_tensor(layout.outer, swizzle=layout.inner, dtype=dtype)

        out_place = storage.out if self.spec.out_has_own_tile else storage.q
        return Shared(
            tensor(storage.q, layouts.q),
            tensor(storage.k, layouts.k),
            tensor(storage.v, layouts.v),
            tensor(out_place, layouts.out, self.out_dtype),
            tensor(storage.qv, layouts.qv),
            # The same bytes as v: the columns of a key lie along a row of the swizzle in both, so both orders agree.
            tensor(storage.v, layouts.v_keys),
            tensor(storage.v_rows, layouts.v_rows),
            tensor(storage.ones, layouts.ones),
        )

    def rings(self, storage: Any) -> Rings:
        """The barriers of tiles."""
        q = Ring(storage.q_full.data_ptr(), storage.q_empty.data_ptr())
        k = Ring(storage.k_full.data_ptr(), storage.k_empty.data_ptr())
        v_ready = Ring(storage.v_full.data_ptr(), storage.v_empty.data_ptr())
        v = v_ready
        if self.transposes:
            v = Ring(storage.v_rows_full.data_ptr(), storage.v_rows_empty.data_ptr())
        return Rings(q, k, v, v_ready)

    def supply(self, storage: Any, counter: Int64, count: Int32, blocks: Int32) -> tiles.Supply:
        """Where the block's tiles of work come from, of ``count`` in all."""
        return tiles.Supply(
            counter,
            count,
            blocks,
            storage.tile_slots.get_tensor(cute.make_layout((3, tiles.SLOTS))),
            storage.tile_full.data_ptr(),
            storage.tile_empty.data_ptr(),
        )

    @cute.jit
    def init_barriers(self, rings: Rings, supply: tiles.Supply):
        """Say how many arrivals complete each barrier; called by one whole warp."""
        transposers = transpose.WARPS if self.transposes else 0
        with cute.arch.elect_one():
            for g in cutlass.range_constexpr(self.groups):
                cute.arch.mbarrier_init(rings.q.full + g, 2 if self.spec.qv else 1)
                # The four warps that read it release a q tile; but one that out takes the place of is
                # free only when the out tile has left, and the warp that sent that says so.
                cute.arch.mbarrier_init(rings.q.empty + g, 4 if self.spec.out_has_own_tile else 1)
            for s in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(rings.k.full + s, 1)
                cute.arch.mbarrier_init(rings.v_ready.full + s, transposers or 1)
                # Every consumer warp releases a stage for itself.
                cute.arch.mbarrier_init(rings.k.empty + s, 4 * self.groups)
                cute.arch.mbarrier_init(rings.v_ready.empty + s, 4 * self.groups)
            for s in cutlass.range_constexpr(self.spec.transpose_stages):
                cute.arch.mbarrier_init(rings.v.full + s, 1)
                cute.arch.mbarrier_init(rings.v.empty + s, transposers)
            for s in cutlass.range_constexpr(tiles.SLOTS):
                cute.arch.mbarrier_init(supply.full + s, 1)
                cute.arch.mbarrier_init(supply.empty + s, 4 * self.groups + transposers)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def write_ones(self, thread: Int32, ones: cute.Pointer, count: cutlass.Constexpr):
        """Fill the tile of e4m3 ones, ``count`` of them; called by all threads."""
        if thread < count // 4:
            word = cute.make_tensor(cute.recast_ptr(ones, dtype=Int32) + thread, 1)
            word[0] = Int32(0x38383838)  # 1.0 four times
        # Visible to the tensor core.
        cute.arch.fence_proxy("async.shared", space="cta")

    def loads(
        self, descriptors: Descriptors, layouts: Layouts, shared: Shared, rings: Rings, packed_q: GlobalRows
    ) -> Loads:
        """The loads of a block."""
        # Tiles of the global tensors: (rows, columns, tile, head, batch).
        by_rows, by_columns = (None, 0, None, None), (0, None, None, None)
        q_tile, k_tile = (WGMMA_ROWS, self.head_dim), (self.tile_n, self.head_dim)
        if self.transposes:
            v_tile, v_order, v_place, v_layout = (self.tile_n, self.head_dim_v), by_rows, shared.v_rows, layouts.v_rows
        else:
            v_tile, v_order, v_place, v_layout = (self.head_dim_v, self.tile_n), by_columns, shared.v, layouts.v
        qv = None
        if self.spec.qv:
            # Arrives at the barrier of q.
            qv_tile = (WGMMA_ROWS, self.head_dim_v)
            qv = self.load_of(descriptors.qv, qv_tile, by_rows, shared.qv, layouts.qv, rings.q)
        return Loads(
            self.load_of(descriptors.q, q_tile, by_rows, shared.q, layouts.q, rings.q),
            self.load_of(descriptors.k, k_tile, by_rows, shared.k, layouts.k, rings.k),
            self.load_of(descriptors.v, v_tile, v_order, v_place, v_layout, rings.v),
            qv,
            packed_q,
            rings.v_ready,
        )

    def load_of(
        self,
        descriptor: Descriptor,
        tile: tuple[int, int],
        order: tuple,
        place: cute.Tensor,
        layout: cute.ComposedLayout,
        ring: Ring,
    ) -> Load:
        """Loads of a tensor's tiles into ``place``; ``order`` has ``None`` where tiles follow each other."""
        in_global = cute.local_tile(descriptor.tensor, tile, order)
        parts = copies.partition(descriptor.tma, place, in_global)
        return Load(descriptor.tma, *parts, ring.full, ring.empty, self.tile_bytes(layout))

    def store_of(self, out: Descriptor, shared: Shared, packed: GlobalRows, lse: Int64) -> Store:
        """The stores of a block."""
        out_tiles = cute.local_tile(out.tensor, (WGMMA_ROWS, self.spec.out_columns), (None, None, None, None))
        return Store(out.tma, *copies.partition(out.tma, shared.out, out_tiles), packed, lse)
