"""Barriers of a block: memory barriers of the tile pipeline, and the named barriers, numbered in one place."""

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from fa3.spec import WARPGROUP_THREADS

from . import ptx


class NamedBarrier(IntEnum):
    """Hardware barriers 1 to 15; barrier 0 is the block's own."""

    #: One for each consumer warpgroup (at most four): its turn to issue products.
    TURN = 1
    #: One for each consumer warpgroup: all of its threads have come this far.
    STORE = 5
    #: All consumer warpgroups of the backward.
    CONSUMERS = 9


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
def has_arrived(barrier: cute.Pointer, position: Int32, stages: cutlass.Constexpr) -> Int32:
    """1 if the tile at ``position`` has arrived in its stage, else 0: a look that does not wait."""
    return ptx.has_completed(barrier + stage_of(position, stages), phase_of(position, stages))


@cute.jit
def wait_empty(barrier: cute.Pointer, position: Int32, stages: cutlass.Constexpr):
    """Wait until every consumer has released the stage that the tile at ``position`` is about to fill.

    The first round finds the barriers fresh; waiting for the opposite parity passes at once.
    """
    cute.arch.mbarrier_wait(barrier + stage_of(position, stages), 1 - phase_of(position, stages))


@cute.jit
def release(barrier: cute.Pointer, position: Int32, stages: cutlass.Constexpr):
    """Tell whoever waits at the barrier that this warp is done with the tile at ``position``, as the loader does."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier + stage_of(position, stages))


@cute.jit
def take_turn(group: Int32):
    """Wait until it is this warpgroup's turn to issue its products."""
    cute.arch.barrier(barrier_id=NamedBarrier.TURN + group, number_of_threads=2 * WARPGROUP_THREADS)


@cute.jit
def give_turn(group: Int32, groups: cutlass.Constexpr):
    """Let the next warpgroup issue its products."""
    next_group = group + 1
    if next_group == groups:
        next_group = Int32(0)
    cute.arch.barrier_arrive(barrier_id=NamedBarrier.TURN + next_group, number_of_threads=2 * WARPGROUP_THREADS)


@cute.jit
def sync_group(group: Int32):
    """Wait for all threads of this warpgroup."""
    cute.arch.barrier(barrier_id=NamedBarrier.STORE + group, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def sync_groups(groups: cutlass.Constexpr):
    """Wait for all consumer warpgroups."""
    cute.arch.barrier(barrier_id=NamedBarrier.CONSUMERS, number_of_threads=groups * WARPGROUP_THREADS)
