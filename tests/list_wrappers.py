"""The walk over the query tiles that a block mask lists for a tile of keys, as a function of the host.

Every pointer is the address of a contiguous CPU tensor. Functions of the DSL must stand in a real file.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from brick_wrappers import table
from fa3.backward_spec import BackwardSpec
from fa3.kernels.parts.backward_producer import KeyProducer
from fa3.kernels.parts.backward_sums import KeySums
from fa3.kernels.parts.backward_work import KeyExtras, KeySizes
from fa3.kernels.parts.mask import Mask


class Walker(KeyProducer, KeySums):
    """What of a backward kernel decides which steps there are."""

    def __init__(self, spec: BackwardSpec):
        self.spec, self.tile_m, self.tile_n = spec, spec.tile_m, spec.tile_n

    @cute.jit
    def walk(self, sizes: KeySizes, extras: KeyExtras, steps: cute.Tensor, places: cute.Tensor):
        """As the function below."""
        none = Int32(0)
        for b in cutlass.range(sizes.batch, unroll=1):
            for h in cutlass.range(sizes.heads, unroll=1):
                for n in cutlass.range(sizes.n_blocks, unroll=1):
                    work = self.work_of(sizes, extras, n, h, b, none, none)
                    steps[b, h, n] = work.steps
                    m_block, head, rank = self.first_rows(work)
                    for step in cutlass.range(work.steps, unroll=1):
                        _, cut, _ = self.list_of(work, head)
                        places[b, h, n, step, 0] = m_block
                        places[b, h, n, step, 1] = head
                        places[b, h, n, step, 2] = Int32(1) if rank < cut else Int32(0)
                        places[b, h, n, step, 3] = self.turn_of(work, m_block, head, rank)
                        m_block, head, rank = self.next_rows(work, m_block, head, rank)


@cute.jit
def walk(
    counts_address: Int64,
    indices_address: Int64,
    turns_address: Int64,
    steps_address: Int64,
    places_address: Int64,
    batch: Int32,
    heads: Int32,
    group: Int32,
    seqlen_q: Int32,
    seqlen_k: Int32,
    batch_stride: Int32,
    head_stride: Int32,
    spec: cutlass.Constexpr,
):
    """steps (batch, head of tiles, key tile) and places (..., step, 4: query tile, query head, cut, turn).

    There is room for as many steps as there are query tiles of the ``group`` query heads of a head of tiles; what is no
    step stays as it is.
    """
    m_blocks = (seqlen_q + spec.tile_m - 1) // spec.tile_m
    n_blocks = (seqlen_k + spec.tile_n - 1) // spec.tile_n
    steps = table(steps_address, Int32, (batch, heads, n_blocks))
    places = table(places_address, Int32, (batch, heads, n_blocks, m_blocks * group, 4))
    one, none = Int32(1), Int32(0)
    sizes = KeySizes(
        batch, heads * group, heads, one, group, m_blocks, n_blocks, m_blocks * group, one, one,
        n_blocks * heads * batch, Mask(seqlen_q, seqlen_k, none, none, none),
    )  # fmt: skip
    blocks = counts_address, indices_address, batch_stride, head_stride, m_blocks
    extras = KeyExtras(Float32(0.0), Float32(0.0), (), (), blocks, (turns_address,))
    Walker(spec).walk(sizes, extras, steps, places)
