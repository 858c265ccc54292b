"""e4m3 and int8 with scales: rotary embedding, random signs, Walsh-Hadamard transform, rounding, in plain PyTorch.

This is the definition; the kernel that quantizes on Hopper GPUs is measured against it. In order, for x of a head:

1. RoPE, if asked for, in float32: ``x1' = x1 cos - x2 sin``, ``x2' = x2 cos + x1 sin``.
2. Incoherent processing, if asked for (Shah et al., arXiv:2407.08608, section 3.3): x becomes ``H D x`` with D random
   signs and H a Hadamard matrix, by butterflies in float32 (`rotate`). (H D q) · (H D k) = n (q · k): outliers of a
   column are spread over n of them, and scores stay what they are.
3. ``amax`` is the largest finite magnitude of a block of rows, of a head or of all, and at least `SMALLEST_AMAX`; for
   blocks of V rounded up to a power of two times 448 (`round_up_amax`).
4. e4m3 is ``x * (448 / amax)``, rounded to nearest even, saturating at 448; what is not finite becomes NaN.
5. The scale is ``amax * float32(1 / (448 sqrt(n)))``, n = 1 for what was not rotated, so that ``e4m3 * scale`` is x,
   rotated by an orthogonal matrix.

q and k may become int8 instead, v never: with 127 in the place of 448, ``x * (127 / amax)`` is rounded once to the
nearest integer, to even. int8 has no NaN, so what is not finite makes the scale of its block (head, tensor) NaN, and
with it all that is computed of the block, whose integers mean nothing.

Everything is float32: of values above ``FLT_MAX / n`` (1e36 for n = 256) sums overflow, and become NaN.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fa3.e4m3 import (
    E4M3_MAX,
    INT8_MAX,
    KEY_OF_SLOT,
    LARGEST,
    LARGEST_AMAX,
    SLOTS,
    SMALLEST_AMAX,
    round_up_bits,
    slots_of,
)

#: What `quantize_tensor` is: its arguments but the first by name.
Quantizer = Callable[..., tuple[Tensor, Tensor]]

E4M3 = torch.float8_e4m3fn

#: What q and k may become; v is always e4m3.
QK_DTYPES = {"e4m3": E4M3, "int8": torch.int8}

#: Rows of q, and of k and v, that may share a scale. 64 queries are those of a warpgroup, which takes one factor for
#: all of its scores; keys go by tiles.
BLOCK_ROWS = ((64, 128), (64, 96, 128))
#: In words, with what else a block may be.
BLOCK_CHOICES = "'head', 'tensor', or a pair (64 or 128 rows of q, 64, 96 or 128 rows of k and v)"

_MASK32 = 0xFFFFFFFF
MAX_SEED = 2**31 - 1


# Signs and the transform --------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def sign_words(seed: int, head_dim: int) -> tuple[int, ...]:
    """The random signs of a head as 8 signed 32-bit words: bit ``i % 32`` of word ``i // 32`` is 1 where -1.

    Column i has bit 31 of a 32-bit integer hash of i and the seed. Bits from ``head_dim`` on are 0.
    """
    words = [0] * 8
    for index in range(head_dim):
        h = (index * 0x9E3779B1 + seed * 0x85EBCA77 + 1) & _MASK32
        h ^= h >> 16
        h = h * 0x7FEB352D & _MASK32
        h ^= h >> 15
        h = h * 0x846CA68B & _MASK32
        h ^= h >> 16
        words[index // 32] |= (h >> 31) << index % 32
    return tuple(word - 2**32 if word >> 31 else word for word in words)


def signs(seed: int, head_dim: int, device: torch.device | None = None) -> Tensor:
    """The random signs of a head: (head_dim,), float32, each 1 or -1."""
    words = sign_words(seed, head_dim)
    # Whatever PyTorch's default dtype is.
    negative = (words[i // 32] >> i % 32 & 1 for i in range(head_dim))
    return torch.tensor([-1.0 if bit else 1.0 for bit in negative], dtype=torch.float32, device=device)


def _row_shape(head_dim: int) -> tuple[int, int, int]:
    """(c, g, w): element ``((c * G + g) * W + w) * 8 + b`` of a row is at (c, g, w, b), and g is never summed over.

    A thread of the kernel holds 8 c elements, 32 or 16, and w threads exchange theirs.
    """
    held = 32 if head_dim % 32 == 0 else 16
    threads = head_dim // held
    exchanging = threads & -threads
    return held // 8, threads // exchanging, exchanging


def hadamard_block(head_dim: int) -> int:
    """Elements that the transform mixes: all of them where ``head_dim`` is a power of two, else a divisor of it."""
    chunks, _, exchanging = _row_shape(head_dim)
    return 8 * chunks * exchanging


def _strides(size: int) -> Iterator[int]:
    stride = 1
    while stride < size:
        yield stride
        stride *= 2


def hadamard(x: Tensor) -> Tensor:
    """The Walsh-Hadamard transform of each row, not normalised: sums and differences, in a fixed order.

    Args:
        x: (..., head_dim) float32 (or float64), head_dim a multiple of 16 up to 256.

    Returns:
        The same shape. Blocks of `hadamard_block` elements are multiplied by a matrix of 1 and -1, whose square is
        that number times the identity; of a power of two it is Sylvester's matrix.
    """
    shape = x.shape
    chunks, groups, exchanging = _row_shape(shape[-1])
    x = x.reshape(*shape[:-1], chunks, groups, exchanging, 8)
    # A stage adds element i and element i + stride of an axis: first within 8, then across threads, then across chunks.
    for axis, size in ((-1, 8), (-2, exchanging), (-4, chunks)):
        for stride in _strides(size):
            lower, upper = x.unflatten(axis, (size // (2 * stride), 2, stride)).unbind(axis - 1)
            x = torch.stack([lower + upper, lower - upper], dim=axis - 1).flatten(axis - 2, axis)
    return x.reshape(shape)


def rope_rows(
    x: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool = False, first_position: int = 0, transposed: bool = False
) -> Tensor:
    """Rotary embedding of every row, in float32 (float64 for such x), not rounded afterwards.

    Args:
        x: (batch, seqlen, heads, head_dim).
        rope: cos and sin, each (positions, head_dim / 2).
        interleaved: pairs are (2i, 2i + 1), else (i, i + head_dim / 2).
        first_position: position of row 0, so that row i reads row ``first_position + i`` of cos and sin.
        transposed: rotate back, by the transposed matrix; where cos and sin are of angles, that is the inverse.
    """
    x = x if x.dtype is torch.float64 else x.float()
    rows = slice(first_position, first_position + x.shape[1])
    cos, sin = (table[rows, None].to(x.dtype) for table in rope)
    if transposed:
        sin = -sin
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)


# Blocks of rows -----------------------------------------------------------------------------------------------------


def is_block(block: Any) -> bool:
    """Whether so many (rows of q, rows of k and v) may share a scale."""
    return len(block) == 2 and all(
        isinstance(rows, numbers.Integral) and rows in allowed for rows, allowed in zip(block, BLOCK_ROWS, strict=True)
    )


#: With more keys than this, partial outputs of e4m3 attention are added in float32, unless the call says. The tensor
#: core drops what lies below 14 bits or so of its sums, always towards 0: of 2048 values around 1 it loses some
#: percent, as many as rounding them to e4m3 does, and of more keys more.
TWO_LEVEL_KEYS = 2048


def default_block(head_dim: int, two_level: bool = False) -> tuple[int, int]:
    """(rows of q, rows of k and v) that share a scale unless a caller says otherwise.

    Keys as the fastest kernel for this head dim takes them at a time, or a multiple of it; with ``two_level`` the
    fastest one that adds partial outputs in float32.
    """
    if two_level:
        return (64, 96) if head_dim <= 64 else (64, 128)
    return (64, 96) if 64 < head_dim <= 128 else (64, 128)


# Scales and rounding ------------------------------------------------------------------------------------------------


def _amax(x: Tensor, rows: int | str, not_finite: float) -> Tensor:
    """Largest magnitudes of (batch, seqlen, heads, d), that of NaN and Inf as said, 0 or NaN.

    (batch, heads, blocks), or (batch, heads).
    """
    batch, seqlen, heads, _ = x.shape
    of_rows = torch.where(x.isfinite(), x.abs(), not_finite).amax(dim=-1)
    if isinstance(rows, int):
        blocks = -(-seqlen // rows)
        padded = F.pad(of_rows, (0, 0, 0, blocks * rows - seqlen))
        return padded.view(batch, blocks, rows, heads).amax(dim=2).transpose(1, 2)
    # One more row of zeros, so that there is a largest one of no rows.
    of_heads = F.pad(of_rows, (0, 0, 0, 1)).amax(dim=1)
    return of_heads if rows == "head" or not of_heads.numel() else of_heads.amax().expand(batch, heads)


def round_up_amax(amax: Tensor) -> Tensor:
    """The smallest power of two times 448 that is at least ``amax``, but not above `LARGEST_AMAX`; a normal float32.

    Kernels multiply probabilities by a block's scale of V over the largest of its head before they round them to e4m3:
    a power of two moves them to other exponents and adds no rounding of its own. q and k are better off without: the
    largest value of a block becomes 448, of which nothing is rounded off.
    """
    return round_up_bits(amax.clamp_max(LARGEST_AMAX).view(torch.int32)).view(torch.float32)


def _of_rows(scale: Tensor, rows: int, seqlen: int) -> Tensor:
    """Scales of blocks or heads as a factor of (batch, seqlen, heads, d)."""
    if scale.dim() == 2:
        return scale[:, None, :, None]
    return scale.repeat_interleave(rows, dim=2)[:, :, :seqlen].transpose(1, 2).unsqueeze(-1)


def to_e4m3(x: Tensor) -> Tensor:
    """Rounded to nearest even and saturated at 448, as the GPU's conversion does; what is not finite becomes NaN."""
    saturated = x.clamp(-E4M3_MAX, E4M3_MAX)
    return torch.where(x.isfinite(), saturated, torch.nan).to(E4M3)


def to_int8(x: Tensor, factor: Tensor) -> Tensor:
    """``x * factor`` rounded once, to nearest even, within -127 to 127; what is not finite becomes 0."""
    # Products of two float32 are exact in float64.
    product = (x.double() * factor.double()).round().clamp(-INT8_MAX, INT8_MAX)
    return torch.where(product.isfinite(), product, 0.0).to(torch.int8)


def scale_factor(rotated_block: int, out: str = "e4m3") -> float:
    """``1 / (448 sqrt(n))`` rounded to float32: what amax is multiplied by to give the scale; n is 1 if not rotated.

    Of int8 with 127.
    """
    return torch.tensor(1.0 / (LARGEST[out] * math.sqrt(rotated_block)), dtype=torch.float32).item()


def quantize_tensor(
    x: Tensor,
    *,
    rows: int | str,
    rotate: bool = False,
    seed: int = 0,
    rope: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
    first_position: int = 0,
    transpose: bool = False,
    power_of_two: bool = False,
    out: str = "e4m3",
) -> tuple[Tensor, Tensor]:
    """Quantize q, k or v to e4m3, or q or k to int8; the arguments are taken as checked.

    Args:
        x: (batch, seqlen, heads, d) fp16, bf16 or fp32, any strides; d a multiple of 16 up to 256.
        rows: so many rows of a head share a scale, 64, 96 or 128; or ``"head"``: all of them; or ``"tensor"``: one
            scale for the whole of x.
        rotate: random signs and the Hadamard transform along d.
        seed: of the signs, 0 to ``2**31 - 1``.
        rope: (cos, sin), each (positions, d / 2), fp16, bf16 or fp32, rotate each row first; see `rope_rows`.
        interleaved: which elements make a pair there.
        first_position: position of row 0 there.
        transpose: return V^T in the order of `transposed`.
        power_of_two: round amax up, so that scales (of what is not rotated) are powers of two.
        out: ``"e4m3"`` or ``"int8"``, which goes with no ``transpose`` or ``power_of_two``: those are of v.

    Returns:
        Values (batch, seqlen, heads, d), contiguous, or with ``transpose`` (batch, heads, d, round_up(seqlen, 16)); and
        scales, float32: (batch, heads, ceil(seqlen / rows)), contiguous, or (batch, heads), which of ``"tensor"`` may
        be one number expanded.
    """
    head_dim = x.shape[-1]
    values = x.float() if rope is None else rope_rows(x, rope, interleaved, first_position)
    if rotate:
        values = hadamard(values * signs(seed, head_dim, x.device))
    int8 = out == "int8"
    amax = _amax(values, rows, math.nan if int8 else 0.0).clamp_min(SMALLEST_AMAX)
    if power_of_two:
        amax = round_up_amax(amax)
    # torch.div: a number over a tensor would be the tensor's reciprocal times the number, which rounds twice.
    inverse = torch.div(torch.full_like(amax, LARGEST[out]), amax)
    factor = _of_rows(inverse, rows if isinstance(rows, int) else 0, x.shape[1])
    quantized = to_int8(values, factor) if int8 else to_e4m3(values * factor)
    scale = amax * scale_factor(hadamard_block(head_dim) if rotate else 1, out)
    return transposed(quantized) if transpose else quantized.contiguous(), scale.contiguous()


# V^T ----------------------------------------------------------------------------------------------------------------


def transposed(v: Tensor) -> Tensor:
    """V^T as the kernels read it.

    Args:
        v: e4m3 (batch, seqlen, heads, d).

    Returns:
        e4m3 (batch, heads, d, round_up(seqlen, 16)), contiguous: the keys of each group of 16 in the order
        `KEY_OF_SLOT`, and zeros where a key beyond the last would be.
    """
    seqlen = v.shape[1]
    # Bytes: PyTorch moves those on every device.
    keys = F.pad(v.view(torch.uint8).permute(0, 2, 3, 1), (0, -seqlen % SLOTS)).unflatten(-1, (-1, SLOTS))
    return keys[..., list(KEY_OF_SLOT)].flatten(-2).contiguous().view(v.dtype)


def rows_of_transposed(v: Tensor, seqlen: int) -> Tensor:
    """The V that `transposed` made ``v`` (batch, heads, d, slots) of: (batch, seqlen, heads, d), contiguous."""
    slot_of_key = sorted(range(SLOTS), key=KEY_OF_SLOT.__getitem__)
    keys = v.view(torch.uint8).unflatten(-1, (-1, SLOTS))[..., slot_of_key].flatten(-2)
    return keys[..., :seqlen].permute(0, 3, 1, 2).contiguous().view(v.dtype)


def dequantize(values: Tensor, scale: Tensor | None, rows: int = 0) -> Tensor:
    """``values * scale`` in float32.

    Args:
        values: e4m3 or int8 (batch, seqlen, heads, d).
        scale: float32 (batch, heads), or (batch, heads, blocks) of ``rows`` rows each; ``None`` is 1.
    """
    return values.float() if scale is None else values.float() * _of_rows(scale, rows, values.shape[1])


# q, k and v together ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class QuantizedQKV:
    """q, k and v in 8 bits with their scales, as `fa3.quantize_qkv` makes them, for `fa3.flash_attn_quantized_func`.

    Attributes:
        q: e4m3 or int8 (batch, seqlen_q, heads_q, head_dim).
        k: (batch, seqlen_k, heads_kv, head_dim), in the dtype of q.
        v: e4m3 (batch, seqlen_k, heads_kv, head_dim_v); or V^T in the order of `transposed`, (batch, heads_kv,
            head_dim_v, round_up(seqlen_k, 16)).
        q_scale: float32 (batch, heads_q, ceil(seqlen_q / block[0])), or (batch, heads_q).
        k_scale, v_scale: float32 (batch, heads_kv, ceil(seqlen_k / block[1])), or (batch, heads_kv). A v_scale that is
            one scale a head, expanded to all its blocks, costs the kernels least.
        v_scale_max: float32 (batch, heads_kv), the largest v_scale of each head; ``None`` without blocks.
        block: (rows of q, rows of k and v) that share a scale; ``"head"``: one scale a head; ``"tensor"``: one in all.
        v_layout: ``"row"`` or ``"transposed"``.
        seed: of the random signs of q and k; ``None`` where they were not rotated.

    Raises:
        ValueError, TypeError: the tensors do not fit each other or the description.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    v_scale_max: Tensor | None
    block: tuple[int, int] | str
    v_layout: str = "row"
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.v_layout not in ("row", "transposed"):
            raise ValueError(f"v_layout={self.v_layout!r}: allowed are 'row' and 'transposed'")
        if isinstance(self.block, str):
            if self.block not in ("head", "tensor"):
                raise ValueError(f"block={self.block!r}: allowed are {BLOCK_CHOICES}")
        elif not isinstance(self.block, tuple):
            raise TypeError(f"block={self.block!r}: must be {BLOCK_CHOICES}, a tuple, not {type(self.block).__name__}")
        elif not is_block(self.block):
            raise ValueError(f"block={self.block!r}: allowed are {BLOCK_CHOICES}")
        if self.seed is not None:
            if isinstance(self.seed, bool) or not isinstance(self.seed, int):
                raise TypeError(f"seed={self.seed!r}: must be an int or None, not {type(self.seed).__name__}")
            if not 0 <= self.seed <= MAX_SEED:
                raise ValueError(f"seed={self.seed}: allowed are 0 to {MAX_SEED}, and None")
        for name in ("q", "k", "v"):
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
            allowed = (E4M3,) if name == "v" else tuple(QK_DTYPES.values())
            if tensor.dtype not in allowed:
                raise TypeError(f"{name} has dtype {tensor.dtype}: must be {' or '.join(map(str, allowed))}")
            if tensor.dim() != 4:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must have 4 dims")
        if self.q.dtype != self.k.dtype:
            raise TypeError(f"q and k have dtypes {self.q.dtype} and {self.k.dtype}: must be the same")
        batch, seqlen_q, heads_q, head_dim = self.q.shape
        _, seqlen_k, heads_kv, _ = self.k.shape
        head_dim_v = self.v.shape[2 if self.v_layout == "transposed" else 3]
        shapes = {
            "k": (batch, seqlen_k, heads_kv, head_dim),
            "v": (batch, seqlen_k, heads_kv, head_dim_v)
            if self.v_layout == "row"
            else (batch, heads_kv, head_dim_v, slots_of(seqlen_k)),
            "q_scale": (batch, heads_q, *self._blocks(seqlen_q, 0)),
            "k_scale": (batch, heads_kv, *self._blocks(seqlen_k, 1)),
            "v_scale": (batch, heads_kv, *self._blocks(seqlen_k, 1)),
        }
        if isinstance(self.block, tuple):
            shapes["v_scale_max"] = (batch, heads_kv)
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor of shape {shape}, not {type(tensor).__name__}")
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}: must be {shape}, by q, k, block and v_layout"
                )
            if name not in ("k", "v") and tensor.dtype is not torch.float32:
                raise TypeError(f"{name} has dtype {tensor.dtype}: must be torch.float32")
            if tensor.device != self.q.device:
                raise ValueError(f"{name} is on device {tensor.device}, q on {self.q.device}: must be the same")
        if self.v_scale_max is not None and "v_scale_max" not in shapes:
            raise ValueError(f"v_scale_max is given beside block={self.block!r}: must be None but with blocks of rows")

    def _blocks(self, seqlen: int, of_keys: int) -> tuple[int, ...]:
        return (-(-seqlen // self.block[of_keys]),) if isinstance(self.block, tuple) else ()

    def __getstate__(self) -> dict[str, Any]:
        # As bytes: PyTorch's pickle of an e4m3 tensor fails, torch.save of one does not.
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        e4m3 = [name for name in ("q", "k", "v") if state[name].dtype is E4M3]
        return state | {name: state[name].view(torch.uint8) for name in e4m3}

    def __setstate__(self, state: dict[str, Any]) -> None:
        e4m3 = [name for name in ("q", "k", "v") if state[name].dtype is torch.uint8]
        self.__dict__.update(state | {name: state[name].view(E4M3) for name in e4m3})

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> QuantizedQKV:
        """The same on a device: every tensor by `torch.Tensor.to`."""

        def move(x: Tensor) -> Tensor:
            if x.dim() and x.stride(-1) == 0:
                # One scale for all blocks of a head stays one.
                return x[..., :1].to(device, non_blocking=non_blocking).expand(x.shape)
            return x.to(device, non_blocking=non_blocking)

        moved: dict[str, Any] = {
            field.name: move(value) for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)

    @property
    def qk_dtype(self) -> str:
        """What q and k are: ``"e4m3"`` or ``"int8"``."""
        return next(name for name, dtype in QK_DTYPES.items() if dtype is self.q.dtype)

    @property
    def head_dim(self) -> int:
        """Columns of q and k."""
        return self.q.shape[3]

    @property
    def head_dim_v(self) -> int:
        """Columns of v."""
        return self.v.shape[3 if self.v_layout == "row" else 2]

    @property
    def seqlen_q(self) -> int:
        """Queries of each sequence."""
        return self.q.shape[1]

    @property
    def seqlen_k(self) -> int:
        """Keys of each sequence."""
        return self.k.shape[1]

    @property
    def incoherent(self) -> bool:
        """q and k were multiplied by random signs and a Hadamard matrix."""
        return self.seed is not None

    @property
    def q_block(self) -> int:
        """Rows of q that share a scale; 0 where all of a head do."""
        return self.block[0] if isinstance(self.block, tuple) else 0

    @property
    def k_block(self) -> int:
        """Rows of k, and of v, that share a scale; 0 where all of a head do."""
        return self.block[1] if isinstance(self.block, tuple) else 0

    def dequantize(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v in float32, v in rows. q and k stay rotated, which changes no score."""
        v = self.v if self.v_layout == "row" else rows_of_transposed(self.v, self.seqlen_k)
        return (
            dequantize(self.q, self.q_scale, self.q_block),
            dequantize(self.k, self.k_scale, self.k_block),
            dequantize(v, self.v_scale, self.k_block),
        )

    def with_keys_of(self, other: QuantizedQKV) -> QuantizedQKV:
        """The queries of this one with the keys and values of another: new tokens against a cache, say.

        Positions of a rotary embedding are those that each was quantized with.

        Raises:
            TypeError: ``other`` is no `QuantizedQKV`.
            ValueError: the two do not belong together: other signs or none, another head_dim or qk_dtype, or one of
                them with scales of blocks and the other without.
        """
        if not isinstance(other, QuantizedQKV):
            raise TypeError(f"other must be a fa3.QuantizedQKV, not {type(other).__name__}")
        if self.seed != other.seed:
            raise ValueError(
                f"seed={self.seed} of the queries, seed={other.seed} of the keys (None: not incoherent): must be the "
                "same, or scores mean nothing"
            )
        if self.head_dim != other.head_dim:
            raise ValueError(f"head_dim is {self.head_dim} of the queries, {other.head_dim} of the keys: must be equal")
        if self.qk_dtype != other.qk_dtype:
            raise ValueError(
                f"qk_dtype={self.qk_dtype!r} of the queries, {other.qk_dtype!r} of the keys: must be the same"
            )
        if isinstance(self.block, tuple) != isinstance(other.block, tuple):
            raise ValueError(
                f"block={self.block!r} of the queries, {other.block!r} of the keys: both or none in blocks"
            )
        block: tuple[int, int] | str = "head"
        if isinstance(self.block, tuple) and isinstance(other.block, tuple):
            block = (self.block[0], other.block[1])
        return replace(other, q=self.q, q_scale=self.q_scale, block=block)


def quantize_qkv(
    quantize: Quantizer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
    seed: int | None = None,
    block: tuple[int, int] | str = "head",
    v_layout: str = "row",
    v_of_head: bool = False,
    qk_dtype: str = "e4m3",
) -> QuantizedQKV:
    """q, k and v by a quantizer of tensors; the arguments are those of `fa3.quantize_qkv`, taken as checked.

    With ``v_of_head`` all blocks of v have one scale, that of their head, which is what ``block=None`` means for v: the
    scale of a block becomes part of its probabilities, as its ratio to the largest of the head, and where one block of
    v is thousands of times as large as the others that leaves no probabilities of theirs. e4m3 has exponents of its
    own.
    """
    of_q, of_k = (block, block) if isinstance(block, str) else block
    rotation = {
        "rotate": seed is not None, "seed": seed or 0, "rope": rope, "interleaved": interleaved, "transpose": False,
        "power_of_two": False, "out": qk_dtype,
    }  # fmt: skip
    first = 0 if rope is None else k.shape[1] - q.shape[1]
    q_values, q_scale = quantize(q, rows=of_q, first_position=first, **rotation)
    k_values, k_scale = quantize(k, rows=of_k, first_position=0, **rotation)
    blocks = isinstance(block, tuple)
    v_values, v_scale = quantize(
        v, rows="head" if v_of_head else of_k, rotate=False, seed=0, rope=None, interleaved=False, first_position=0,
        transpose=v_layout == "transposed", power_of_two=blocks and not v_of_head, out="e4m3",
    )  # fmt: skip
    v_scale_max = None
    if v_of_head and isinstance(of_k, int):
        v_scale_max, v_scale = v_scale, v_scale[..., None].expand(-1, -1, -(-v.shape[1] // of_k))
    elif blocks:
        v_scale_max = v_scale.amax(dim=-1) if v_scale.shape[-1] else v_scale.new_zeros(v_scale.shape[:2])
    return QuantizedQKV(q_values, k_values, v_values, q_scale, k_scale, v_scale, v_scale_max, block, v_layout, seed)
