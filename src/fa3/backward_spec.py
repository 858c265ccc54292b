"""The specs of the backward's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa3.spec import (
    BLOCK,
    ELEMENT_BYTES,
    WARPGROUP_THREADS,
    WGMMA_ROWS,
    Spec,
    changes_in_name,
    check_kind,
    check_memory,
    dims_in_name,
)

#: (head_dim, head_dim_v) of the backward's tile classes. At most 128 columns a warpgroup owns 64 keys of a block
#: (``split="keys"``); wider ones share the keys and split the columns of dK and dV.
BACKWARD_CLASSES = ((64, 64), (128, 128), (64, 256), (192, 128), (256, 256))

#: Consumer warpgroups of the backward kernel.
BACKWARD_GROUPS = 2

#: dS tiles in shared memory: one that the warpgroups read while they write the next.
DS_BUFFERS = 2


class _DqTile:
    """How the warpgroups of the backward share a dQ tile, in the pass that adds to it and in the one that reads it."""

    head_dim: int
    tile_m: int

    @property
    def dq_splits_rows(self) -> bool:
        """Whether the warpgroups split the rows of a dQ tile; else its columns."""
        return self.tile_m == WGMMA_ROWS * BACKWARD_GROUPS

    @property
    def dq_columns(self) -> int:
        """Columns of a warpgroup's part of a dQ tile; the part has 64 rows."""
        return self.head_dim if self.dq_splits_rows else self.head_dim // BACKWARD_GROUPS


@dataclass(frozen=True)
class BackwardSpec(Spec, _DqTile):
    """One compiled kernel of the main pass of the backward.

    Attributes:
        dtype: element type of q, k, v, dout and the gradients: ``"fp16"`` or ``"bf16"``.
        head_dim, head_dim_v: columns of the q and k tiles, and of the v and dout tiles.
        mask: as of `ForwardSpec`.
        tile_m: query rows of one step of the main loop.
        tile_n: keys of a block: 64 for each warpgroup, or 64 whose columns the warpgroups share.
        stages, stages_dout: q tiles, and dout tiles, held in shared memory at once.
        dq_stages: dQ tiles held in shared memory at once, on the way to their sums in global memory; with 0 another
            kernel makes dQ.
        deterministic: sums of dQ are added in a fixed order.
        softcap, score_mod, mask_mod, score_aux, mask_aux: as of `ForwardSpec`.
        derivative: ``"module:function"`` of the derivative of ``score_mod``.
    """

    kernel = "backward"

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    tile_m: int
    tile_n: int
    stages: int
    stages_dout: int
    dq_stages: int = 1
    deterministic: bool = False
    softcap: bool = False
    score_mod: str = ""
    derivative: str = ""
    mask_mod: str = ""
    score_aux: str = ""
    mask_aux: str = ""

    #: Of the switches that the other kernels have, those that are no choice here.
    warp_specialized = True
    qv = False
    pack_gqa = False

    @property
    def split_keys(self) -> bool:
        """Whether each warpgroup has keys of its own; else they share the keys and split the columns."""
        return self.tile_n == WGMMA_ROWS * self.consumer_warpgroups

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that multiply."""
        return BACKWARD_GROUPS

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return WARPGROUP_THREADS * (self.consumer_warpgroups + 1)

    @property
    def modified(self) -> bool:
        """Whether something changes the scores between the product and the softmax."""
        return self.softcap or bool(self.score_mod)

    @property
    def score_rows(self) -> int:
        """Query rows of the scores that one warpgroup holds."""
        return self.tile_m if self.split_keys else self.tile_m // self.consumer_warpgroups

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the tiles and barriers."""
        columns = self.head_dim + self.head_dim_v
        keys = self.tile_n * columns
        rows = self.tile_m * (self.stages * self.head_dim + self.stages_dout * self.head_dim_v)
        scores = self.tile_m * self.tile_n * DS_BUFFERS * (1 if self.split_keys else 2)
        float32 = self.tile_m * (self.stages + self.stages_dout + self.dq_stages * self.head_dim)
        return ELEMENT_BYTES[self.dtype] * (keys + rows + scores) + 4 * float32 + 1024

    @property
    def name(self) -> str:
        """Short unique name, e.g. ``backward_bf16_d128_causal_64x128x2x2_dq1``."""
        tile = f"{self.tile_m}x{self.tile_n}x{self.stages}x{self.stages_dout}"
        features = [f"dq{self.dq_stages}"]
        features += changes_in_name(self, "deterministic", "softcap")
        return "_".join((f"backward_{self.dtype}_{dims_in_name(self)}_{self.mask}_{tile}", *features))

    def validate(self) -> None:
        """Raise ``ValueError`` when no kernel can be compiled from this spec."""
        check_kind(self, BACKWARD_CLASSES)
        if self.tile_m not in (64, 128):
            raise ValueError(f"tile_m={self.tile_m}: allowed are 64 and 128")
        if self.tile_n not in (64, 128):
            raise ValueError(f"tile_n={self.tile_n}: allowed are 64 and 128")
        if not 0 <= self.dq_stages <= 2:
            raise ValueError(f"dq_stages={self.dq_stages}: allowed are 0 to 2")
        if self.deterministic and not self.dq_stages:
            raise ValueError("deterministic=True with dq_stages=0: there are no sums to order")
        for name in ("stages", "stages_dout"):
            if not 1 <= getattr(self, name) <= 4:
                raise ValueError(f"{name}={getattr(self, name)}: allowed are 1 to 4")
        # dK leaves through the place of dS, and of P where that is in shared memory too.
        room = self.tile_m * DS_BUFFERS * (1 if self.split_keys else 2)
        if self.head_dim > room:
            raise ValueError(f"head_dim={self.head_dim}, tile_m={self.tile_m}: dS has room for {room} columns of dK")
        _check_derivative(self)
        check_memory(self)


@dataclass(frozen=True)
class PrepareSpec(Spec):
    """One compiled kernel that runs before the backward's main pass: delta, and the LSE in log2 units.

    Attributes:
        dtype: element type of out and dout.
        head_dim_v: columns of the dout tiles of the main pass.
        tile_m: query rows of a block, those of a step of the main pass.
    """

    kernel = "prepare"

    dtype: str
    head_dim_v: int
    tile_m: int

    #: Threads of a block, and no tile in shared memory.
    threads = 256
    shared_bytes = 0

    @property
    def name(self) -> str:
        """Short unique name, e.g. ``prepare_bf16_v128_64``."""
        return f"prepare_{self.dtype}_v{self.head_dim_v}_{self.tile_m}"

    def validate(self) -> None:
        """Raise ``ValueError`` when no kernel can be compiled from this spec."""
        _check_columns(self, "head_dim_v", {columns for _, columns in BACKWARD_CLASSES})


@dataclass(frozen=True)
class FinishSpec(Spec, _DqTile):
    """One compiled kernel that runs after the backward's main pass: dQ from its float32 sums.

    Attributes:
        dtype: element type of dq.
        head_dim: columns of a dQ tile.
        tile_m: query rows of a dQ tile.
    """

    kernel = "finish"

    dtype: str
    head_dim: int
    tile_m: int

    @property
    def threads(self) -> int:
        """Threads of a block, as many as consumed in the main pass."""
        return WARPGROUP_THREADS * BACKWARD_GROUPS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the tile."""
        return ELEMENT_BYTES[self.dtype] * self.tile_m * self.head_dim + 1024

    @property
    def name(self) -> str:
        """Short unique name, e.g. ``finish_bf16_d64_128``."""
        return f"finish_{self.dtype}_d{self.head_dim}_{self.tile_m}"

    def validate(self) -> None:
        """Raise ``ValueError`` when no kernel can be compiled from this spec."""
        _check_columns(self, "head_dim", {columns for columns, _ in BACKWARD_CLASSES})


@dataclass(frozen=True)
class QueryGradientSpec(Spec):
    """One compiled kernel that makes dQ after a main pass that does not: by queries, so that no order can change it.

    Attributes:
        dtype: element type of q, k, v, dout and dq: ``"fp16"`` or ``"bf16"``.
        head_dim, head_dim_v: columns of the q, k and dq tiles, and of the v and dout tiles.
        mask: as of `ForwardSpec`.
        tile_m: query rows of a block, 64 for each consumer warpgroup.
        tile_n: keys of one step of the main loop.
        stages, stages_v: K tiles, and V tiles, held in shared memory at once.
        softcap, score_mod, derivative, mask_mod, score_aux, mask_aux: as of `BackwardSpec`.
    """

    kernel = "backward_dq"

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    tile_m: int = 128
    tile_n: int = 64
    stages: int = 2
    stages_v: int = 1
    softcap: bool = False
    score_mod: str = ""
    derivative: str = ""
    mask_mod: str = ""
    score_aux: str = ""
    mask_aux: str = ""

    #: Of the switches that the other kernels have, those that are no choice here.
    warp_specialized = True
    qv = False
    pack_gqa = False

    @property
    def causal(self) -> bool:
        """Whether the mask is the causal one."""
        return self.mask == "causal"

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that multiply."""
        return self.tile_m // WGMMA_ROWS

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return WARPGROUP_THREADS * (self.consumer_warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the tiles and barriers; dq takes the place of q."""
        rows = self.tile_m * (self.head_dim + self.head_dim_v)
        keys = self.tile_n * (self.stages * self.head_dim + self.stages_v * self.head_dim_v)
        return ELEMENT_BYTES[self.dtype] * (rows + keys) + 1024

    @property
    def name(self) -> str:
        """Short unique name, e.g. ``backward_dq_bf16_d256_causal_128x64x2x1``."""
        tile = f"{self.tile_m}x{self.tile_n}x{self.stages}x{self.stages_v}"
        features = changes_in_name(self, "softcap")
        return "_".join((f"backward_dq_{self.dtype}_{dims_in_name(self)}_{self.mask}_{tile}", *features))

    def validate(self) -> None:
        """Raise ``ValueError`` when no kernel can be compiled from this spec."""
        check_kind(self, BACKWARD_CLASSES)
        if self.tile_m not in (64, 128):
            raise ValueError(f"tile_m={self.tile_m}: allowed are 64 and 128")
        if self.mask == "blocks" and self.tile_m != BLOCK:
            raise ValueError(f"tile_m={self.tile_m}: with block masks tiles are {BLOCK} queries")
        if self.tile_n not in (32, 64):
            raise ValueError(f"tile_n={self.tile_n}: allowed are 32 and 64")
        for name in ("stages", "stages_v"):
            if not 1 <= getattr(self, name) <= 4:
                raise ValueError(f"{name}={getattr(self, name)}: allowed are 1 to 4")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages}: K of this step and of the one before are read at once: at least 2")
        _check_derivative(self)
        check_memory(self)


def _check_derivative(spec: Any) -> None:
    """Raise ``ValueError`` unless the score_mod has a derivative."""
    if bool(spec.score_mod) != bool(spec.derivative):
        raise ValueError(f"score_mod={spec.score_mod!r}, derivative={spec.derivative!r}: both or neither")


def _check_columns(spec: Any, name: str, columns: set[int]) -> None:
    """Raise ``ValueError`` for a dtype, or columns of one kind of tile, of which there are no kernels."""
    if spec.dtype not in ELEMENT_BYTES:
        raise ValueError(f"dtype={spec.dtype!r}: allowed are {', '.join(ELEMENT_BYTES)}")
    if getattr(spec, name) not in columns:
        raise ValueError(f"{name}={getattr(spec, name)}: the tile classes are {BACKWARD_CLASSES}")
