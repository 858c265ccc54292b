"""The tile tables: which tiles a problem gets, each row with its reason; those of e4m3 are in `fa3.fp8_tiles`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TileChoice:
    """One row of a table.

    Attributes:
        tile_m: query rows of a block.
        tile_n: keys of one step.
        stages: key tiles in shared memory at once.
        reason: why.
        cost: time of one tile over the same keys, relative to the usual one of its class for long sequences: from
            the sweep, at 16k tokens.
        transpose_stages, promote: as of `fa3.spec.ForwardSpec`, of e4m3 alone.
    """

    tile_m: int
    tile_n: int
    stages: int
    reason: str = ""
    cost: float = 1.0
    transpose_stages: int = 0
    promote: int = 0


#: Rows of tiles for keys up to a length, in order; the last takes the rest.
Rows = tuple[tuple[float, TileChoice], ...]

_REST = math.inf

_EDGES = "fewer keys waste less at the edges of a window"

_D64_FOUR = TileChoice(256, 64, 4, "four warpgroups: the fewest cycles on short rows", 1.43)
_D64_THREE = TileChoice(192, 128, 3, "three warpgroups: the fewest cycles on long rows; wider tiles spill")
_D96 = TileChoice(192, 112, 3, "three warpgroups; 128 keys spill")
_D128 = TileChoice(192, 80, 3, "three warpgroups: fewer cycles than two of 128 or 176 keys; wider tiles spill")
_D64_V256 = TileChoice(128, 96, 2, "two warpgroups: their output alone takes 128 registers")
_D192_V128 = TileChoice(192, 64, 3, "three warpgroups; 80 keys, and two of 128, are within 3%")
_D192 = TileChoice(128, 96, 2, "two warpgroups; 80 keys are within 2%, 64 and 112 further away")
_D256 = TileChoice(128, 64, 2, "two stages fit; 80 keys, the most that fit, gain nothing")

#: (head_dim, head_dim_v) of the tile class -> mask -> rows.
TILES: dict[tuple[int, int], dict[str, Rows]] = {
    (64, 64): {
        "full": ((1024, _D64_FOUR), (_REST, _D64_THREE)),
        "causal": ((2048, _D64_FOUR), (_REST, _D64_THREE)),
        "window": ((_REST, TileChoice(256, 64, 8, f"{_EDGES}; a deep ring lets the warpgroups drift apart", 1.43)),),
    },
    (96, 96): {
        "full": ((_REST, _D96),),
        "causal": ((_REST, _D96),),
        "window": ((_REST, TileChoice(192, 64, 5, _EDGES)),),
    },
    (128, 128): {
        "full": ((_REST, _D128),),
        "causal": (
            (1024, TileChoice(192, 64, 4, "fewer keys waste less on the diagonal of short rows")),
            (_REST, _D128),
        ),
        "window": ((_REST, TileChoice(192, 64, 4, _EDGES)),),
    },
    (64, 256): {
        "full": ((_REST, _D64_V256),),
        "causal": ((_REST, _D64_V256),),
        "window": ((_REST, TileChoice(128, 64, 2, _EDGES)),),
    },
    (192, 128): {
        "full": ((_REST, _D192_V128),),
        "causal": ((_REST, _D192_V128),),
        "window": ((_REST, _D192_V128),),
    },
    (192, 192): {
        "full": ((_REST, _D192),),
        "causal": ((_REST, _D192),),
        "window": ((_REST, TileChoice(128, 64, 3, _EDGES)),),
    },
    (256, 256): {
        "full": ((_REST, _D256),),
        "causal": ((_REST, _D256),),
        "window": ((_REST, _D256),),
    },
}

_FEW = "few tiles: smaller ones fill the card"

#: Tile class -> tiles of one warpgroup.
_SMALLEST: dict[tuple[int, int], TileChoice] = {
    (64, 64): TileChoice(64, 128, 4, _FEW, 0.59),
    (96, 96): TileChoice(64, 128, 3, _FEW, 0.55),
    (128, 128): TileChoice(64, 128, 3, _FEW, 0.54),
    (64, 256): TileChoice(64, 64, 2, _FEW, 0.64),
    (192, 128): TileChoice(64, 128, 2, _FEW, 0.51),
    (192, 192): TileChoice(64, 64, 2, _FEW, 0.69),
    (256, 256): TileChoice(64, 64, 2, _FEW, 0.7),
}

#: Tile class -> other tiles, tried where the usual ones make few rounds.
SMALL: dict[tuple[int, int], tuple[TileChoice, ...]] = {
    (64, 64): (
        _D64_FOUR,
        _D64_THREE,
        TileChoice(128, 128, 3, _FEW, 0.86),
        _SMALLEST[64, 64],
    ),
    (96, 96): (TileChoice(128, 128, 3, _FEW, 0.74),),
    (128, 128): (TileChoice(128, 128, 2, _FEW, 0.73), _SMALLEST[128, 128]),
    (64, 256): (),
    (192, 128): (TileChoice(128, 128, 2, _FEW, 0.67), _SMALLEST[192, 128]),
    (192, 192): (),
    (256, 256): (_SMALLEST[256, 256],),
}

#: Tile class -> tiles in which the query heads of a group are packed.
PACKED: dict[tuple[int, int], tuple[TileChoice, ...]] = {
    kind: (replace(choice, reason="few rows: one warpgroup has them all"),) for kind, choice in _SMALLEST.items()
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


def _from_text(text: str) -> TileChoice:
    tile_m, tile_n, stages = (int(size) for size in text.split("x"))
    return TileChoice(tile_m, tile_n, stages)


#: Tile class -> tiles that the sweep tries; none of them spills.
CANDIDATES: dict[tuple[int, int], tuple[TileChoice, ...]] = {
    kind: tuple(_from_text(tile) for tile in tiles.split())
    for kind, tiles in {
        (64, 64): "256x64x4 256x64x8 192x128x3 192x96x4 128x128x3 64x128x4",
        (96, 96): "192x112x3 192x96x3 192x64x5 192x80x4 256x48x4 128x176x2 128x144x3 128x128x3 64x128x3",
        (128, 128): "192x80x3 192x64x3 192x64x4 128x128x2 128x176x2 128x112x3 64x128x3",
        (64, 256): "128x96x2 128x64x2 128x80x2 64x96x2",
        (192, 128): "192x80x3 192x80x2 192x64x3 128x128x2 128x112x2 128x96x2 128x80x3 64x128x2",
        (192, 192): "128x112x2 128x96x2 128x80x2 128x64x3 192x48x2 64x96x2",
        (256, 256): "128x64x2 128x80x2 64x64x2",
    }.items()
}
