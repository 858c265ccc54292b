"""What the kernels hand from one function to the next."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from .mask import Mask


class Sizes(NamedTuple):
    """Sizes of the launch, the same for every block.

    Tiles of the output are made of rows. A row is a query of one head, or, when query heads are packed, a query of
    one of the ``group`` heads that share a K/V head: the heads of a query are consecutive rows.
    """

    batch: Int32
    #: Rows of one head of tiles, the row at which its first tile begins (0, or before it by a multiple of a
    #: warpgroup's rows), and heads of tiles.
    rows: Int32
    first_row: Int32
    heads: Int32
    #: Heads of tiles that read the same K and V.
    heads_per_kv: Int32
    #: Query heads in one head of tiles.
    group: Int32
    m_blocks: Int32
    section: Int32
    levels: Int32
    tiles: Int32
    mask: Mask


class Extras(NamedTuple):
    """What only some calls ask for; numbers and tensors that a spec does not use are 0 and empty."""

    #: Address of the sinks (0: none), and bytes of one: 2 is bf16, 4 float32.
    sink: Int64
    sink_bytes: Int32
    #: Factor of scores before the hyperbolic tangent, and before ``score_mod``.
    tanh_factor: Float32
    mod_factor: Float32
    score_aux: tuple
    mask_aux: tuple
    #: (address of counts, address of indices, batch stride, head stride, key blocks) of a block mask; strides in
    #: blocks of queries.
    blocks: tuple
    #: Of FP8, as `fa3.kernels.parts.scales.Scales.of_numbers` takes them.
    scales: tuple = ()


class Work(NamedTuple):
    """One tile of the output: where it is, and how far the rings of stages had come when it began."""

    sizes: Sizes
    extras: Extras
    first_row: Int32
    head: Int32
    batch_index: Int32
    key_tiles: Int32
    #: The key tile of step 0; those of the steps after it run downward.
    last_tile: Int32
    #: With a block mask: address of the row of its lists, and how many steps the mask cuts.
    block_list: Int64
    cut_steps: Int32
    #: Tiles that this block has done before, and the key tiles that went through the stages for them.
    done: Int32
    position: Int32


class Load(NamedTuple):
    """TMA copies of tiles into stages: (bytes, stage) and (bytes, tile, head, batch), and the stages' barriers."""

    tma: cute.CopyAtom
    target: cute.Tensor
    source: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    bytes: int


class Ring(NamedTuple):
    """Barriers of the stages of a tile that consumers read."""

    full: cute.Pointer
    empty: cute.Pointer


class GlobalRows(NamedTuple):
    """A (batch, seqlen, heads, columns) tensor in global memory: its address, and strides in elements."""

    address: Int64
    batch_stride: Int64
    row_stride: Int64
    head_stride: Int64
    columns: Int32


class Loads(NamedTuple):
    """The loads of a forward kernel."""

    q: Load
    k: Load
    v: Load
    qv: Load | None
    packed_q: GlobalRows
    #: Stages of v as the products read it: those of ``v``, or of its transposed tiles.
    v_ready: Ring


class Store(NamedTuple):
    """TMA copies of out tiles to global memory, their rows if packed, and the address of LSE (0: not wanted)."""

    tma: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor
    packed: GlobalRows
    lse: Int64


class Shared(NamedTuple):
    """Tiles in shared memory, (rows, columns, warpgroup or stage)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    #: Tiles of qv, and v seen as (keys, columns); only with qv.
    qv: cute.Tensor | None
    v_keys: cute.Tensor | None
    #: Tiles of v before they are transposed; only where they are.
    v_rows: cute.Tensor | None = None
    #: Ones, (8, 32): of FP8.
    ones: cute.Tensor | None = None


class Operands(NamedTuple):
    """What a consumer warpgroup multiplies: descriptors of tiles in shared memory, and registers."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    #: With qv: its tile, and v as the second operand of its product.
    qv: cute.Tensor | None
    v_keys: cute.Tensor | None
    p: cute.Tensor
    scores: cute.Tensor
    output: cute.Tensor
    # Of FP8:
    #: The products of q and k in int8, which become the scores.
    int_scores: cute.Tensor | None = None
    #: In parts: K in pieces, and the accumulators of their scores.
    k_pieces: tuple = ()
    score_pieces: tuple = ()
    #: What the PV products add up to: the output, or a part of it that is added to it in float32 now and then.
    partial: cute.Tensor | tuple | None = None
    #: V in parts of its columns, if the products take it so; there is a partial output then for each in flight.
    v_parts: tuple = ()
    #: The probabilities of this step before they take the place of ``p``.
    next_p: cute.Tensor | None = None
    #: The ones by whose product with ``p`` the tensor core makes row sums, the sums, and what they are multiplied by.
    ones: cute.Tensor | None = None
    sums: cute.Tensor | None = None
    share_inverse: cute.Tensor | None = None
    #: With blocks: the scales of k and v of the next step, read early.
    next_scales: cute.Tensor | None = None
    #: Whether K of the next step, and V of this one, have been seen to be there.
    arrived: cute.Tensor | None = None


class RowScales(NamedTuple):
    """The scales that a warpgroup's rows of one tile of work have to do with."""

    #: That of q, and of k where that has one a head.
    queries: Float32
    keys: Float32
    #: Factor of the output: the scale of v, or with blocks of v the largest of the head.
    output: Float32
    #: With blocks: where the head's scales of k and of v begin.
    k_address: Int64
    v_address: Int64


class Consumer(NamedTuple):
    """A thread of a consumer warpgroup: which group, which of its four warps, which lane."""

    group: Int32
    warp: Int32
    lane: Int32
    #: Whether this warp loads as well; False where a producer warp does.
    loads: Boolean | bool
    #: Of FP8: what scales its rows, and the output; set for each tile of work.
    scales: RowScales | None = None
