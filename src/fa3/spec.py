"""Specs: everything that is fixed when a kernel is compiled. Here those of the forward and of quantization.

A spec is a frozen dataclass of plain Python scalars, so that it is hashable, printable, and can be the
key of the store. Nothing here imports torch or the compiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

#: Rows of one WGMMA instruction: a consumer warpgroup owns this many query rows.
WGMMA_ROWS = 64

#: Threads of a warpgroup: WGMMA is issued, and registers are moved, by so many together.
WARPGROUP_THREADS = 128

#: Bytes that addresses and strides must be multiples of for TMA.
TMA_ALIGNMENT = 16

#: (head_dim, head_dim_v) of the tile classes. The real dims are bounds of a call: TMA fills the rest of a tile
#: with zeros and does not write what lies beyond the output.
TILE_CLASSES = ((64, 64), (96, 96), (128, 128), (64, 256), (192, 128), (192, 192), (256, 256))

#: Kinds of masks; see ``kernels/parts/mask.py``.
MASKS = ("full", "causal", "window", "blocks")

#: Queries and keys of one block of a block mask.
BLOCK = 128

#: Shared memory that one block may use on sm_90, in bytes (227 KB).
SHARED_MEMORY_PER_BLOCK = 232_448

#: Bytes of an element of each dtype that every kernel takes.
ELEMENT_BYTES = {"fp16": 2, "bf16": 2}

#: The dtype of q, k and v that only the forward takes.
FP8 = "e4m3"
#: The dtype that q and k may have beside a v of FP8.
INT8 = "int8"
INPUT_BYTES = {**ELEMENT_BYTES, FP8: 1}

#: Bytes of an element of out.
OUT_BYTES = 2

#: The tile classes of FP8.
FP8_CLASSES = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))

#: Fewest columns of the output of FP8 that are added to sums in float32 at once where there are no registers for all of
#: them, and columns up to which there are.
PART_COLUMNS, WHOLE_COLUMNS = 64, 128

#: Keys of one WGMMA instruction of FP8, which tiles are a multiple of.
FP8_KEYS = 32


class Spec:
    """What all specs share."""

    #: Name of the kernel, by which ``spec_from_dict`` and `fa3.kernels` tell them apart.
    kernel: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain dict of the fields, for JSON; ``spec_from_dict`` is the inverse."""
        return {"kernel": self.kernel, **dataclasses.asdict(cast(Any, self))}


@dataclass(frozen=True)
class ForwardSpec(Spec):
    """One compiled forward kernel.

    The seven fields from ``tile_m`` on are the *schedule*: how the work overlaps.

    Attributes:
        dtype: element type of q, k and v, or beside ``qk_dtype`` of v: ``"fp16"``, ``"bf16"`` or ``"e4m3"``.
        head_dim: columns of the q and k tiles.
        head_dim_v: columns of the v and out tiles.
        mask: ``"full"``: every key is seen; ``"causal"``: bottom-right aligned; ``"window"``: left and right bounds
            and a chunk, given at run time; ``"blocks"``: a list of key blocks for each block of queries.
        tile_m: query rows of a block, 64 for each consumer warpgroup.
        tile_n: keys of one step of the main loop.
        stages: K and V tiles held in shared memory at once.
        warp_specialized: loads are issued by a producer warp of their own, with register reallocation.
        pingpong: the warpgroups take turns, so that one's softmax runs under the other's products.
        overlap: inside a warpgroup the softmax of block j+1 runs under the PV product of block j.
        rescale_threshold: the softmax reference moves only when the running max outgrew it by more than
            this, in log2 units; 0 keeps it at the running max. Probabilities of e4m3 are scaled so that they reach its
            largest number then; at the first tile of keys they have more room.
        softcap: scores pass through ``cap * tanh(score / cap)``.
        pack_gqa: the query heads that share a K/V head are rows of one tile.
        qv: scores get ``qv · v`` added.
        score_mod, mask_mod: ``"module:function"`` of functions in CuTe DSL that change scores and hide keys, or empty.
        score_aux, mask_aux: the tensors they read: dtype letter and number of dims of each, e.g. ``"f1,i2"``.
        out_dtype: element type of out beside e4m3: ``"fp16"`` or ``"bf16"``; else empty, as ``dtype``.
        key_block: keys of a block of k, beside v of e4m3, that share a scale; with 0 there is one scale a head.
        value_blocks: v has a scale for each of these blocks, too.
        transpose_stages: v tiles of e4m3 in shared memory that wait for their transposition; with 0 v comes
            transposed.
        promote: every so many key tiles the output of e4m3, which the tensor core adds up with 14 bits or so, is added
            to sums in float32; 0: never.
        qk_dtype: element type of q and k where v is e4m3: ``"int8"``, or empty, as ``dtype``.
    """

    kernel = "forward"

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    tile_m: int
    tile_n: int
    stages: int
    warp_specialized: bool
    pingpong: bool
    overlap: bool
    rescale_threshold: float
    softcap: bool = False
    pack_gqa: bool = False
    qv: bool = False
    score_mod: str = ""
    mask_mod: str = ""
    score_aux: str = ""
    mask_aux: str = ""
    out_dtype: str = ""
    key_block: int = 0
    transpose_stages: int = 0
    promote: int = 0
    qk_dtype: str = ""
    value_blocks: bool = False

    @property
    def causal(self) -> bool:
        """Whether the mask is the causal one."""
        return self.mask == "causal"

    @property
    def fp8(self) -> bool:
        """Whether v is e4m3, and q and k, unless ``qk_dtype`` says otherwise."""
        return self.dtype == FP8

    @property
    def part_columns(self) -> int:
        """Columns of a part, as many as the key tile or a piece of it has keys, if that divides both."""
        if self.tile_n % PART_COLUMNS and self.head_dim_v % self.tile_n == 0 and self.tile_n > PART_COLUMNS:
            return self.tile_n
        return PART_COLUMNS

    @property
    def score_pieces(self) -> int:
        """Pieces of a key tile whose scores have the registers of parts; 0: they have registers of their own."""
        return self.tile_n // self.part_columns if self.tile_n % self.part_columns == 0 else 0

    @property
    def parts(self) -> int:
        """Parts of the columns of PV that are multiplied one after the other, each added to sums in float32."""
        return self.head_dim_v // self.part_columns if self.promote and self.head_dim_v > WHOLE_COLUMNS else 1

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
        return self._own_columns() > 0

    @property
    def out_columns(self) -> int:
        """Columns of an out tile that go through shared memory at once: all, or half if only that has room."""
        return self._own_columns() or self._columns_in_place_of_q()

    def _columns_in_place_of_q(self) -> int:
        # Twice as wide as an element of q, those of FP8's out take its place half by half.
        return self.head_dim_v // 2 if self.fp8 else self.head_dim_v

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the tiles and barriers."""
        return self._tile_bytes(self._own_columns())

    def _own_columns(self) -> int:
        whole, half = self.head_dim_v, self.head_dim_v // 2
        for columns in (whole,) if self.pack_gqa else (whole, half):
            if self._tile_bytes(columns) <= SHARED_MEMORY_PER_BLOCK:
                return columns
        return 0

    def _tile_bytes(self, own_columns: int) -> int:
        """Bytes of all tiles, with so many columns of out in a place of their own; with 0, out takes that of q."""
        element = INPUT_BYTES[self.dtype]
        kv = self.tile_n * (self.stages * (self.head_dim + self.head_dim_v) + self.transpose_stages * self.head_dim_v)
        qv = self.tile_m * self.head_dim_v if self.qv else 0
        rows = self.tile_m * (self.head_dim * element + own_columns * OUT_BYTES) if own_columns else self.q_out_bytes
        # 1 KB for barriers: the tiles after them begin at a multiple of it; FP8 takes a few ones beside them.
        return element * (kv + qv) + rows + (2048 if self.fp8 else 1024)

    @property
    def q_out_bytes(self) -> int:
        """Bytes of the q tiles where out takes their place."""
        return self.tile_m * max(self.head_dim * INPUT_BYTES[self.dtype], self._columns_in_place_of_q() * OUT_BYTES)

    @property
    def name(self) -> str:
        """Short unique name, e.g. ``forward_bf16_d128_causal_192x80x3_wpot8``."""
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
        tile = f"{self.tile_m}x{self.tile_n}x{self.stages}"
        features = changes_in_name(self, "softcap", "pack_gqa", "qv")
        if self.fp8:
            numbers = (("scale", self.key_block), ("vt", self.transpose_stages), ("add", self.promote))
            dtypes = (self.qk_dtype, self.out_dtype)
            features = [*filter(None, dtypes), *(f"{word}{n}" for word, n in numbers if n), *features]
            features += ["vscales"] if self.value_blocks else []
        schedule = f"{switches or 'serial'}{threshold}"
        return "_".join((f"forward_{self.dtype}_{dims_in_name(self)}_{self.mask}_{tile}_{schedule}", *features))

    def validate(self) -> None:
        """Raise ``ValueError`` when no kernel can be compiled from this spec."""
        self._check_fp8()
        if self.mask == "blocks" and (self.tile_m != BLOCK or BLOCK % self.tile_n):
            raise ValueError(
                f"tile_m={self.tile_m}, tile_n={self.tile_n}: with block masks tiles are {BLOCK} queries "
                f"and a divisor of {BLOCK} keys"
            )
        if self.pack_gqa and (self.mask == "blocks" or self.score_mod or self.mask_mod or self.qv):
            raise ValueError("pack_gqa=True: goes with no block mask, modification or qv")
        if self.tile_m not in (64, 128, 192, 256):
            raise ValueError(f"tile_m={self.tile_m}: allowed are 64, 128, 192 and 256 (1 to 4 consumer warpgroups)")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ValueError(f"tile_n={self.tile_n}: must be a multiple of 16 from 16 to 256")
        if not 1 <= self.stages <= 8:
            raise ValueError(f"stages={self.stages}: allowed are 1 to 8")
        if self.qv and self.stages < 2:
            raise ValueError(f"stages={self.stages}: qv needs V of this step and of the one before, so at least 2")
        if not self.warp_specialized and self.stages < 2:
            raise ValueError(f"stages={self.stages}: without a producer warp at least 2, one to read and one to fill")
        if self.pingpong and self.consumer_warpgroups < 2:
            raise ValueError(f"pingpong=True needs at least two consumer warpgroups: tile_m={self.tile_m}")
        if not 0 <= self.rescale_threshold <= 8:
            raise ValueError(f"rescale_threshold={self.rescale_threshold}: allowed are 0 to 8")
        check_memory(self)

    def _check_fp8(self) -> None:
        if not self.fp8:
            check_kind(self, TILE_CLASSES)
            for name in ("out_dtype", "key_block", "transpose_stages", "promote", "qk_dtype", "value_blocks"):
                if getattr(self, name):
                    raise ValueError(f"{name}={getattr(self, name)!r}: goes with dtype {FP8!r} alone")
            return
        check_kind(self, FP8_CLASSES, (FP8,))
        if self.out_dtype not in ELEMENT_BYTES:
            raise ValueError(f"out_dtype={self.out_dtype!r}: allowed beside {FP8} are {', '.join(ELEMENT_BYTES)}")
        if self.qk_dtype not in ("", INT8):
            raise ValueError(f"qk_dtype={self.qk_dtype!r}: allowed beside {FP8} are {INT8!r} and ''")
        if self.tile_n % FP8_KEYS:
            raise ValueError(f"tile_n={self.tile_n}: beside {FP8} must be a multiple of {FP8_KEYS}")
        if self.pack_gqa or self.qv:
            raise ValueError(f"pack_gqa={self.pack_gqa}, qv={self.qv}: go with no {FP8}")
        if not 0 <= self.transpose_stages <= 8:
            raise ValueError(f"transpose_stages={self.transpose_stages}: allowed are 0 to 8")
        if self.transpose_stages and not self.warp_specialized:
            raise ValueError("transpose_stages without warp_specialized: the producer's warps transpose")
        if self.key_block % self.tile_n:
            raise ValueError(f"key_block={self.key_block}: must be a multiple of tile_n={self.tile_n}, or 0")
        if self.value_blocks and not self.key_block:
            raise ValueError("value_blocks=True beside key_block=0: blocks of v are those of k")
        if self.parts > 1 and self.score_pieces > 2:
            raise ValueError(f"tile_n={self.tile_n}: in parts of head_dim_v={self.head_dim_v} at most 128 keys")
        if self.promote < 0 or (self.promote > 1 and self.parts > 1):
            allowed = "0 and 1" if self.parts > 1 else "0 and up"
            raise ValueError(f"promote={self.promote}: allowed beside head_dim_v={self.head_dim_v} are {allowed}")


#: Threads with 128 registers that fill half a multiprocessor.
HALF_OF_THREADS = 256


@dataclass(frozen=True)
class QuantizeSpec(Spec):
    """One compiled kernel that makes e4m3 of q, k or v, or int8 of q or k; `fa3.quantization` defines the result.

    A block of ``rows`` is the work of ``split`` thread blocks.

    Attributes:
        dtype: element type of the input, ``"fp16"`` or ``"bf16"``.
        head_dim: its columns, a multiple of 16 up to 256.
        rows: of a block, 64, 96 or 128; with ``scales="block"`` they share a scale.
        rotate: random signs and the Hadamard transform along the columns.
        rope: a rotary embedding before that: ``"fp32"`` or ``"same"``, the dtype of cos and sin; empty: none.
        interleaved: pairs of the embedding are columns (2i, 2i + 1), else (i, i + head_dim / 2).
        transpose: write V^T in the order of slots.
        scales: ``"block"``: of each block, in one pass; ``"amax"``: only add the block's amax to that of its head;
            ``"given"``: by the amax that such a pass left.
        power_of_two: round amax up, so that scales of what is not rotated are powers of two.
        out: what it becomes, ``"e4m3"``, or of q and k ``"int8"``.
    """

    kernel = "quantize"

    dtype: str
    head_dim: int
    rows: int = 128
    rotate: bool = False
    rope: str = ""
    interleaved: bool = False
    transpose: bool = False
    scales: str = "block"
    power_of_two: bool = False
    out: str = FP8

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: for this head and the next the largest values of warps, and in a cluster a barrier."""
        return 2 * 4 * self.warp_values + (16 if self.cluster > 1 else 0)

    @property
    def warp_values(self) -> int:
        """Words for the largest values of the warps of a cluster: a multiple of 32."""
        return -(-self.threads * self.cluster // 1024) * 32

    @property
    def held(self) -> int:
        """Elements of a unit, the work of a thread at a time: of a row, or with ``transpose`` 4 keys of 8 columns."""
        if self.transpose:
            return 32
        if self.head_dim in (192, 256) and not self.rope:
            return 64
        return 32 if self.head_dim % 32 == 0 else 16

    @property
    def piece(self) -> int:
        """Columns next to each other that a thread has.

        16 bytes of e4m3; or 8 where the transform cuts finer, and of wide rows with an embedding, whose elements then
        lie closer together for the threads of a warp.
        """
        if self.transpose or (self.rope and self.head_dim >= 128):
            return 8
        return 8 if self.head_dim % 64 and self.head_dim != 32 else 16

    @property
    def across(self) -> int:
        """Threads that share a row: thread j has pieces j, j + across, ... of it; of no meaning with ``transpose``."""
        return self.head_dim // self.held

    @property
    def exchanging(self) -> int:
        """Of those, the neighbours whose columns the Hadamard transform mixes: a power of two."""
        return self.across & -self.across

    @property
    def hadamard_block(self) -> int:
        """Columns that it mixes; 1 without it."""
        return self.held * self.exchanging if self.rotate else 1

    @property
    def units(self) -> int:
        """Units of a thread.

        Two of rows of less than 128 columns without an embedding, or of V^T, where that leaves whole warps.
        """
        units = self.rows * self.head_dim // self.held
        few = self.held <= 32 and (self.transpose or (self.head_dim < 128 and not self.rope))
        return 2 if few and units % 64 == 0 else 1

    @property
    def split(self) -> int:
        """Thread blocks that have an equal part of the rows each, so that two or more share a multiprocessor."""
        if self.transpose:
            return 1
        threads = self.rows * self.head_dim // (self.held * self.units)
        counts = (parts for parts in (1, 2, 3, 4, 6, 8) if self.rows % parts == 0)
        return next(parts for parts in counts if threads <= parts * self.most_threads)

    @property
    def most_threads(self) -> int:
        """Most threads of a thread block, as measured.

        With a rotary embedding two have the registers of a multiprocessor; of 96 rows smaller ones waste less of them.
        Of the widest rows, too many small blocks would wait for each other, or two large ones.
        """
        half = HALF_OF_THREADS
        if self.rope:
            if self.rows == 96 and self.head_dim <= 128:
                return half // 2
            return 2 * half if (self.rows, self.head_dim) == (128, 256) else half
        return half // 2 if (self.rows, self.head_dim) == (64, 256) else 3 * half // 2

    @property
    def cluster(self) -> int:
        """Of those, how many must find an amax together."""
        return self.split if self.scales == "block" else 1

    @property
    def working_threads(self) -> int:
        """Threads of a block that have units."""
        return self.rows * self.head_dim // (self.held * self.units * self.split)

    @property
    def threads(self) -> int:
        """Threads of a block, whole warps: of 96 rows and odd multiples of 16 columns the last 16 may have no unit."""
        return -(-self.working_threads // 32) * 32

    @property
    def name(self) -> str:
        """Short unique name, e.g. ``quantize_bf16_d128_128_block_rotate_ropefp32``."""
        switches = [
            name
            for name, on in (
                ("rotate", self.rotate),
                (f"rope{self.rope}", self.rope),
                ("interleaved", self.interleaved),
                ("transpose", self.transpose),
                ("pow2", self.power_of_two),
                (self.out, self.out != FP8),
            )
            if on
        ]
        return "_".join((f"quantize_{self.dtype}_d{self.head_dim}_{self.rows}_{self.scales}", *switches))

    def validate(self) -> None:
        """Raise ``ValueError`` when no kernel can be compiled from this spec."""
        for name, allowed in (
            ("dtype", tuple(ELEMENT_BYTES)),
            ("rows", (64, 96, 128)),
            ("rope", ("", "fp32", "same")),
            ("scales", ("block", "amax", "given")),
            ("out", (FP8, INT8)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed are {', '.join(map(repr, allowed))}")
        if self.head_dim % 16 or not 16 <= self.head_dim <= 256:
            raise ValueError(f"head_dim={self.head_dim}: must be a multiple of 16 from 16 to 256")
        if self.interleaved and not self.rope:
            raise ValueError("interleaved=True: pairs of a rotary embedding, but rope=''")
        if self.transpose and (self.rotate or self.rope):
            raise ValueError("transpose=True: V is neither rotated nor given a position")
        if self.transpose and self.scales == "amax":
            raise ValueError("transpose=True with scales='amax': nothing is written, so that there is no order")
        if self.out == INT8 and (self.transpose or self.power_of_two):
            raise ValueError(
                f"out={self.out!r}, transpose={self.transpose}, power_of_two={self.power_of_two}: the last two are of "
                f"v, which becomes {FP8!r}"
            )
        if self.power_of_two and self.scales == "amax":
            raise ValueError("power_of_two=True with scales='amax': the pass that makes scales rounds, not this one")


@dataclass(frozen=True)
class TransposeSpec(Spec):
    """One compiled kernel that turns a v of e4m3 in rows to V^T, of any shape.

    Attributes:
        warps: warps of a block, which have 32 columns each.
    """

    kernel = "transpose"

    warps: int = 4

    #: Dynamic shared memory.
    shared_bytes = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def name(self) -> str:
        """Short unique name, ``transpose_e4m3_4``."""
        return f"transpose_{FP8}_{self.warps}"

    def validate(self) -> None:
        """Raise ``ValueError`` when no kernel can be compiled from this spec."""
        if not 1 <= self.warps <= 8:
            raise ValueError(f"warps={self.warps}: allowed are 1 to 8")


def dims_in_name(spec: Any) -> str:
    """The head dims in a name."""
    return f"d{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"d{spec.head_dim}v{spec.head_dim_v}"


def changes_in_name(spec: Any, *switches: str) -> list[str]:
    """What a name says of the switches that are on, and of the modifications."""
    changes = [name for name in switches if getattr(spec, name)]
    for mod, aux in (
        (spec.score_mod, spec.score_aux),
        (getattr(spec, "derivative", ""), ""),
        (spec.mask_mod, spec.mask_aux),
    ):
        if mod:
            changes.append(mod + (f"({aux})" if aux else ""))
    return changes


def check_memory(spec: Any) -> None:
    """Raise ``ValueError`` for tiles that do not fit in shared memory."""
    if spec.shared_bytes > SHARED_MEMORY_PER_BLOCK:
        raise ValueError(
            f"{spec.name} needs {spec.shared_bytes} bytes of shared memory: at most {SHARED_MEMORY_PER_BLOCK}"
        )


def check_kind(spec: Any, classes: tuple[tuple[int, int], ...], dtypes: Iterable[str] = ELEMENT_BYTES) -> None:
    """Raise ``ValueError`` for a dtype, head dims or mask of which there are no kernels."""
    if spec.dtype not in dtypes:
        raise ValueError(f"dtype={spec.dtype!r}: allowed are {', '.join(dtypes)}")
    if (spec.head_dim, spec.head_dim_v) not in classes:
        raise ValueError(f"head_dim={spec.head_dim}, head_dim_v={spec.head_dim_v}: the tile classes are {classes}")
    mask = getattr(spec, "mask", "full")
    if mask not in MASKS:
        raise ValueError(f"mask={mask!r}: allowed are {', '.join(MASKS)}")
    if mask == "blocks" and not spec.mask_mod:
        raise ValueError("mask='blocks': blocks that are cut need a mask_mod")
