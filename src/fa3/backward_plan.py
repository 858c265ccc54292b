"""The plan of the backward: from a problem and the facts of a device to its three kernels and their launch.

Pure Python and pure arithmetic, as `fa3.plan`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from fa3 import plan as planning
from fa3.backward_spec import BACKWARD_CLASSES, BackwardSpec, FinishSpec, PrepareSpec, QueryGradientSpec
from fa3.plan import L2_SHARE, MAX_COLUMNS, DeviceFacts, Order
from fa3.problem import Problem
from fa3.spec import ELEMENT_BYTES


@dataclass(frozen=True)
class BackwardTiles:
    """One row of the table.

    Attributes:
        tile_m: query rows of a step.
        tile_n: keys of a block.
        stages, stages_dout, dq_stages: q tiles, dout tiles and dQ tiles in shared memory at once.
        reason: why.
    """

    tile_m: int
    tile_n: int
    stages: int
    stages_dout: int
    dq_stages: int
    reason: str


_SHARED_KEYS = "the warpgroups share 64 keys: dK and dV of 64 keys take the registers of both"
_D256 = BackwardTiles(64, 64, 2, 2, 0, _SHARED_KEYS)

#: Tile class -> tiles.
BACKWARD_TILES: dict[tuple[int, int], BackwardTiles] = {
    (64, 64): BackwardTiles(128, 128, 3, 2, 1, "128 queries a step: fewer bytes of shared memory for each product"),
    (128, 128): BackwardTiles(64, 128, 2, 2, 2, "dK and dV of 64 keys take half of a warpgroup's registers"),
    (64, 256): BackwardTiles(64, 64, 2, 2, 2, _SHARED_KEYS),
    (192, 128): BackwardTiles(64, 64, 2, 2, 1, _SHARED_KEYS),
    (256, 256): _D256,
}

_KEPT = "registers keep the scores until dS is there"

#: Tile class -> tiles with a softcap or score_mod, where registers must keep the scores until dS is there.
BACKWARD_MODIFIED: dict[tuple[int, int], BackwardTiles] = {
    **BACKWARD_TILES,
    (64, 64): BackwardTiles(64, 128, 2, 2, 2, _KEPT),
    (128, 128): BackwardTiles(64, 64, 2, 2, 2, _KEPT),
}


@dataclass(frozen=True)
class QueryTiles:
    """Tiles of the kernel that makes dQ by queries.

    Attributes:
        tile_m: queries of a block.
        tile_n: keys of a step.
        stages, stages_v: K tiles and V tiles in shared memory at once.
        reason: why.
    """

    tile_m: int
    tile_n: int
    stages: int
    stages_v: int
    reason: str


#: Those of the class in which the main pass has no shared memory for dQ.
QUERY_TILES = QueryTiles(128, 64, 2, 1, reason="shared memory is full: q, dout, two tiles of k, one of v")

#: The same with a softcap or score_mod.
QUERY_MODIFIED = QueryTiles(128, 32, 4, 2, reason=_KEPT)


def backward_tiles(kind: tuple[int, int], modified: bool = False) -> BackwardTiles:
    """The tiles of a class."""
    return BACKWARD_MODIFIED[kind] if modified else BACKWARD_TILES[kind]


def query_tiles(modified: bool = False) -> QueryTiles:
    """The tiles of the kernel that makes dQ by queries."""
    return QUERY_MODIFIED if modified else QUERY_TILES


@dataclass(frozen=True)
class BackwardPlan:
    """What `plan_backward` decided.

    Attributes:
        prepare, main, finish: the kernels; the last one puts the sums of dQ in order, or makes dQ by queries.
        parts: in how many the query heads of a K/V head come. Each part has a dK and a dV of its own, which are summed
            afterwards; with one part the sums are made in registers.
        order: how the blocks of the main one share the tiles of keys.
        query_order: how those of the last one share the tiles of queries, if it makes dQ.
        reasons: one sentence for each choice.
        flops: floating-point operations of the five products, masked parts left out.
    """

    prepare: PrepareSpec
    main: BackwardSpec
    finish: FinishSpec | QueryGradientSpec
    parts: int
    order: Order
    query_order: Order | None
    reasons: tuple[str, ...]
    flops: float


def why_no_backward(problem: Problem) -> str | None:
    """Why no kernels exist for the gradients of this problem, or ``None`` when they do."""
    if problem.dtype not in ELEMENT_BYTES:
        return f"dtype {problem.dtype}: kernels exist for {', '.join(ELEMENT_BYTES)}"
    if problem.qv and problem.head_dim + problem.head_dim_v > MAX_COLUMNS:
        return (
            f"qv beside head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}: kernels exist up to "
            f"{MAX_COLUMNS} in all"
        )
    return None


def backward_class(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The tile class of the backward; as `fa3.plan.tile_class`."""
    return planning.tile_class(head_dim, head_dim_v, BACKWARD_CLASSES)


def make_backward_specs(
    dtype: str,
    kind: tuple[int, int],
    mask: str,
    tiles: BackwardTiles,
    **features: bool | str,
) -> tuple[PrepareSpec, BackwardSpec, FinishSpec | QueryGradientSpec]:
    """The kernels of a tile class with these tiles."""
    head_dim, head_dim_v = kind
    finish: FinishSpec | QueryGradientSpec = FinishSpec(dtype, head_dim, tiles.tile_m)
    if not tiles.dq_stages:
        # What makes dQ by queries needs no order, and the main pass has none.
        features = {name: value for name, value in features.items() if name != "deterministic"}
        by_queries = query_tiles(bool(features.get("softcap") or features.get("score_mod")))
        finish = QueryGradientSpec(
            dtype, head_dim, head_dim_v, mask, by_queries.tile_m, by_queries.tile_n, by_queries.stages,
            by_queries.stages_v, **features,  # type: ignore[arg-type]
        )  # fmt: skip
    return (
        PrepareSpec(dtype, head_dim_v, tiles.tile_m),
        BackwardSpec(
            dtype, head_dim, head_dim_v, mask, tiles.tile_m, tiles.tile_n, tiles.stages, tiles.stages_dout,
            tiles.dq_stages, **features,  # type: ignore[arg-type]
        ),
        finish,
    )  # fmt: skip


def plan_backward(
    problem: Problem, device: DeviceFacts, derivative: str = "", deterministic: bool = False
) -> BackwardPlan:
    """Choose the kernels and the launch for the gradients of a problem.

    ``derivative`` is the name of the derivative of its score_mod.

    Raises:
        NotImplementedError: no kernels exist for the problem.
    """
    missing = why_no_backward(problem)
    if missing is not None:
        raise NotImplementedError(missing)
    # qv is more columns of q, and v as many more of k.
    head_dim = problem.head_dim + (problem.head_dim_v if problem.qv else 0)
    kind = backward_class(head_dim, problem.head_dim_v)
    modified = bool(problem.softcap or problem.score_mod)
    tiles = backward_tiles(kind, modified)
    prepare, main, finish = make_backward_specs(
        problem.dtype,
        kind,
        problem.mask,
        tiles,
        deterministic=deterministic,
        softcap=problem.softcap > 0.0,
        score_mod=problem.score_mod,
        derivative=derivative if problem.score_mod else "",
        mask_mod=problem.mask_mod,
        score_aux=",".join(problem.score_aux),
        mask_aux=",".join(problem.mask_aux),
    )
    parts = group_parts(problem, main, device)
    order = backward_order(problem, main, device, parts)
    query_order = query_order_of(problem, finish, device)
    by_queries = query_tiles(modified)
    reasons = (
        f"tiles of {tiles.tile_m} queries x {tiles.tile_n} keys in {tiles.stages} stages: {tiles.reason}",
        *([f"the {problem.group_size} query heads of a K/V head in {parts} parts: more tiles"] if parts > 1 else []),
        order.reason,
        *(
            [
                "dQ by a kernel of its own, whose blocks own queries: no shared memory is left for it",
                f"its tiles of {by_queries.tile_m} queries x {by_queries.tile_n} keys in {by_queries.stages} stages: "
                f"{by_queries.reason}",
                query_order.reason,
            ]
            if query_order is not None
            else []
        ),
    )
    return BackwardPlan(prepare, main, finish, parts, order, query_order, reasons, backward_flops(problem))


#: Tiles of keys a multiprocessor from which on tiles of different lengths even out.
EVEN_ROUNDS = 3

#: Part of the card that tiles of equal length must keep busy.
BUSY = 0.85


def group_parts(problem: Problem, spec: BackwardSpec, device: DeviceFacts) -> int:
    """In how many parts the query heads of a K/V head come: as few as keep the card busy, if that is possible."""
    tiles = math.ceil(problem.seqlen_k / spec.tile_n) * problem.heads_kv * problem.batch
    if not tiles or not problem.group_size:
        return 1
    multiprocessors = planning.available(problem, device)

    def busy(parts: int) -> float:
        """At least 1 where the card is busy enough."""
        rounds = parts * tiles / multiprocessors
        # Without a mask all tiles are equally long, and the last round alone may leave the card idle.
        return rounds / math.ceil(rounds) / BUSY if problem.mask == "full" else rounds / EVEN_ROUNDS

    divisors = [n for n in range(1, problem.group_size + 1) if problem.group_size % n == 0]
    return next((n for n in divisors if busy(n) >= 1), max(divisors, key=busy))


def backward_order(problem: Problem, spec: BackwardSpec, device: DeviceFacts, parts: int = 1) -> Order:
    """In which order the blocks take the tiles of keys: a few heads at a time, whose q, dout and dQ stay in L2."""
    n_blocks = math.ceil(problem.seqlen_k / spec.tile_n)
    heads = problem.heads_kv * problem.batch * parts
    tiles = n_blocks * heads
    multiprocessors = planning.available(problem, device)
    blocks = max(1, min(tiles, multiprocessors))
    element = ELEMENT_BYTES[spec.dtype]
    row_bytes = element * (spec.head_dim + spec.head_dim_v) + 4 * spec.head_dim
    head_bytes = max(1, problem.group_size // parts * problem.seqlen_q * row_bytes)
    fitting = int(L2_SHARE * device.l2_bytes) // head_bytes
    filling = math.ceil(multiprocessors / max(n_blocks, 1))
    section = max(1, min(heads, max(fitting, filling)))
    reason = f"{tiles} tiles of keys for {blocks} persistent blocks, {section} heads of them at a time"
    return Order(section, max(n_blocks, 1), tiles, blocks, reason)


def query_order_of(problem: Problem, spec: FinishSpec | QueryGradientSpec, device: DeviceFacts) -> Order | None:
    """In which order the blocks of the kernel that makes dQ by queries take their tiles: as in the forward."""
    return planning.order_of(problem, spec, device) if isinstance(spec, QueryGradientSpec) else None


def backward_flops(problem: Problem) -> float:
    """FLOPs of the five products over the keys that each row sees by causal mask, window and chunk."""
    columns = 3 * problem.head_dim + 2 * problem.head_dim_v + (3 * problem.head_dim_v if problem.qv else 0)
    return 2.0 * problem.batch * problem.heads_q * planning.visible_pairs(problem) * columns


def backward_specs() -> Iterator[PrepareSpec | BackwardSpec | FinishSpec | QueryGradientSpec]:
    """All kernels for the gradients of a plain call, or of one with a window, in a fixed order of the sums or not."""
    masks = ("full", "causal", "window")
    for dtype, kind, mask, deterministic in itertools.product(ELEMENT_BYTES, BACKWARD_TILES, masks, (False, True)):
        tiles = backward_tiles(kind)
        yield from make_backward_specs(dtype, kind, mask, tiles, deterministic=deterministic)
