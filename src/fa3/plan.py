"""The plan: from a problem and the facts of a device to a spec and the launch, with the reason of each choice.

Pure Python and pure arithmetic: nothing here touches a GPU, torch or the compiler.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fa3.backward_spec import QueryGradientSpec
from fa3.fp8_tiles import FP8_SMALL, FP8_TILES, fp8_rows, takes_turns
from fa3.problem import Problem
from fa3.quantization import TWO_LEVEL_KEYS, default_block
from fa3.spec import (
    BLOCK,
    ELEMENT_BYTES,
    FP8,
    FP8_CLASSES,
    INPUT_BYTES,
    INT8,
    OUT_BYTES,
    TILE_CLASSES,
    WGMMA_ROWS,
    ForwardSpec,
    TransposeSpec,
)
from fa3.tiles import MODIFIED, PACKED, QV, SMALL, TILES, TileChoice


@dataclass(frozen=True)
class DeviceFacts:
    """What a plan needs to know of a GPU.

    Attributes:
        name: as the driver gives it.
        sm_count: streaming multiprocessors.
        l2_bytes: size of the L2 cache.
        tensor_flops_per_clock: dense 16-bit FLOPs per clock and multiprocessor.
        boost_clock_hz: highest clock of the multiprocessors.
        memory_bytes_per_second: device memory, read and written together.
    """

    name: str
    sm_count: int
    l2_bytes: int
    tensor_flops_per_clock: int = 4096
    boost_clock_hz: float = 1.98e9
    memory_bytes_per_second: float = 4.8e12


#: Assumed where there is no GPU to ask: an H200 SXM.
H200 = DeviceFacts(name="NVIDIA H200", sm_count=132, l2_bytes=60 * 2**20)


#: Log2 units by which a score may exceed the softmax reference: probabilities reach 256 at most, which costs
#: fp16 and bf16 no accuracy, and after the first key tile hardly a tile moves the reference.
RESCALE_THRESHOLD = 8.0

#: The same of e4m3, whose largest number is 448: a probability of 1 is about 256 there, and may grow by 2**0.8.
FP8_RESCALE_THRESHOLD = 0.8


#: Columns of a v of e4m3 from which on a pass of its own may transpose it, queries that see each key for that, in the
#: mean of all heads of a K/V head, and floating-point operations: it takes as long as about 150 queries, and a launch.
PASS_COLUMNS, PASS_QUERIES, PASS_FLOPS = 256, 1536, 5e10

#: Most blocks of a grid's second and third dimension (CUDA's limits).
MAX_GRID = 65_535

#: Below so many rounds of the usual tiles a grid is small: its time is a few whole rounds, and smaller tiles or
#: packed heads may fill the card better.
SMALL_GRID = 4

#: Part of the keys that the queries of a causal call see, from which on its tiles count as equally long.
EVEN_SHARE = 0.9

#: Keys up to -> part of the time of the products that reading K and V from device memory may take, when the query
#: tiles of a head come in several phases and each phase reads them again. Long sequences have few tiles, so that
#: evening out their end is worth more.
READ_SHARES = ((8192, 0.4), (math.inf, 0.8))

#: Part of the tensor core's rate at the boost clock that a causal kernel reaches, for that estimate.
EXPECTED_UTILIZATION = 0.55

#: Part of L2 that K and V of the heads in flight may take; the rest is for q, out and whoever else runs.
L2_SHARE = 0.5


@dataclass(frozen=True)
class Order:
    """In which order persistent blocks take the tiles of the output; see ``kernels/parts/tiles.py``.

    Attributes:
        section: query heads that run side by side.
        levels: query tiles of a head that are done before the next section's turn.
        tiles: tiles of the output.
        blocks: thread blocks of the launch.
        reason: why.
    """

    section: int
    levels: int
    tiles: int
    blocks: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """What `plan` decided.

    Attributes:
        spec: the kernel.
        order: how its blocks share the tiles.
        reasons: one sentence for each choice.
        flops: floating-point operations of both products, masked parts left out.
        bytes_moved: bytes of q, k, v, out and LSE, each once.
        transpose: the kernel of a pass that turns a v of e4m3 to V^T before; ``None``: there is none.
    """

    spec: ForwardSpec
    order: Order
    reasons: tuple[str, ...]
    flops: float
    bytes_moved: int
    transpose: TransposeSpec | None = None


#: Rows of one head of tiles that the kernel can count: without packing the backend limits the queries themselves.
MAX_PACKED_ROWS = 2**31 - 256

#: Widest output of one launch; a wider one is computed in several, a part of the columns each.
MAX_COLUMNS = 256


def why_not(problem: Problem) -> str | None:
    """Why no kernel exists for this problem, or ``None`` when one does."""
    if problem.dtype not in INPUT_BYTES:
        return f"dtype {problem.dtype}: kernels exist for {', '.join(INPUT_BYTES)}"
    if problem.qv and problem.head_dim_v > MAX_COLUMNS:
        return f"qv beside head_dim_v={problem.head_dim_v}: kernels with qv exist up to {MAX_COLUMNS}"
    if problem.qv and problem.block_sparse and BLOCK % usual_tiles(problem).tile_n:
        fit = ", ".join(str(kind) for kind, tiles in QV.items() if BLOCK % tiles.tile_n == 0)
        dims = f"head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}"
        return f"qv and block_mask beside {dims}: kernels with both exist up to {fit}"
    return None


def tile_class(head_dim: int, head_dim_v: int, classes: tuple[tuple[int, int], ...] = TILE_CLASSES) -> tuple[int, int]:
    """The tile class with the least work that holds the head dims; of a wide v, one part of its columns."""
    head_dim_v = min(head_dim_v, MAX_COLUMNS)
    return min((c for c in classes if c[0] >= head_dim and c[1] >= head_dim_v), key=sum)


def class_of(problem: Problem) -> tuple[int, int]:
    """The tile class of a problem, among those of its dtype."""
    return tile_class(problem.head_dim, problem.head_dim_v, FP8_CLASSES if problem.dtype == FP8 else TILE_CLASSES)


def adds_in_float32(problem: Problem) -> bool:
    """Whether partial outputs of e4m3 are to be added in float32."""
    if problem.dtype != FP8 or problem.two_level is False:
        return False
    return problem.two_level is True or problem.most_keys > TWO_LEVEL_KEYS


def tensor_flops_per_clock(device: DeviceFacts, dtype: str) -> int:
    """Dense FLOPs per clock and multiprocessor: of e4m3 twice those of 16 bits."""
    return device.tensor_flops_per_clock * (2 if dtype == FP8 else 1)


def plan(problem: Problem, device: DeviceFacts) -> Plan:
    """Choose the kernel and the launch of a problem.

    Raises:
        NotImplementedError: no kernel exists for the problem.
    """
    missing = why_not(problem)
    if missing is not None:
        raise NotImplementedError(missing)
    if transposes_before(problem):
        after = plan(replace(problem, v_transposed=True), device)
        reason = f"v comes in rows: a pass of its own transposes it, since at least {PASS_QUERIES} queries see each key"
        others = (other for other in after.reasons if not other.startswith("v comes"))
        return replace(after, transpose=TransposeSpec(), reasons=(reason, *others))
    choice, spec = kernel_of(problem, device)
    packed = spec.pack_gqa
    order = order_of(problem, spec, device)
    multiprocessors = available(problem, device)
    reasons = (
        f"tiles of {choice.tile_m} queries x {choice.tile_n} keys in {choice.stages} stages: {choice.reason}",
        *([f"the {problem.group_size} query heads of a K/V head share tiles: fewer tiles"] if packed else []),
        *_fp8_reasons(problem, spec),
        f"softmax references move only for probabilities over 2**{spec.rescale_threshold:g}: the output is hardly "
        "rescaled",
        f"{order.tiles} tiles for {order.blocks} persistent blocks on {multiprocessors} multiprocessors: "
        f"{order.tiles / multiprocessors:.2f} rounds",
        order.reason,
    )
    return Plan(spec, order, reasons, flops(problem), bytes_moved(problem))


def transposes_before(problem: Problem) -> bool:
    """Whether a pass of its own turns v to V^T, and not the attention kernel.

    Where heads are wide, that one's shared memory is what limits it, and transposing tiles takes more of it.
    """
    if problem.dtype != FP8 or problem.v_transposed or class_of(problem)[1] < PASS_COLUMNS or problem.empty:
        return False
    if problem.mask == "blocks" or problem.score_mod or problem.mask_mod or problem.softcap:
        return False
    if max(problem.batch, 2 * problem.heads_kv) > MAX_GRID:
        return False
    queries = visible_pairs(problem) * problem.group_size / max(problem.seqlen_k, 1)
    return queries >= PASS_QUERIES and flops(problem) >= PASS_FLOPS


def _fp8_reasons(problem: Problem, spec: ForwardSpec) -> Iterator[str]:
    """What is said of e4m3 alone."""
    if not spec.fp8:
        return
    if spec.transpose_stages:
        yield f"v comes in rows: spare warps of the producer transpose it, {spec.transpose_stages} tiles ahead"
    else:
        yield "v comes transposed: tensor cores take it as it is"
    if spec.qk_dtype:
        yield "q and k are int8: tensor cores add their products exactly, in int32"
    asked = "as asked" if problem.two_level is not None else f"{problem.most_keys} keys"
    if spec.promote:
        parts = f", in {spec.parts} parts of their columns" if spec.parts > 1 else ""
        tiles = "key tile" if spec.promote == 1 else f"{spec.promote} key tiles"
        yield f"partial outputs are added in float32 every {tiles}{parts}, {asked}"
    else:
        yield f"tensor cores add outputs, with 14 bits or so, {asked}"


def computes(spec: ForwardSpec, problem: Problem) -> bool:
    """Whether the kernel of a spec computes a problem, however well it suits it."""
    kind = class_of(problem)
    masks = {problem.mask} if problem.block_sparse else {problem.mask, "window"}
    if problem.causal and problem.mask == "full":
        masks.add("causal")  # a single query
    return (
        spec.dtype == problem.dtype
        and (spec.head_dim, spec.head_dim_v) == kind
        and spec.mask in masks
        and spec.softcap == (problem.softcap > 0.0)
        and spec.qv == problem.qv
        and not (spec.pack_gqa and problem.seqlen_q * problem.group_size > MAX_PACKED_ROWS)
        and (spec.score_mod, spec.score_aux) == (problem.score_mod, ",".join(problem.score_aux))
        and (spec.mask_mod, spec.mask_aux) == (problem.mask_mod, ",".join(problem.mask_aux))
        and (spec.out_dtype, spec.key_block, spec.qk_dtype) == (problem.out_dtype, problem.k_block, problem.qk_dtype)
        and spec.value_blocks == problem.v_blocks
        and not (spec.fp8 and problem.v_transposed == bool(spec.transpose_stages))
        and not (problem.two_level is False and spec.promote)
        and not (problem.two_level and not spec.promote)
    )


def available(problem: Problem, device: DeviceFacts) -> int:
    """Multiprocessors that the call may use."""
    return max(1, device.sm_count - problem.sm_margin)


def kernel_of(problem: Problem, device: DeviceFacts) -> tuple[TileChoice, ForwardSpec]:
    """The tiles for a problem, and the kernel."""
    kind = class_of(problem)
    features: dict[str, bool | str | int] = {
        "softcap": problem.softcap > 0.0,
        "qv": problem.qv,
        "score_mod": problem.score_mod,
        "mask_mod": problem.mask_mod,
        "score_aux": ",".join(problem.score_aux),
        "mask_aux": ",".join(problem.mask_aux),
        "out_dtype": problem.out_dtype,
        "key_block": problem.k_block,
        "value_blocks": problem.v_blocks,
        "qk_dtype": problem.qk_dtype,
    }

    def spec(choice: TileChoice, packed: bool = False) -> ForwardSpec:
        return make_spec(problem.dtype, kind, problem.mask, choice, pack_gqa=packed, **features)

    modified = bool(problem.score_mod or problem.mask_mod)
    usual = usual_tiles(problem)
    candidates = [(usual, spec(usual))]
    may_pack = (
        problem.group_size > 1
        and not modified
        and not problem.qv
        and problem.dtype != FP8
        and problem.seqlen_q * problem.group_size <= MAX_PACKED_ROWS
    )
    if problem.pack_gqa and may_pack:
        candidates = [(choice, spec(choice, True)) for choice in PACKED[kind]]
    elif tile_count(problem, candidates[0][1]) < SMALL_GRID * available(problem, device):
        small = SMALL[kind] if problem.dtype != FP8 else small_fp8_tiles(problem)
        others = [(choice, spec(choice)) for choice in small]
        if problem.pack_gqa is None and may_pack:
            others += [(choice, spec(choice, True)) for choice in PACKED[kind]]
        # Only kernels that everybody has: nobody waits for a compilation to gain some microseconds.
        candidates += [other for other in others if other[1] in _everybodys()]
    # Of equals the first: the one that long sequences have.
    return min(candidates, key=lambda candidate: _time(problem, device, *candidate))


@functools.cache
def _everybodys() -> frozenset[ForwardSpec]:
    return frozenset((*forward_specs(), *fp8_specs()))


def small_fp8_tiles(problem: Problem) -> tuple[TileChoice, ...]:
    """The tiles to try for an e4m3 problem that does not fill the card, beside its usual ones."""
    choice = FP8_SMALL[class_of(problem)][problem.v_transposed]
    fits = problem.k_block % choice.tile_n == 0 and not adds_in_float32(problem)
    return (choice,) if fits and problem.mask != "blocks" else ()


def usual_tiles(problem: Problem) -> TileChoice:
    """The tiles of a problem that fills the card."""
    kind = class_of(problem)
    if problem.dtype == FP8:
        modified = bool(problem.score_mod or problem.mask_mod or problem.softcap)
        add = adds_in_float32(problem)
        rows = fp8_rows(kind, problem.mask, modified, problem.k_block, problem.v_transposed, add)
        return next(choice for limit, choice in rows if problem.seqlen_k <= limit)
    if problem.qv:
        return QV[kind]
    if problem.score_mod or problem.mask_mod or problem.softcap:
        return MODIFIED[kind]
    rows = TILES[kind][problem.mask]
    return next(choice for limit, choice in rows if problem.seqlen_k <= limit)


def tile_count(problem: Problem, spec: ForwardSpec | QueryGradientSpec) -> int:
    """Tiles of the output."""
    packed = spec.pack_gqa
    rows = problem.seqlen_q * (problem.group_size if packed else 1)
    return math.ceil(rows / spec.tile_m) * (problem.heads_kv if packed else problem.heads_q) * problem.batch


def _time(problem: Problem, device: DeviceFacts, choice: TileChoice, spec: ForwardSpec) -> float:
    """Time of a small grid, in no unit: rounds of tiles, each as long as its tiles."""
    rounds = tile_count(problem, spec) / available(problem, device)
    seen = visible_pairs(problem) / max(1, problem.seqlen_q * problem.seqlen_k)
    if spec.causal and problem.seqlen_q > spec.tile_m and seen < EVEN_SHARE:
        # The longest come first and the short ones fill the gaps: the average of all, but never less than the longest.
        return max(1.0, rounds * seen + (1.0 - seen) / 2) * choice.cost
    return math.ceil(rounds) * choice.cost


def make_spec(
    dtype: str, head_dims: int | tuple[int, int], mask: str, choice: TileChoice, **features: bool | str | int
) -> ForwardSpec:
    """Spec with the full schedule; ``features`` are the fields of `ForwardSpec` after the schedule.

    Out of e4m3 is bf16, unless they say.
    """
    head_dim, head_dim_v = head_dims if isinstance(head_dims, tuple) else (head_dims, head_dims)
    turns = True
    if dtype == FP8:
        features = {"out_dtype": "bf16", **features}
        turns = takes_turns((head_dim, head_dim_v), choice)
    return ForwardSpec(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        mask=mask,
        tile_m=choice.tile_m,
        tile_n=choice.tile_n,
        stages=choice.stages,
        warp_specialized=True,
        # Under a window the warpgroups begin and end one after the other, and turns would hold them together.
        pingpong=choice.tile_m > WGMMA_ROWS and mask != "window" and turns,
        overlap=True,
        rescale_threshold=FP8_RESCALE_THRESHOLD if dtype == FP8 else RESCALE_THRESHOLD,
        transpose_stages=choice.transpose_stages,
        promote=choice.promote,
        **features,  # type: ignore[arg-type]
    )


def order_of(problem: Problem, spec: ForwardSpec | QueryGradientSpec, device: DeviceFacts) -> Order:
    """Order the tiles so that all blocks end together and K and V are read from L2.

    Without a mask all tiles are equally long: the heads of one K/V head at a time keep its keys in L2. With a
    causal mask the longest tiles must not come last. So the query tiles of all heads come in phases, longest
    first, and inside a phase as many heads run side by side as fit in L2. More phases even out the end better,
    but each reads K and V again: as many as memory has time for.
    """
    group = 1 if spec.pack_gqa else problem.group_size
    heads = (problem.heads_kv if spec.pack_gqa else problem.heads_q) * problem.batch
    tiles = tile_count(problem, spec)
    m_blocks = tiles // max(heads, 1)
    blocks = min(tiles, available(problem, device))
    # The kernel divides by it, whatever else is empty.
    levels = max(m_blocks, 1)
    if not spec.causal:
        return Order(group, levels, tiles, blocks, f"{_heads(group)} at a time, K and V in L2")
    head_bytes = max(1, problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * INPUT_BYTES[spec.dtype])
    section = min(group * max(1, int(L2_SHARE * device.l2_bytes) // head_bytes), heads)
    peak = device.sm_count * tensor_flops_per_clock(device, problem.dtype) * device.boost_clock_hz
    compute_seconds = flops(problem) / (EXPECTED_UTILIZATION * peak)
    read_seconds = max(1, heads // max(group, 1)) * head_bytes / device.memory_bytes_per_second
    share = next(part for limit, part in READ_SHARES if problem.seqlen_k <= limit)
    phases = min(max(1, int(share * compute_seconds / read_seconds)), levels)
    phase_levels = math.ceil(levels / phases)
    phases = math.ceil(levels / phase_levels)
    reason = f"longest tiles first: {phases} phases, in each {_heads(section)} at a time, K and V in L2"
    return Order(section, phase_levels, tiles, blocks, reason)


def _heads(count: int) -> str:
    return "1 head" if count == 1 else f"{count} heads"


def flops(problem: Problem) -> float:
    """FLOPs of the products over the keys that each row sees by causal mask, window and chunk."""
    columns = problem.head_dim + problem.head_dim_v + (problem.head_dim_v if problem.qv else 0)
    return 2.0 * problem.batch * problem.heads_q * visible_pairs(problem) * columns


def visible_pairs(problem: Problem) -> int:
    """(query, key) pairs of one head that causal mask, window and chunk leave."""
    left, right, chunk = problem.bounds
    keys = problem.seqlen_k
    first_position = keys - problem.seqlen_q
    if not chunk:
        return _pairs(first_position, keys, 0, keys, left, right)
    # A chunk in the first position's chunk, all the whole ones alike, and the last.
    start = max(first_position, 0) // chunk * chunk
    whole = range(start + chunk, keys - chunk + 1, chunk)
    pairs = _pairs(max(first_position, 0), min(start + chunk, keys), start, min(start + chunk, keys), left, right)
    if whole:
        pairs += len(whole) * _pairs(whole[0], whole[0] + chunk, whole[0], whole[0] + chunk, left, right)
    last = start + chunk * (len(whole) + 1)
    return pairs + _pairs(last, keys, last, keys, left, right)


def _pairs(first: int, end: int, first_key: int, end_key: int, left: int, right: int) -> int:
    """Pairs of positions from ``first`` to before ``end`` with keys of a range, inside the window around them."""
    if end <= first or end_key <= first_key:
        return 0
    seen_right = (end - first) * (end_key - first_key)
    if right >= 0:
        seen_right = _clamped_sum(first + right + 1 - first_key, end - first, end_key - first_key)
    hidden_left = _clamped_sum(first - left - first_key, end - first, end_key - first_key) if left >= 0 else 0
    return seen_right - hidden_left


def _clamped_sum(start: int, count: int, limit: int) -> int:
    """Sum of ``min(max(start + i, 0), limit)`` for i from 0 to before ``count``."""

    def up_to(x: int) -> int:
        # The same sum for all numbers from 0 to x.
        return 0 if x <= 0 else x * (x + 1) // 2 if x <= limit else limit * (limit + 1) // 2 + (x - limit) * limit

    return up_to(start + count - 1) - up_to(start - 1)


def bytes_moved(problem: Problem) -> int:
    """Bytes of q, k, v, qv, out and LSE, each once; scales of e4m3, some thousandths of it, do not count."""
    element = {FP8: 1, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}[problem.dtype]
    out_element = OUT_BYTES if problem.dtype == FP8 else element
    q_and_qv = problem.heads_q * problem.seqlen_q * (problem.head_dim + problem.head_dim_v * problem.qv)
    k_and_v = problem.heads_kv * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    out = problem.heads_q * problem.seqlen_q * problem.head_dim_v
    lse = 4 * problem.heads_q * problem.seqlen_q if problem.return_lse else 0
    return problem.batch * (element * (q_and_qv + k_and_v) + out_element * out + lse)


# Kernels that everybody has ------------------------------------------------------------------------

#: Tile classes of which kernels with packed heads are shipped.
_COMMON = ((64, 64), (128, 128))


def forward_specs() -> Iterator[ForwardSpec]:
    """All kernels that plain calls, and calls with a window, can ask for; some come twice."""
    for dtype in ELEMENT_BYTES:
        for kind, masks in TILES.items():
            for mask, rows in masks.items():
                for _, choice in rows:
                    yield make_spec(dtype, kind, mask, choice)
                for choice in SMALL[kind] if mask != "window" else ():
                    yield make_spec(dtype, kind, mask, choice)
                for choice in PACKED[kind] if kind in _COMMON else ():
                    yield make_spec(dtype, kind, mask, choice, pack_gqa=True)


#: Head dims of which e4m3 kernels are shipped for V^T, blocks and windows too.
_FP8_COMMON = ((64, 64), (128, 128), (256, 256))


def fp8_specs() -> Iterator[ForwardSpec]:
    """The shipped kernels of e4m3; others, with out in fp16 for example, are compiled when first asked for.

    At the usual head dims full and causal: v in rows and V^T, with a scale a head and with one for each default block
    of k, each with partial outputs added in float32 too, and smaller tiles for few; V^T with blocks of v too, and with
    q and k in int8. Windows at 64 and 128. At other head dims v in rows with a scale a head.
    """
    for kind in FP8_CLASSES:
        common = kind in _FP8_COMMON
        for mask, add in itertools.product(("full", "causal"), (False, True) if common else (False,)):
            # (whether v is transposed, keys of a block)
            layouts = itertools.product((False, True), (0, default_block(kind[0], add)[1])) if common else ((False, 0),)
            for transposed, key_block in layouts:
                for _, choice in fp8_rows(kind, mask, False, key_block, transposed, add):
                    yield make_spec(FP8, kind, mask, choice, key_block=key_block)
                    if key_block and transposed:
                        yield make_spec(FP8, kind, mask, choice, key_block=key_block, value_blocks=True)
                if common and not add:
                    yield make_spec(FP8, kind, mask, FP8_SMALL[kind][transposed], key_block=key_block)
        for mask, add in itertools.product(("full", "causal"), (False, True) if common else ()):
            key_block = default_block(kind[0], add)[1]
            choices = [choice for _, choice in fp8_rows(kind, mask, False, key_block, True, add)]
            for choice in choices if add else (*choices, FP8_SMALL[kind][True]):
                yield make_spec(FP8, kind, mask, choice, key_block=key_block, qk_dtype=INT8)
        for transposed in (False, True) if kind in _COMMON else ():
            for _, choice in FP8_TILES[kind]["window"][transposed]:
                yield make_spec(FP8, kind, "window", choice)
