"""The kernels' building bricks, compiled for the host and run on the CPU: layouts, the order of tiles, barriers."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

cutlass = pytest.importorskip("cutlass")

import brick_wrappers as wrappers  # noqa: E402
from bricks_on_host import call, ints  # noqa: E402
from fa3.kernels.parts import layout  # noqa: E402
from fa3.kernels.parts.barriers import NamedBarrier  # noqa: E402
from fa3.presets import shipped_specs  # noqa: E402

# layout -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile_n", [8, 64, 80, 128, 176, 256])
def test_the_threads_of_a_warpgroup_cover_their_tile_exactly_once(tile_n):
    seen = [
        (
            layout.first_row(thread // 32, thread % 32) + 8 * r,
            layout.first_column(thread % 32) + layout.column_in_tile(c),
        )
        for thread in range(128)
        for r in range(layout.ROWS_PER_THREAD)
        for c in range(tile_n // 4)
    ]
    assert sorted(seen) == list(itertools.product(range(64), range(tile_n)))


def test_a_row_belongs_to_four_neighbouring_lanes():
    for thread in range(128):
        row = layout.first_row(thread // 32, thread % 32)
        assert row == layout.first_row(thread // 32, thread % 32 // 4 * 4)
        for offset in (1, 2):
            assert row == layout.first_row(thread // 32, (thread % 32) ^ offset)


@functools.cache
def accumulator_layout() -> tuple[Tensor, Tensor, Tensor]:
    results = ints(128, wrappers.COLUMNS // 2), ints(128, wrappers.COLUMNS // 2), ints(128, 8)
    call(wrappers.accumulator_layout, *results)
    return results


def test_rows_and_columns_lie_where_the_instruction_puts_them():
    ours, chip, _ = accumulator_layout()
    assert torch.equal(ours, chip)


def test_score_registers_are_the_operand_of_the_next_product_without_a_shuffle():
    ours, _, operand = accumulator_layout()
    for step in range(wrappers.COLUMNS // 16):
        assert torch.equal(ours[:, 8 * step : 8 * step + 8] - 64 * 16 * step, operand)


@pytest.mark.parametrize("columns", sorted({spec.head_dim_v for spec in shipped_specs("features") if spec.qv}))
def test_a_stage_of_v_is_both_operands_of_the_products_that_qv_needs(columns):
    keys, stages = 48, 2
    places = ints(keys, columns, stages, 2)
    call(wrappers.orders_of_v, places, constants=(keys, columns, stages))
    by_column, by_key = places.unbind(3)
    assert torch.equal(by_column, by_key)
    assert sorted(by_key.flatten().tolist()) == list(range(keys * columns * stages))


@pytest.mark.parametrize(("columns", "widest"), [(64, 256), (96, 96), (128, 192), (128, 128), (192, 192), (32, 64)])
def test_tiles_that_share_places_of_the_widest_are_that_far_apart_and_each_as_it_would_be_alone(columns, widest):
    rows, tiles = 64, 3
    pitch = rows * widest
    apart, together, alone = ints(tiles, rows, columns), ints(tiles, rows, columns), ints(1, rows, columns)
    call(wrappers.places_in_tiles, apart, constants=(rows, columns, tiles, pitch))
    call(wrappers.places_in_tiles, together, constants=(rows, columns, tiles, None))
    call(wrappers.places_in_tiles, alone, constants=(rows, columns, 1, None))
    assert sorted(alone.flatten().tolist()) == list(range(rows * columns))
    number = torch.arange(tiles)[:, None, None]
    assert torch.equal(apart, alone + pitch * number)
    assert torch.equal(together, alone + rows * columns * number)


# tiles --------------------------------------------------------------------------------------------


@functools.cache
def schedules() -> list[tuple[tuple[int, int, int, int, int], bool, list[tuple[int, int, int]]]]:
    """((m_blocks, heads, batch, section, levels), longest first, [(m_block, head, batch index) of each tile])."""
    sizes = [
        (m_blocks, heads, batch, section, levels)
        for m_blocks in (1, 2, 5)
        for heads in (1, 2, 6, 8)
        for batch in (1, 3)
        for section in range(1, heads * batch + 3)
        for levels in range(1, m_blocks + 1)
    ]
    sizes += [(33, 24, 2, 7, 33), (33, 24, 2, 7, 4), (17, 32, 4, 24, 5), (1, 128, 9, 100, 1)]
    counts = [m_blocks * heads * batch for m_blocks, heads, batch, _, _ in sizes]
    starts = [0, *itertools.accumulate(counts)]
    cases = [(*size, start) for size, start in zip(sizes, starts, strict=False)]
    results = ints(starts[-1], 2, 3)
    call(wrappers.places_of_tiles, torch.tensor(cases, dtype=torch.int32), results, len(cases))
    return [
        (size, bool(order), [tuple(tile) for tile in results[start : start + count, order].tolist()])
        for size, start, count in zip(sizes, starts, counts, strict=False)
        for order in (0, 1)
    ]


def phase_of_tile(m_block: int, m_blocks: int, levels: int, longest_first: bool) -> int:
    return (m_blocks - 1 - m_block if longest_first else m_block) // levels


def test_tiles_are_numbered_one_to_one():
    for (m_blocks, heads, batch, section, levels), _, work in schedules():
        every = itertools.product(range(m_blocks), range(heads), range(batch))
        assert sorted(work) == sorted(every), (m_blocks, heads, batch, section, levels)


def test_phases_come_one_after_the_other_and_in_each_the_sections_of_heads():
    for (m_blocks, heads, _, section, levels), longest_first, work in schedules():
        places = [
            (phase_of_tile(m_block, m_blocks, levels, longest_first), (batch_index * heads + head) // section)
            for m_block, head, batch_index in work
        ]
        assert places == sorted(places)


def test_longest_tiles_of_a_section_start_first_under_a_causal_mask():
    for (m_blocks, heads, _, section, levels), longest_first, work in schedules():
        by_section: dict[tuple[int, int], list[int]] = {}
        for m_block, head, batch_index in work:
            phase = phase_of_tile(m_block, m_blocks, levels, longest_first)
            by_section.setdefault((phase, (batch_index * heads + head) // section), []).append(m_block)
        for (phase, _), order in by_section.items():
            assert order == sorted(order, reverse=longest_first)
            assert order[0] == (m_blocks - 1 - phase * levels if longest_first else phase * levels)


@pytest.mark.parametrize("group", [2, 3, 8])
def test_heads_that_share_keys_and_values_run_side_by_side(group):
    tried = 0
    for (m_blocks, heads, batch, section, _), _, work in schedules():
        if heads % group or section % group:
            continue
        tried += 1
        shared = [(m_block, batch_index, head // group) for m_block, head, batch_index in work]
        runs = [(key, len(list(same))) for key, same in itertools.groupby(shared)]
        assert len(runs) == m_blocks * batch * heads // group
        assert all(length == group for _, length in runs)
    assert tried >= 10


# lists of blocks ----------------------------------------------------------------------------------


def block_mask(batch: int, heads: int, query_blocks: int, key_blocks: int) -> tuple[Tensor, Tensor]:
    """Counts and indices as `fa3.mods.BlockMask` has them, of blocks that are cut, whole or empty by chance."""
    counts = torch.zeros(batch, heads, query_blocks, 2, dtype=torch.int32)
    # What follows the visited blocks is not read.
    indices = torch.full((batch, heads, query_blocks, key_blocks), 10**8, dtype=torch.int32)
    for place in itertools.product(range(batch), range(heads), range(query_blocks)):
        kinds = torch.randint(0, 3, (key_blocks,))
        cut, whole = (torch.nonzero(kinds == kind).flatten().flip(0) for kind in (1, 2))
        counts[place] = torch.tensor([len(cut), len(whole)])
        indices[place][: len(cut) + len(whole)] = torch.cat([cut, whole])
    return counts, indices


@pytest.mark.parametrize("sizes", [(2, 3), (1, 3), (2, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("tile_n", [16, 64, 128])
def test_steps_go_over_the_tiles_of_listed_blocks_those_cut_first_and_each_block_downward(tile_n, sizes):
    batch, heads, query_blocks, key_blocks = 2, 3, 5, 7
    counts, indices = block_mask(*sizes, query_blocks, key_blocks)
    # A mask that all sequences or heads share is stepped over with a stride of 0.
    strides = (sizes[1] * query_blocks if sizes[0] > 1 else 0, query_blocks if sizes[1] > 1 else 0)
    tiles_of_block = 128 // tile_n
    steps, tiles = ints(batch, heads, query_blocks, 2), ints(batch, heads, query_blocks, key_blocks * tiles_of_block)
    call(
        wrappers.listed_tiles,
        *(counts, indices, steps, tiles, batch, heads, query_blocks, key_blocks, *strides),
        constants=(tile_n,),
    )
    untouched = ints(1).item()
    for b, h, m in itertools.product(range(batch), range(heads), range(query_blocks)):
        place = min(b, sizes[0] - 1), min(h, sizes[1] - 1), m
        cut, whole = counts[place].tolist()
        assert steps[b, h, m].tolist() == [cut * tiles_of_block, (cut + whole) * tiles_of_block]
        visited = indices[place][: cut + whole].tolist()
        expected = [block * tiles_of_block + n for block in visited for n in reversed(range(tiles_of_block))]
        rest = [untouched] * (tiles.shape[3] - len(expected))
        assert tiles[b, h, m].tolist() == expected + rest


# barriers -----------------------------------------------------------------------------------------


def ring(first: int, count: int) -> Tensor:
    results = ints(len(wrappers.STAGES), count, 2)
    call(wrappers.ring, results, first, count)
    return results


def test_a_tile_passes_its_barrier_after_its_own_round_and_not_before():
    for stages, positions in zip(wrappers.STAGES, ring(0, 40).tolist(), strict=True):
        # Completed rounds of each stage's barrier. A wait for a parity passes when the last completed round,
        # counted from 0, has that parity; a fresh barrier passes for as odd a round as the one before 0.
        rounds = [0] * stages
        for position, (stage, phase) in enumerate(positions):
            assert stage == position % stages
            assert (rounds[stage] - 1) % 2 == 1 - phase, "the loader may fill a stage that has been released"
            assert (rounds[stage] - 1) % 2 != phase, "a consumer waits as long as the tile has not arrived"
            rounds[stage] += 1
            assert (rounds[stage] - 1) % 2 == phase, "a consumer goes on when the tile has arrived"


def test_stages_keep_their_order_beyond_the_signed_integers():
    first, count = 2**31 - 20, 40
    for stages, positions in zip(wrappers.STAGES, ring(first, count).tolist(), strict=True):
        assert positions == [[p % stages, p // stages % 2] for p in range(first, first + count)]


def test_named_barriers_of_all_warpgroups_are_distinct_and_exist():
    groups = max(spec.consumer_warpgroups for spec in shipped_specs("forward"))
    numbers = [first + group for first in NamedBarrier for group in range(groups)]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 1
    assert max(numbers) <= 15
