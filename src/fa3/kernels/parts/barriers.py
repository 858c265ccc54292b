"""Barriers of a block: memory barriers of the tile pipeline, and the named barriers, numbered in one place."""

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class NamedBarrier(IntEnum):
    """Hardware barriers 1 to 15; barrier 0 is the block's own."""

    #: One for each consumer warpgroup (at most four): its turn to issue products.
    TURN = 1
    #: One for each consumer warpgroup: its output rows are all in shared memory.
    STORE = 5


def stage_and_phase(step: Int32, stages: int) -> tuple[Int32, Int32]:
    """Stage that step ``step`` of a pipeline uses, and the parity of that stage's round."""
    return step % stages, (step // stages) % 2


@cute.jit
def wait_full(barrier: cute.Pointer, step: Int32, stages: cutlass.Constexpr):
    """Wait until the tile of ``step`` has arrived in its stage."""
    stage, phase = stage_and_phase(step, stages)
    cute.arch.mbarrier_wait(barrier + stage, phase)


@cute.jit
def wait_empty(barrier: cute.Pointer, step: Int32, stages: cutlass.Constexpr):
    """Wait until every consumer has released the stage that ``step`` is about to fill.

    The first round finds the barriers fresh; waiting for the opposite parity passes at once.
    """
    stage, phase = stage_and_phase(step, stages)
    cute.arch.mbarrier_wait(barrier + stage, 1 - phase)


@cute.jit
def release(barrier: cute.Pointer, step: Int32, stages: cutlass.Constexpr):
    """Tell the loader that this warp has read the tile of ``step``."""
    stage, _ = stage_and_phase(step, stages)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier + stage)
