"""The plan: from a problem and the facts of a device to a spec and the launch, with the reason of each choice.

Pure Python and pure arithmetic: nothing here touches a GPU, torch or the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fa3.problem import Problem
from fa3.spec import ELEMENT_BYTES, ForwardSpec


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


@dataclass(frozen=True)
class TileChoice:
    """One row of the tile table."""

    tile_m: int
    tile_n: int
    stages: int
    reason: str


#: (head dim, causal) -> tiles for keys up to a length, in order; the last row of each takes the rest.
TILES: dict[tuple[int, bool], tuple[tuple[float, TileChoice], ...]] = {
    (64, False): (
        (1024, TileChoice(256, 64, 4, "four warpgroups: the fewest cycles on short rows")),
        (math.inf, TileChoice(192, 128, 3, "three warpgroups: the fewest cycles on long rows; wider tiles spill")),
    ),
    (64, True): (
        (2048, TileChoice(256, 64, 4, "as without a mask")),
        (math.inf, TileChoice(192, 128, 3, "as without a mask")),
    ),
    (128, False): (
        (
            math.inf,
            TileChoice(192, 80, 3, "three warpgroups: fewer cycles than two with 128 or 176 keys; wider tiles spill"),
        ),
    ),
    (128, True): (
        (1024, TileChoice(192, 64, 3, "narrow key tiles waste less on the diagonal of short rows")),
        (math.inf, TileChoice(192, 80, 3, "as without a mask")),
    ),
    (256, False): (
        (math.inf, TileChoice(128, 64, 2, "two stages in shared memory; 80 keys, the most that fit, gain nothing")),
    ),
    (256, True): ((math.inf, TileChoice(128, 64, 2, "as without a mask")),),
}

#: Log2 units by which a score may exceed the softmax reference: probabilities reach 256 at most, which costs
#: fp16 and bf16 no accuracy, and after the first key tile hardly a tile moves the reference.
RESCALE_THRESHOLD = 8.0


#: Part of the time of the products that reading K and V from device memory may take, when the query tiles of
#: a head come in several phases and each phase reads them again.
READ_SHARE = 0.4

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
    """

    spec: ForwardSpec
    order: Order
    reasons: tuple[str, ...]
    flops: float
    bytes_moved: int


def why_not(problem: Problem) -> str | None:
    """Why no kernel exists for this problem yet, or ``None`` when one does."""
    if problem.dtype not in ELEMENT_BYTES:
        return f"dtype {problem.dtype}: kernels exist for {', '.join(ELEMENT_BYTES)}"
    classes = sorted({d for d, _ in TILES})
    if problem.head_dim not in classes:
        return f"head_dim={problem.head_dim}: kernels exist for {', '.join(map(str, classes))}"
    if problem.head_dim_v != problem.head_dim:
        return f"head_dim_v={problem.head_dim_v}, head_dim={problem.head_dim}: kernels exist for equal ones"
    return None


def plan(problem: Problem, device: DeviceFacts) -> Plan:
    """Choose the kernel and the launch of a problem.

    Raises:
        NotImplementedError: no kernel exists for the problem.
    """
    missing = why_not(problem)
    if missing is not None:
        raise NotImplementedError(missing)
    choice = tiles_of(problem)
    spec = make_spec(problem.dtype, problem.head_dim, problem.causal, choice)
    order = order_of(problem, spec, device)
    reasons = (
        f"tiles of {choice.tile_m} queries x {choice.tile_n} keys in {choice.stages} stages: {choice.reason}",
        f"softmax references move only for probabilities over 2**{RESCALE_THRESHOLD:g}: the output is hardly rescaled",
        f"{order.tiles} tiles for {order.blocks} persistent blocks on {device.sm_count} multiprocessors: "
        f"{order.tiles / device.sm_count:.2f} rounds",
        order.reason,
    )
    return Plan(spec, order, reasons, flops(problem), bytes_moved(problem))


def tiles_of(problem: Problem) -> TileChoice:
    """The row of the tile table for a problem."""
    rows = TILES[problem.head_dim, problem.causal]
    return next(choice for limit, choice in rows if problem.seqlen_k <= limit)


def make_spec(dtype: str, head_dim: int, causal: bool, choice: TileChoice) -> ForwardSpec:
    """Spec with the full schedule."""
    return ForwardSpec(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        causal=causal,
        tile_m=choice.tile_m,
        tile_n=choice.tile_n,
        stages=choice.stages,
        warp_specialized=True,
        pingpong=True,
        overlap=True,
        rescale_threshold=RESCALE_THRESHOLD,
    )


def order_of(problem: Problem, spec: ForwardSpec, device: DeviceFacts) -> Order:
    """Order the tiles so that all blocks end together and K and V are read from L2.

    Without a mask all tiles are equally long: the heads of one K/V head at a time keep its keys in L2. With a
    causal mask the longest tiles must not come last. So the query tiles of all heads come in phases, longest
    first, and inside a phase as many heads run side by side as fit in L2. More phases even out the end better,
    but each reads K and V again: as many as memory has time for.
    """
    heads = problem.heads_q * problem.batch
    m_blocks = math.ceil(problem.seqlen_q / spec.tile_m)
    tiles = m_blocks * heads
    blocks = min(tiles, device.sm_count)
    group = problem.group_size
    # The kernel divides by it, whatever else is empty.
    levels = max(m_blocks, 1)
    if not problem.causal:
        return Order(group, levels, tiles, blocks, f"{_heads(group)} at a time, K and V in L2")
    head_bytes = max(1, problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * ELEMENT_BYTES[spec.dtype])
    section = min(group * max(1, int(L2_SHARE * device.l2_bytes) // head_bytes), heads)
    peak = device.sm_count * device.tensor_flops_per_clock * device.boost_clock_hz
    compute_seconds = flops(problem) / (EXPECTED_UTILIZATION * peak)
    read_seconds = max(1, heads // group) * head_bytes / device.memory_bytes_per_second
    phases = min(max(1, int(READ_SHARE * compute_seconds / read_seconds)), levels)
    phase_levels = math.ceil(levels / phases)
    phases = math.ceil(levels / phase_levels)
    reason = f"longest tiles first: {phases} phases, in each {_heads(section)} at a time, K and V in L2"
    return Order(section, phase_levels, tiles, blocks, reason)


def _heads(count: int) -> str:
    return "1 head" if count == 1 else f"{count} heads"


def flops(problem: Problem) -> float:
    """FLOPs of QK^T and PV over the keys that each row sees."""
    if problem.causal:
        offset = problem.seqlen_k - problem.seqlen_q
        first = max(0, -offset)
        rows = problem.seqlen_q - first
        pairs = rows * (first + offset + 1 + problem.seqlen_k) / 2 if rows > 0 else 0.0
    else:
        pairs = float(problem.seqlen_q) * problem.seqlen_k
    return 2.0 * problem.batch * problem.heads_q * pairs * (problem.head_dim + problem.head_dim_v)


def bytes_moved(problem: Problem) -> int:
    """Bytes of every input and output, each once."""
    element = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}[problem.dtype]
    q_and_out = problem.heads_q * problem.seqlen_q * (problem.head_dim + problem.head_dim_v)
    k_and_v = problem.heads_kv * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    lse = 4 * problem.heads_q * problem.seqlen_q if problem.return_lse else 0
    return problem.batch * (element * (q_and_out + k_and_v) + lse)


# Sets of specs to compile -------------------------------------------------------------------------

PRESETS = ("smoke", "forward", "schedule", "all")


def shipped_specs(preset: str) -> tuple[ForwardSpec, ...]:
    """The specs of a preset, in a fixed order.

    ``smoke``: one kernel. ``forward``: all that `plan` can choose. ``schedule``: every combination of the
    schedule's switches, for tests and the ablation. ``all``: everything.

    Raises:
        ValueError: unknown preset.
    """
    if preset == "smoke":
        return (make_spec("bf16", 128, False, TILES[128, False][0][1]),)
    if preset == "forward":
        return tuple(
            make_spec(dtype, head_dim, causal, choice)
            for dtype in ELEMENT_BYTES
            for (head_dim, causal), rows in TILES.items()
            for _, choice in rows
        )
    if preset == "schedule":
        return tuple(_schedules())
    if preset == "all":
        return tuple(dict.fromkeys((*shipped_specs("forward"), *shipped_specs("schedule"))))
    raise ValueError(f"preset={preset!r}: allowed are {', '.join(PRESETS)}")


def _schedules() -> Iterator[ForwardSpec]:
    switches = (False, True)
    for (head_dim, causal), rows in TILES.items():
        full = make_spec("bf16", head_dim, causal, rows[-1][1])
        # The whole grid of switches at d 128; elsewhere each switch off alone, and all of them.
        grid = [(w, p, o) for w in switches for p in switches for o in switches]
        if head_dim != 128:
            grid = [(w, p, o) for w, p, o in grid if w + p + o in (0, 2)]
        for specialized, pingpong, overlap in grid:
            yield replace(full, warp_specialized=specialized, pingpong=pingpong, overlap=overlap)
        yield replace(full, rescale_threshold=0.0)
    # One and two warpgroups, and more than two stages.
    yield make_spec("bf16", 128, True, TileChoice(128, 64, 4, ""))
    yield replace(make_spec("bf16", 128, True, TileChoice(64, 64, 3, "")), pingpong=False)
    yield make_spec("bf16", 128, False, TileChoice(192, 80, 1, ""))
    # The paper's ablation is in fp16.
    full = make_spec("fp16", 128, False, TILES[128, False][-1][1])
    for specialized, pingpong, overlap in ((False, True, True), (True, False, True), (True, True, False)):
        yield replace(full, warp_specialized=specialized, pingpong=pingpong, overlap=overlap)
    yield replace(full, pingpong=False, overlap=False)
