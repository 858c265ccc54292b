"""Barriers of a block: memory barriers of the tile pipeline, and the named barriers, numbered in one place."""

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32


class NamedBarrier(IntEnum):
    """Hardware barriers 1 to 15; barrier 0 is the block's own."""

    #: One for each consumer warpgroup (at most four): its turn to issue products.
    TURN = 1
    #: One for each consumer warpgroup: its output rows are all in shared memory.
    STORE = 5


def stage_of(position: Int32, stages: int) -> Int32:
    """Stage that the tile at ``position`` of the stream of tiles uses. Unsigned: a signed remainder costs more."""
    return Int32(Uint32(position) % Uint32(stages))


def phase_of(position: Int32, stages: int) -> Int32:
    """Parity of the round in which that stage is used."""
    return Int32((Uint32(position) // Uint32(stages)) % Uint32(2))


@cute.jit
def wait_full(barrier: cute.Pointer, position: Int32, stages: cutlass.Constexpr):
    """Wait until the tile at ``position`` has arrived in its stage."""
    cute.arch.mbarrier_wait(barrier + stage_of(position, stages), phase_of(position, stages))


@cute.jit
def wait_empty(barrier: cute.Pointer, position: Int32, stages: cutlass.Constexpr):
    """Wait until every consumer has released the stage that the tile at ``position`` is about to fill.

    The first round finds the barriers fresh; waiting for the opposite parity passes at once.
    """
    cute.arch.mbarrier_wait(barrier + stage_of(position, stages), 1 - phase_of(position, stages))


@cute.jit
def release(barrier: cute.Pointer, position: Int32, stages: cutlass.Constexpr):
    """Tell the loader that this warp has read the tile at ``position``."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier + stage_of(position, stages))
