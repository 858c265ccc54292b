"""The tile tables: which tiles a problem gets, each row with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TileChoice:
    """One row of a table.

    Attributes:
        tile_m: query rows of a block.
        tile_n: keys of one step.
        stages: key tiles in shared memory at once.
        reason: why.
        cost: time of one tile over the same keys, relative to the usual tile of its class.
    """

    tile_m: int
    tile_n: int
    stages: int
    reason: str = ""
    cost: float = 1.0


#: Rows of tiles for keys up to a length, in order; the last takes the rest.
Rows = tuple[tuple[float, TileChoice], ...]

_REST = math.inf

#: (head_dim, head_dim_v) of the tile class -> mask -> rows. A window has those of the causal mask.
TILES: dict[tuple[int, int], dict[str, Rows]] = {
    (64, 64): {
        "full": (
            (1024, TileChoice(256, 64, 4, "four warpgroups: the fewest cycles on short rows")),
            (_REST, TileChoice(192, 128, 3, "three warpgroups: the fewest cycles on long rows; wider tiles spill")),
        ),
        "causal": (
            (2048, TileChoice(256, 64, 4, "as without a mask")),
            (_REST, TileChoice(192, 128, 3, "as without a mask")),
        ),
    },
    (96, 96): {
        "full": ((_REST, TileChoice(192, 112, 3, "three warpgroups")),),
        "causal": ((_REST, TileChoice(192, 96, 3, "as without a mask")),),
    },
    (128, 128): {
        "full": (
            (
                _REST,
                TileChoice(192, 80, 3, "three warpgroups: fewer cycles than two of 128 or 176 keys; wider tiles spill"),
            ),
        ),
        "causal": (
            (1024, TileChoice(192, 64, 3, "narrow key tiles waste less on the diagonal of short rows")),
            (_REST, TileChoice(192, 80, 3, "as without a mask")),
        ),
    },
    (64, 256): {
        "full": ((_REST, TileChoice(128, 96, 2, "two warpgroups")),),
        "causal": ((_REST, TileChoice(128, 96, 2, "as without a mask")),),
    },
    (192, 128): {
        "full": ((_REST, TileChoice(192, 80, 3, "three warpgroups")),),
        "causal": ((_REST, TileChoice(192, 80, 3, "as without a mask")),),
    },
    (192, 192): {
        "full": ((_REST, TileChoice(128, 112, 2, "two warpgroups")),),
        "causal": ((_REST, TileChoice(128, 96, 2, "as without a mask")),),
    },
    (256, 256): {
        "full": ((_REST, TileChoice(128, 64, 2, "two stages fit; 80 keys, the most that fit, gain nothing")),),
        "causal": ((_REST, TileChoice(128, 64, 2, "as without a mask")),),
    },
}

#: Tile class -> smaller tiles, tried where the usual ones make few rounds.
SMALL: dict[tuple[int, int], tuple[TileChoice, ...]] = {
    (64, 64): (
        TileChoice(128, 128, 3, "few tiles: smaller ones fill the card", 0.61),
        TileChoice(64, 128, 4, "few tiles: the smallest fill the card", 0.41),
    ),
    (96, 96): (TileChoice(64, 128, 3, "few tiles: the smallest fill the card", 0.45),),
    (128, 128): (
        TileChoice(128, 128, 2, "few tiles: smaller ones fill the card", 0.75),
        TileChoice(64, 128, 3, "few tiles: the smallest fill the card", 0.52),
    ),
    (64, 256): (TileChoice(64, 96, 2, "few tiles: the smallest fill the card", 0.6),),
    (192, 128): (TileChoice(64, 128, 2, "few tiles: the smallest fill the card", 0.5),),
    (192, 192): (TileChoice(64, 96, 2, "few tiles: the smallest fill the card", 0.6),),
    (256, 256): (TileChoice(64, 64, 2, "few tiles: the smallest fill the card", 0.64),),
}

#: Tile class -> tiles in which the query heads of a group are packed.
PACKED: dict[tuple[int, int], tuple[TileChoice, ...]] = {
    kind: tuple(choice for choice in choices if choice.tile_m == 64) for kind, choices in SMALL.items()
}

#: Tile class -> tiles for caps, modifications and block masks: two warpgroups, which have registers to spare.
MODIFIED: dict[tuple[int, int], TileChoice] = {
    (64, 64): TileChoice(128, 128, 3, "two warpgroups, with registers for more work on the scores"),
    (96, 96): TileChoice(128, 128, 3, "two warpgroups, with registers for more work on the scores"),
    (128, 128): TileChoice(128, 128, 2, "two warpgroups, with registers for more work on the scores"),
    (64, 256): TileChoice(128, 64, 2, "two warpgroups, with registers for more work on the scores"),
    (192, 128): TileChoice(128, 128, 2, "two warpgroups, with registers for more work on the scores"),
    (192, 192): TileChoice(128, 64, 2, "two warpgroups, with registers for more work on the scores"),
    (256, 256): TileChoice(128, 64, 2, "two warpgroups, with registers for more work on the scores"),
}

#: Tile class -> tiles that leave shared memory for qv.
QV: dict[tuple[int, int], TileChoice] = {
    (64, 64): TileChoice(128, 128, 2, "qv takes a tile of its own"),
    (96, 96): TileChoice(128, 64, 2, "qv takes a tile of its own"),
    (128, 128): TileChoice(128, 64, 2, "qv takes a tile of its own"),
    (64, 256): TileChoice(128, 64, 2, "qv takes a tile of its own"),
    (192, 128): TileChoice(128, 64, 2, "qv takes a tile of its own"),
    (192, 192): TileChoice(128, 48, 2, "qv takes a tile of its own"),
    (256, 256): TileChoice(64, 48, 2, "qv takes a tile of its own"),
}

#: Tile class -> tiles that the sweep tries; none of them spills.
CANDIDATES: dict[tuple[int, int], tuple[TileChoice, ...]] = {
    kind: tuple(TileChoice(*map(int, tile.split("x"))) for tile in tiles.split())
    for kind, tiles in {
        (64, 64): "256x64x4 192x128x3 192x96x4 128x128x3 64x128x4",
        (96, 96): "192x112x3 192x96x3 192x80x4 256x48x4 128x176x2 128x144x3 128x128x3 64x128x3",
        (128, 128): "192x80x3 192x64x3 128x128x2 128x176x2 128x112x3 64x128x3",
        (64, 256): "128x96x2 128x64x2 128x80x2 64x96x2",
        (192, 128): "192x80x3 192x80x2 192x64x3 128x128x2 128x112x2 128x96x2 128x80x3 64x128x2",
        (192, 192): "128x112x2 128x96x2 128x80x2 128x64x3 192x48x2 64x96x2",
        (256, 256): "128x64x2 128x80x2 64x64x2",
    }.items()
}
