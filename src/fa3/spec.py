"""Specs: everything that is fixed when a kernel is compiled.

A spec is a frozen dataclass of plain Python scalars, so that it is hashable, printable, and can be the
key of the store. Nothing here imports torch or the compiler.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

#: Rows of one WGMMA instruction: a consumer warpgroup owns this many query rows.
WGMMA_ROWS = 64

#: Threads of a warpgroup: WGMMA is issued, and registers are moved, by so many together.
WARPGROUP_THREADS = 128

#: Bytes that addresses and strides must be multiples of for TMA.
TMA_ALIGNMENT = 16

#: Head dims that have a tile class, and so kernels.
HEAD_DIM_CLASSES = (64, 128, 256)

#: Shared memory that one block may use on sm_90, in bytes (227 KB).
SHARED_MEMORY_PER_BLOCK = 232_448

#: Bytes of an element of each dtype that a kernel takes.
ELEMENT_BYTES = {"fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class ForwardSpec:
    """One compiled forward kernel.

    The last seven fields are the *schedule*: how the work overlaps.

    Attributes:
        dtype: element type of q, k, v and out: ``"fp16"`` or ``"bf16"``.
        head_dim: columns of the q and k tiles.
        head_dim_v: columns of the v and out tiles.
        causal: bottom-right aligned causal mask.
        tile_m: query rows of a block, 64 for each consumer warpgroup.
        tile_n: keys of one step of the main loop.
        stages: K and V tiles held in shared memory at once.
        warp_specialized: loads are issued by a producer warp of their own, with register reallocation.
        pingpong: the warpgroups take turns, so that one's softmax runs under the other's products.
        overlap: inside a warpgroup the softmax of block j+1 runs under the PV product of block j.
        rescale_threshold: the softmax reference moves only when the running max outgrew it by more than
            this, in log2 units; 0 keeps it at the running max.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    tile_m: int
    tile_n: int
    stages: int
    warp_specialized: bool
    pingpong: bool
    overlap: bool
    rescale_threshold: float

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that multiply and do softmax."""
        return self.tile_m // WGMMA_ROWS

    @property
    def threads(self) -> int:
        """Threads of one block; the producer has a whole warpgroup, since registers move by warpgroup."""
        return WARPGROUP_THREADS * (self.consumer_warpgroups + int(self.warp_specialized))

    @property
    def out_has_own_tile(self) -> bool:
        """Whether out tiles have shared memory of their own, so that q of the next tile need not wait for them."""
        return self._tile_bytes(own_out=True) <= SHARED_MEMORY_PER_BLOCK

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the tiles and barriers."""
        return self._tile_bytes(self.out_has_own_tile)

    def _tile_bytes(self, own_out: bool) -> int:
        kv = self.stages * self.tile_n * (self.head_dim + self.head_dim_v)
        q, out = self.tile_m * self.head_dim, self.tile_m * self.head_dim_v
        # 1 KB for barriers: the tiles after them begin at a multiple of it.
        return ELEMENT_BYTES[self.dtype] * (kv + (q + out if own_out else max(q, out))) + 1024

    @property
    def name(self) -> str:
        """Short unique name, e.g. ``forward_bf16_d128_causal_192x80x3_wpot8``."""
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        switches = "".join(
            letter
            for letter, on in (
                ("w", self.warp_specialized),
                ("p", self.pingpong),
                ("o", self.overlap),
            )
            if on
        )
        threshold = f"t{self.rescale_threshold:g}"
        mask = "causal" if self.causal else "full"
        tile = f"{self.tile_m}x{self.tile_n}x{self.stages}"
        return f"forward_{self.dtype}_{dims}_{mask}_{tile}_{switches or 'serial'}{threshold}"

    def validate(self) -> None:
        """Raise ``ValueError`` when no kernel can be compiled from this spec."""
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"dtype={self.dtype!r}: allowed are {', '.join(ELEMENT_BYTES)}")
        for field in ("head_dim", "head_dim_v"):
            if getattr(self, field) not in HEAD_DIM_CLASSES:
                raise ValueError(f"{field}={getattr(self, field)}: the tile classes are {HEAD_DIM_CLASSES}")
        if self.head_dim != self.head_dim_v:
            raise ValueError(f"head_dim={self.head_dim}, head_dim_v={self.head_dim_v}: must be equal")
        if self.tile_m not in (64, 128, 192, 256):
            raise ValueError(f"tile_m={self.tile_m}: allowed are 64, 128, 192 and 256 (1 to 4 consumer warpgroups)")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ValueError(f"tile_n={self.tile_n}: must be a multiple of 16 from 16 to 256")
        if not 1 <= self.stages <= 8:
            raise ValueError(f"stages={self.stages}: allowed are 1 to 8")
        if not self.warp_specialized and self.stages < 2:
            raise ValueError(f"stages={self.stages}: without a producer warp at least 2, one to read and one to fill")
        if self.pingpong and self.consumer_warpgroups < 2:
            raise ValueError(f"pingpong=True needs at least two consumer warpgroups: tile_m={self.tile_m}")
        if not 0 <= self.rescale_threshold <= 8:
            raise ValueError(f"rescale_threshold={self.rescale_threshold}: allowed are 0 to 8")
        if self.shared_bytes > SHARED_MEMORY_PER_BLOCK:
            raise ValueError(
                f"{self.name} needs {self.shared_bytes} bytes of shared memory: at most {SHARED_MEMORY_PER_BLOCK}"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain dict of the fields, for JSON; ``spec_from_dict`` is the inverse."""
        return {"kernel": "forward", **dataclasses.asdict(self)}


def spec_from_dict(fields: dict[str, Any]) -> ForwardSpec:
    """Rebuild a spec from ``as_dict``. Raises ``ValueError`` for an unknown kernel or unknown fields."""
    fields = dict(fields)
    kernel = fields.pop("kernel", None)
    if kernel != "forward":
        raise ValueError(f"kernel={kernel!r}: known kernels are 'forward'")
    try:
        return ForwardSpec(**fields)
    except TypeError as error:
        raise ValueError(f"not the fields of a ForwardSpec: {sorted(fields)}") from error
