"""The tile tables of e4m3.

A row of a table has a use, and tiles as text: ``"192x96x3/2+4"`` are 192 queries x 96 keys in 3 stages, 2 more for v
tiles that wait for their transposition, and partial outputs added in float32 every 4 key tiles. Tiles for keys up to
a length have it in front, ``"1024:192x64x4 192x96x3"``; the last of them have none.

A use has up to three words:

| word | meaning |
| --- | --- |
| full, causal, window | the mask; where a table has no row of causal or window, that of full counts |
| modified | caps, modifications and block masks, under whatever mask: 128 queries, and a divisor of 128 keys |
| 64, 96, 128 | keys of a block that has a scale of its own, which the keys of a tile must divide |
| add | partial outputs are added in float32 |
"""

from __future__ import annotations

import math

from fa3.spec import WHOLE_COLUMNS
from fa3.tiles import Rows, TileChoice

_REASONS = {
    "window": "fewer keys waste less at the edges of a window",
    "modified": "two warpgroups, with registers for more work on the scores",
    "add": "registers for a second output, the sums in float32",
    "96": "a tile has keys of one block of 96, which share a scale",
    "64": "a tile has keys of one block of 64, which share a scale",
    "128": "a tile has keys of one block of 128, which share a scale",
    "full": "the widest tiles without spills in the main loop",
    "causal": "the widest tiles without spills in the main loop",
}

#: (head_dim, head_dim_v) of the tile class -> use -> tiles for v in rows, and for V^T.
_TABLE: dict[tuple[int, int], dict[str, tuple[str, str]]] = {
    (64, 64): {
        "full": ("192x128x3/2", "192x128x3"),
        "window": ("192x64x4/2", "192x64x4"),
        "full 128": ("192x128x3/2", "192x128x3"),
        "full 96": ("192x96x3/2", "192x96x3"),
        "full 64": ("192x64x4/2", "192x64x4"),
        "full add": ("192x96x3/2+4", "192x96x3+4"),
        "full 96 add": ("192x96x3/2+4", "192x96x3+4"),
        "full 128 add": ("128x128x3/2+4", "128x128x3+4"),
        "full 64 add": ("192x64x4/2+4", "192x64x4+4"),
        "modified": ("128x128x3/2", "128x128x3"),
        "modified 128": ("128x128x3/2", "128x128x3"),
        "modified 64": ("128x64x4/2", "128x64x4"),
        "modified 96": ("128x32x4/2", "128x32x4"),
        "modified add": ("128x64x4/2+8", "128x64x4+8"),
        "modified 128 add": ("128x64x4/2+8", "128x64x4+8"),
        "modified 64 add": ("128x64x4/2+8", "128x64x4+8"),
        "modified 96 add": ("128x32x4/2+8", "128x32x4+8"),
    },
    (96, 96): {
        "full": ("192x128x2/2", "192x128x2"),
        "window": ("192x64x4/2", "192x64x4"),
        "full 128": ("128x128x2/2", "128x128x2"),
        "full 96": ("192x96x3/2", "192x96x3"),
        "full 64": ("192x64x4/2", "192x64x4"),
        "full add": ("128x128x2/2+4", "128x128x2+4"),
        "full 128 add": ("128x128x2/2+4", "128x128x2+4"),
        "full 96 add": ("128x96x3/2+4", "128x96x3+4"),
        "full 64 add": ("128x64x4/2+4", "128x64x4+4"),
        "modified": ("128x128x2/2", "128x128x2"),
        "modified 128": ("128x128x2/2", "128x128x2"),
        "modified 64": ("128x64x4/2", "128x64x4"),
        "modified 96": ("128x32x4/2", "128x32x4"),
        "modified add": ("128x64x4/2+8", "128x64x4+8"),
        "modified 128 add": ("128x64x4/2+8", "128x64x4+8"),
        "modified 64 add": ("128x64x4/2+8", "128x64x4+8"),
        "modified 96 add": ("128x32x4/2+8", "128x32x4+8"),
    },
    (128, 128): {
        "full": ("192x96x3/2", "192x96x3"),
        "window": ("192x64x4/2", "192x64x4"),
        "full 128": ("128x128x2/2", "128x128x2"),
        "full 96": ("192x96x3/2", "192x96x3"),
        "full 64": ("192x64x4/2", "192x64x4"),
        "full add": ("128x96x3/2+4", "128x128x2+4"),
        "full 128 add": ("128x64x4/2+8", "128x128x2+4"),
        "window add": ("128x64x4/2+8", "128x64x4+8"),
        "window 128 add": ("128x64x4/2+8", "128x64x4+8"),
        "full 96 add": ("128x96x3/2+4", "128x96x3+4"),
        "full 64 add": ("128x64x4/2+8", "128x64x4+8"),
        "modified": ("128x128x2/2", "128x128x2"),
        "modified 128": ("128x128x2/2", "128x128x2"),
        "modified 64": ("128x64x4/2", "128x64x4"),
        "modified 96": ("128x32x4/2", "128x32x4"),
        "modified add": ("128x64x4/2+8", "128x64x4+8"),
        "modified 128 add": ("128x64x4/2+8", "128x64x4+8"),
        "modified 64 add": ("128x64x4/2+8", "128x64x4+8"),
        "modified 96 add": ("128x32x4/2+8", "128x32x4+8"),
    },
    (192, 128): {
        "full": ("128x128x2/2", "128x128x2"),
        "window": ("128x64x2/2", "128x64x2"),
        "full 128": ("128x128x2/2", "128x128x2"),
        "full 96": ("128x96x2/2", "128x96x2"),
        "full 64": ("128x64x3/2", "128x64x3"),
        "modified": ("128x128x2/2", "128x128x2"),
        "modified 128": ("128x128x2/2", "128x128x2"),
        "modified 64": ("128x64x3/2", "128x64x3"),
        "modified 96": ("128x32x4/2", "128x32x4"),
        "full add": ("128x96x2/2+4", "128x96x2+4"),
        "full 128 add": ("128x64x3/2+4", "128x64x3+4"),
        "full 96 add": ("128x96x2/2+4", "128x96x2+4"),
        "full 64 add": ("128x64x3/2+4", "128x64x3+4"),
        "modified add": ("128x64x3/2+4", "128x64x3+4"),
        "modified 128 add": ("128x64x3/2+4", "128x64x3+4"),
        "modified 96 add": ("128x32x4/2+8", "128x32x4+8"),
        "modified 64 add": ("128x64x3/2+4", "128x64x3+4"),
    },
    (192, 192): {
        "full": ("128x128x2/2", "128x128x2"),
        "window": ("128x64x3/2", "128x64x2"),
        "window 128": ("128x64x3/2", "128x64x3"),
        "full 128": ("128x128x2/2", "128x128x2"),
        "full 96": ("128x96x2/2", "128x96x2"),
        "full 64": ("128x64x3/2", "128x64x2"),
        "modified": ("128x64x3/2", "128x64x2"),
        "modified 128": ("128x64x3/2", "128x64x2"),
        "modified 64": ("128x64x3/2", "128x64x2"),
        "modified 96": ("128x32x4/2", "128x32x4"),
        "full add": ("128x128x2/2+1", "128x128x2+1"),
        "window add": ("128x64x3/2+1", "128x64x3+1"),
        "full 128 add": ("128x128x2/2+1", "128x128x2+1"),
        "window 128 add": ("128x64x3/2+1", "128x64x3+1"),
        "full 96 add": ("128x96x2/2+1", "128x96x2+1"),
        "full 64 add": ("128x64x3/2+1", "128x64x3+1"),
        "modified add": ("128x64x3/2+1", "128x64x3+1"),
        "modified 128 add": ("128x64x3/2+1", "128x64x3+1"),
        "modified 96 add": ("128x32x4/2+1", "128x32x4+1"),
        "modified 64 add": ("128x64x3/2+1", "128x64x3+1"),
    },
    (256, 256): {
        "full": ("2048:128x64x3/2 128x96x2/2", "128x128x2"),
        "window": ("128x64x3/2", "128x64x2"),
        "window 128": ("128x64x3/2", "128x64x3"),
        "full 128": ("128x64x3/2", "128x128x2"),
        "full 96": ("128x96x2/2", "128x96x2"),
        "full 64": ("128x64x3/2", "128x64x2"),
        "modified": ("128x64x3/2", "128x64x2"),
        "modified 128": ("128x64x3/2", "128x64x2"),
        "modified 64": ("128x64x3/2", "128x64x2"),
        "modified 96": ("128x32x4/2", "128x32x4"),
        "full add": ("128x128x2/2+1", "128x128x2+1"),
        "window add": ("128x64x3/2+1", "128x64x3+1"),
        "full 128 add": ("128x128x2/2+1", "128x128x2+1"),
        "window 128 add": ("128x64x3/2+1", "128x64x3+1"),
        "full 96 add": ("128x32x4/2+1", "128x32x4+1"),
        "full 64 add": ("128x64x3/2+1", "128x64x3+1"),
        "modified add": ("128x64x3/2+1", "128x64x3+1"),
        "modified 128 add": ("128x64x3/2+1", "128x64x3+1"),
        "modified 96 add": ("128x32x4/2+1", "128x32x4+1"),
        "modified 64 add": ("128x64x3/2+1", "128x64x3+1"),
    },
}

#: Tile classes whose warpgroups take turns. At others they find their pace themselves, 1-2% faster.
_TURNS = ((96, 96), (128, 128), (192, 128))

_FEW = "few tiles: smaller ones fill the card"

#: Tile class -> tiles of one warpgroup, for v in rows and for V^T, tried where the usual ones make few rounds, and
#: their cost. They suit the usual blocks of keys (`fa3.quantization.default_block`) too.
_SMALL: dict[tuple[int, int], tuple[str, str, float]] = {
    (64, 64): ("64x128x3/2", "64x128x3", 0.59),
    (96, 96): ("64x96x4/2", "64x96x4", 0.55),
    (128, 128): ("64x96x4/2", "64x96x4", 0.54),
    (192, 128): ("64x128x2/2", "64x128x2", 0.55),
    (192, 192): ("64x64x2/2", "64x128x2", 0.65),
    (256, 256): ("64x64x2/2", "64x64x4", 0.65),
}


def _choice(text: str, reason: str, cost: float = 1.0) -> TileChoice:
    text, _, promote = text.partition("+")
    text, _, transpose_stages = text.partition("/")
    tile_m, tile_n, stages = (int(size) for size in text.split("x"))
    return TileChoice(tile_m, tile_n, stages, reason, cost, int(transpose_stages or 0), int(promote or 0))


def _rows(text: str, reason: str) -> Rows:
    rows = []
    for part in text.split():
        limit, colon, tiles = part.rpartition(":")
        rows.append((float(limit) if colon else math.inf, _choice(tiles, reason)))
    return tuple(rows)


def _reason(use: str) -> str:
    words = use.split()
    return _REASONS["add" if "add" in words else words[0] if words[0] in ("window", "modified") else words[-1]]


#: (head_dim, head_dim_v) of the tile class -> use -> whether v comes transposed -> rows.
FP8_TILES: dict[tuple[int, int], dict[str, tuple[Rows, Rows]]] = {
    kind: {use: (_rows(rows, _reason(use)), _rows(turned, _reason(use))) for use, (rows, turned) in uses.items()}
    for kind, uses in _TABLE.items()
}

#: Tile class -> whether v comes transposed -> other tiles.
FP8_SMALL: dict[tuple[int, int], tuple[TileChoice, TileChoice]] = {
    kind: (_choice(rows, _FEW, cost), _choice(turned, _FEW, cost)) for kind, (rows, turned, cost) in _SMALL.items()
}


def fp8_rows(
    kind: tuple[int, int], mask: str, modified: bool, key_block: int, transposed: bool, add: bool = False
) -> Rows:
    """The rows of a tile class for a use; ``modified`` has that of all masks, which block masks always are."""
    words = [str(key_block)] if key_block else []
    words += ["add"] if add else []
    uses = FP8_TILES[kind]
    use = " ".join(["modified" if modified or mask == "blocks" else mask, *words])
    return uses.get(use, uses.get(" ".join(["full", *words]), ()))[transposed]


def takes_turns(kind: tuple[int, int], choice: TileChoice) -> bool:
    """Whether the warpgroups of a tile class take turns at the tensor core; with PV in parts always."""
    return kind in _TURNS or (choice.promote > 0 and kind[1] > WHOLE_COLUMNS)
