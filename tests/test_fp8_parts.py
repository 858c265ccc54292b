"""PV in parts: which registers hold what, and which products are done, at every step of the way, in plain Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fa3.fp8_tiles import FP8_TILES
from fa3.kernels.parts import fp8_parts
from fa3.kernels.parts.fp8_parts import IN_FLIGHT, Fp8Parts
from fa3.plan import make_spec
from fa3.spec import ForwardSpec

POSITION = 7


def specs_in_parts() -> list[ForwardSpec]:
    """One spec for each way that the tables have of cutting output and key tile."""
    found = {}
    for kind, uses in FP8_TILES.items():
        for rows in (row for pair in uses.values() for row in pair):
            for _, choice in rows:
                spec = make_spec("e4m3", kind, "full", choice)
                if spec.parts > 1:
                    found[spec.parts, spec.part_columns, spec.score_pieces] = spec
    return list(found.values())


class Warpgroup:
    """Groups of products in flight, and what registers hold: a part, or a piece of scores, that is still wanted.

    Registers are numbers: parts in flight have 0 and 1, and pieces of scores have the same, or others of their own.
    """

    def __init__(self, spec: ForwardSpec) -> None:
        self.spec = spec
        self.stages = spec.stages
        self.flying: list[int] = []
        self.held: dict[int, tuple[str, int]] = {}
        self.added: list[int] = []
        self.released: list[int] = []
        self.sums_ready = False
        pieces = range(spec.score_pieces or 1)
        self.operands = SimpleNamespace(
            partial=list(range(IN_FLIGHT)),
            output=SimpleNamespace(iterator=0),
            score_pieces=[i if spec.score_pieces else IN_FLIGHT + i for i in pieces],
            v_parts=[("part", i) for i in range(spec.parts)],
            k_pieces=[("piece", i) for i in pieces],
            **dict.fromkeys(("p", "q", "sums", "ones")),
        )

    def issue(self, _mma: Any, registers: int, _a: Any, b: tuple[tuple[str, int], int], *_: Any, **__: Any) -> None:
        (kind, number), position = b
        assert position == POSITION + (kind == "piece")
        assert registers not in self.held, f"{kind} {number} overwrites {self.held.get(registers)}"
        self.held[registers] = kind, number
        self.flying.append(registers)

    def wait_group(self, behind: int) -> None:
        self.flying = self.flying[max(len(self.flying) - behind, 0) :]

    def add_up(self, column: int, registers: int) -> None:
        assert registers not in self.flying, f"{self.held[registers]} is added before it is done"
        kind, part = self.held.pop(registers)
        assert (kind, column) == ("part", part * self.spec.part_columns)
        self.added.append(part)

    def release(self, _barrier: Any, position: int, _stages: int) -> None:
        assert not any(self.held[registers][0] == "part" for registers in self.flying), "v is released while it is read"
        assert len(self.added) + sum(kind == "part" for kind, _ in self.held.values()) == self.spec.parts
        self.released.append(position)

    # What the methods under test call by self.

    def tile_at(self, operand: tuple[str, int], position: int) -> tuple[tuple[str, int], int]:
        return operand, position

    def issue_part(self, *arguments: Any) -> None:
        Fp8Parts.issue_part.__wrapped__(self, *arguments)

    def issue_scores(self, *arguments: Any) -> None:
        Fp8Parts.issue_scores.__wrapped__(self, *arguments)

    def part_mma(self) -> None: ...

    def piece_mma(self) -> None: ...

    def sums_mma(self) -> None: ...

    def add_row_sums(self, *_: Any) -> None:
        assert 0 in self.added, "row sums come with the first part"
        self.sums_ready = True


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("spec", specs_in_parts(), ids=lambda s: f"{s.parts}x{s.part_columns}-{s.score_pieces}")
def test_every_part_is_added_once_when_it_is_done_and_v_is_released_after_the_last(spec, scores, monkeypatch):
    warpgroup = Warpgroup(spec)
    for name, stand_in in {
        "cutlass": SimpleNamespace(range_constexpr=range),
        "cute": SimpleNamespace(
            size=lambda registers: spec.part_columns,
            make_layout=lambda size: size,
            make_tensor=lambda first, size: first,
        ),
        "const_expr": lambda value: value,
        "warpgroup": warpgroup,
        "barriers": warpgroup,
        "products": SimpleNamespace(
            issue=warpgroup.issue, issue_with_row_sums=warpgroup.issue, add_up=warpgroup.add_up
        ),
    }.items():
        monkeypatch.setattr(fp8_parts, name, stand_in)
    loads = SimpleNamespace(v_ready=SimpleNamespace(empty=None))
    Fp8Parts.multiply_in_parts.__wrapped__(warpgroup, warpgroup.operands, None, loads, POSITION, scores)
    assert warpgroup.added == list(range(spec.parts))
    assert warpgroup.released == [POSITION]
    assert warpgroup.sums_ready
    # What is left in registers, or on its way there, are the scores, where the softmax looks for them.
    of_scores = {registers: ("piece", i) for i, registers in enumerate(warpgroup.operands.score_pieces)}
    assert warpgroup.held == (of_scores if scores else {})


def test_the_tables_cut_no_key_tile_in_more_pieces_than_parts_are_in_flight():
    specs = specs_in_parts()
    assert {spec.parts for spec in specs} == {2, 3, 4}
    assert max(spec.score_pieces for spec in specs) == IN_FLIGHT
