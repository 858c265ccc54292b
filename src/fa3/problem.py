"""The checked description of one attention call, and every complaint about a bad one.

A ``Problem`` is plain numbers: it keeps no tensor alive, hashes, prints, and can be made without a GPU.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa3.mods import AUX_DTYPES, BlockMask, MaskMod, ScoreMod, check_sizes
from fa3.options import OUT_DTYPES, Options, fp8_of, is_fp8
from fa3.quantization import is_block
from fa3.scales import check_scale_kinds, describe_fp8, refuse_transposed
from fa3.tensor_checks import check_device, check_shape, check_strides, check_tensors, listed

#: fa3's names of the element types that the API takes.
DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3",
}

#: What q and k may be where v is e4m3.
_INT8 = torch.int8

#: Largest head dim of q and k.
MAX_HEAD_DIM = 256

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling

# The smallest float32 above 0, and half of the largest: the kernels multiply the scale by log2(e).
_MIN_SCALE_FLOAT32 = 2.0**-149
_MAX_SCALE_FLOAT32 = torch.finfo(torch.float32).max / 2
# They also divide by softcap, so its inverse must not overflow.
_MIN_SOFTCAP_FLOAT32 = torch.finfo(torch.float32).tiny

_NO_QV = "qv goes with 16 bits and more, its products would have other scales than those of q and k"

_SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def max_head_dim_v(head_dim: int) -> int:
    """Largest head dim of v beside ``head_dim``: narrow q and k leave room for wide values."""
    return 512 if head_dim <= 64 else 256


def default_softmax_scale(head_dim: int) -> float:
    """``1 / sqrt(head_dim)``, what ``softmax_scale=None`` means."""
    return float(head_dim**-0.5)


# Window and chunk of a call without either.
_OPEN = (-1, -1, 0)


@dataclass(frozen=True)
class Problem:
    """One forward attention call.

    Attributes:
        batch: sequences.
        seqlen_q: queries of each sequence.
        seqlen_k: keys (and values) of each sequence.
        heads_q: query heads, a multiple of ``heads_kv``; consecutive query heads share a K/V head.
        heads_kv: key and value heads.
        head_dim: columns of q and k, a multiple of 8 up to 256.
        head_dim_v: columns of v and out, a multiple of 8 up to 512 where ``head_dim <= 64``, else up to 256.
        dtype: ``"fp16"``, ``"bf16"``, ``"fp32"``, ``"fp64"`` or ``"e4m3"``, whose head dims are multiples of 16 up to
            256.
        softmax_scale: factor on q·k before the softmax, finite and positive, for all but fp64 also in float32.
        causal: bottom-right aligned: query i sees key j when ``j <= i + seqlen_k - seqlen_q``.
        return_lse: the call also wants the log-sum-exp of each row.
        window_left, window_right: query i, at position ``p = i + seqlen_k - seqlen_q``, sees keys from p - left
            to p + right; -1 is open, and so is in effect a window wider than the sequences. 0 on the right where
            ``causal``.
        attention_chunk: 0, or query i sees only keys of its chunk: from ``c * floor(p / c)``, c of them.
        softcap: 0, or scaled scores s become ``softcap * tanh(s / softcap)``.
        sink: a further logit a head, without a value, enters the normaliser and the LSE.
        qv: scores are ``q · k + qv · v``.
        pack_gqa: query heads that share a K/V head share tiles; ``None`` leaves the choice to the plan.
        sm_margin: multiprocessors to leave free.
        score_mod, mask_mod: ``"module:function"`` of the CuTe DSL twins of modifications, or empty.
        score_aux, mask_aux: dtype letter and dims of the tensors they read, e.g. ``("f1", "i2")``.
        block_sparse: a `fa3.mods.BlockMask` says which blocks to visit.
        out_dtype: of e4m3, ``"bf16"`` or ``"fp16"``; empty for all others, whose out has their dtype.
        q_block, k_block: of e4m3, rows of q (64 or 128), and of k and v (64, 96 or 128), that share a scale; 0, both of
            them: all of a head do.
        v_blocks: v has a scale for each block of ``k_block``; else one a head.
        v_transposed: of e4m3, v is V^T with keys in the order of `fa3.quantization.transposed`.
        two_level: of e4m3, partial outputs are added in float32; ``None`` leaves the choice to the plan.
        qk_dtype: ``"int8"`` where q and k are that, beside v of e4m3, which ``dtype`` then tells; else empty.

    Raises:
        ValueError: a number is out of range; the message names it and what is allowed.
        TypeError: ``softmax_scale`` is not a number.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    softmax_scale: float
    causal: bool = False
    return_lse: bool = False
    window_left: int = -1
    window_right: int = -1
    attention_chunk: int = 0
    softcap: float = 0.0
    sink: bool = False
    qv: bool = False
    pack_gqa: bool | None = None
    sm_margin: int = 0
    score_mod: str = ""
    mask_mod: str = ""
    score_aux: tuple[str, ...] = ()
    mask_aux: tuple[str, ...] = ()
    block_sparse: bool = False
    out_dtype: str = ""
    q_block: int = 0
    k_block: int = 0
    v_blocks: bool = False
    v_transposed: bool = False
    two_level: bool | None = None
    qk_dtype: str = ""

    def __post_init__(self) -> None:
        for field in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field}={getattr(self, field)}: must not be negative")
        if self.dtype not in DTYPE_NAMES.values():
            raise ValueError(f"dtype={self.dtype!r}: allowed are {', '.join(DTYPE_NAMES.values())}")
        if self.heads_q and (self.heads_kv == 0 or self.heads_q % self.heads_kv):
            raise ValueError(
                f"q has {self.heads_q} heads, k and v have {self.heads_kv}: "
                "the number of query heads must be a multiple of the number of key and value heads"
            )
        step, limit = 8, max_head_dim_v(self.head_dim)
        if self.dtype == "e4m3":
            step, limit = 16, MAX_HEAD_DIM
        _check_head_dim("head_dim (last dim of q and k)", self.head_dim, MAX_HEAD_DIM, step)
        _check_head_dim(f"head_dim_v (last dim of v, beside head_dim={self.head_dim})", self.head_dim_v, limit, step)
        self._check_fp8()
        check_softmax_scale(self.softmax_scale)
        if self.dtype != "fp64" and not _MIN_SCALE_FLOAT32 <= self.softmax_scale <= _MAX_SCALE_FLOAT32:
            raise ValueError(
                f"softmax_scale={self.softmax_scale}: must be finite and positive in float32, in which {self.dtype} "
                f"inputs are computed: from {_MIN_SCALE_FLOAT32:.2g} to {_MAX_SCALE_FLOAT32:.2g}"
            )
        for field, least in (("window_left", -1), ("window_right", -1), ("attention_chunk", 0), ("sm_margin", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)}: allowed are {least} and up")
        if not 0.0 <= self.softcap < math.inf:
            raise ValueError(f"softcap={self.softcap}: must be finite and at least 0 (none)")
        if self.dtype != "fp64" and self.softcap and not _MIN_SOFTCAP_FLOAT32 <= self.softcap <= _MAX_SCALE_FLOAT32:
            raise ValueError(
                f"softcap={self.softcap}: must be 0 (none) or from {_MIN_SOFTCAP_FLOAT32:.2g} to "
                f"{_MAX_SCALE_FLOAT32:.2g}, since {self.dtype} inputs are computed in float32"
            )
        if self.dtype != "fp64" and self.softcap and self.softmax_scale / self.softcap > _MAX_SCALE_FLOAT32:
            raise ValueError(
                f"softmax_scale={self.softmax_scale}, softcap={self.softcap}: the first over the second must be finite "
                "in float32"
            )
        if self.block_sparse and (self.causal or (self.window_left, self.window_right, self.attention_chunk) != _OPEN):
            raise ValueError(
                "block_mask goes with no causal, window_size or attention_chunk: it was made for its mask_mod alone; "
                "put them into the mask_mod"
            )

    def _check_fp8(self) -> None:
        fp8 = (self.out_dtype, self.q_block, self.k_block, self.v_transposed, self.two_level, self.qk_dtype)
        if self.dtype != "e4m3":
            if fp8 != ("", 0, 0, False, None, "") or self.v_blocks:
                raise ValueError(
                    f"out_dtype, q_block, k_block, v_transposed, two_level, qk_dtype={fp8}: go with dtype='e4m3', not "
                    f"{self.dtype!r}"
                )
            return
        if self.qk_dtype not in ("", "int8"):
            raise ValueError(f"qk_dtype={self.qk_dtype!r}: allowed are 'int8', and '' for e4m3")
        if self.out_dtype not in OUT_DTYPES:
            raise ValueError(f"out_dtype={self.out_dtype!r}: allowed beside e4m3 are {', '.join(OUT_DTYPES)}")
        blocks = (self.q_block, self.k_block)
        if blocks != (0, 0) and not is_block(blocks):
            raise ValueError(
                f"q_block={self.q_block}, k_block={self.k_block}: allowed are 64 and 128 of q with 64, 96 and 128 of "
                "k, or 0 for both"
            )
        if self.v_blocks and not self.k_block:
            raise ValueError("v_blocks=True beside k_block=0: blocks of v are those of k")
        if self.qv:
            raise ValueError(f"qv beside dtype='e4m3': {_NO_QV}")

    @property
    def bounds(self) -> tuple[int, int, int]:
        """(left, right, chunk) of the mask, each -1 (0 for the chunk) where it hides nothing from any query.

        None is above the sum of the lengths, whatever the call asked for.
        """
        left = -1 if self.window_left >= self.seqlen_k - 1 else self.window_left
        right = 0 if self.causal else self.window_right
        right = -1 if right >= self.seqlen_q - 1 else right
        # A query before the first key has a chunk without keys, however long chunks are.
        chunk = 0 if self.attention_chunk >= self.seqlen_k >= self.seqlen_q else self.attention_chunk
        return left, right, min(chunk, self.seqlen_q + self.seqlen_k)

    @property
    def most_keys(self) -> int:
        """Keys that a query sees at most, by window and chunk."""
        left, right, chunk = self.bounds
        keys = self.seqlen_k if -1 in (left, right) else min(self.seqlen_k, left + right + 1)
        return min(keys, chunk) if chunk else keys

    @property
    def mask(self) -> str:
        """The simplest kind of mask that says what this one says.

        ``"full"``: no key is hidden; ``"causal"``: those after the query's position; ``"window"``: those outside an
        interval around it; ``"blocks"``: those that a block mask hides.
        """
        left, right, chunk = self.bounds
        if left == -1 and chunk == 0 and right in (-1, 0):
            if right == 0:
                return "causal"
            return "blocks" if self.block_sparse else "full"
        return "window"

    @property
    def empty(self) -> bool:
        """There is no output element, so nothing to compute."""
        return 0 in (self.batch, self.seqlen_q, self.heads_q)

    @property
    def group_size(self) -> int:
        """Query heads that share one K/V head: 1 is MHA, ``heads_q`` is MQA."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def first_row_with_keys(self) -> int:
        """Queries before this one see no key by causal mask, window and chunk: their out is 0 and their LSE -inf."""
        if self.seqlen_k == 0:
            return self.seqlen_q
        _, right, chunk = self.bounds
        if chunk:
            right = 0
        elif right == -1:
            return 0
        return min(max(self.seqlen_q - self.seqlen_k - right, 0), self.seqlen_q)


def _check_head_dim(name: str, value: int, limit: int, step: int) -> None:
    if value % step or not step <= value <= limit:
        e4m3 = " with e4m3" if step == 16 else ""
        raise ValueError(f"{name} is {value}: allowed{e4m3} are the multiples of {step} from {step} to {limit}")


def named(name: str, value: object) -> str:
    """How messages name an argument. torch.compile may trace a number as a symbol, which it cannot format."""
    return name if _is_dynamo_compiling() else f"{name}={value!r}"


def check_softmax_scale(value: object) -> float:
    """``value`` as float. Raises ``TypeError`` if it is no number, ``ValueError`` if not finite and positive."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{named('softmax_scale', value)}: must be a float or None, not {type(value).__name__}")
    try:
        scale = float(value)
    except OverflowError:
        # An int or a fraction. Its digits could fill pages.
        raise ValueError("softmax_scale is too large for a float: must be finite and positive") from None
    # Comparisons and no math.isfinite: torch.compile may trace the number as a symbol.
    if not 0.0 < scale < math.inf:
        raise ValueError(f"{named('softmax_scale', scale)}: must be finite and positive")
    return scale


def check_bool(name: str, value: object) -> None:
    """Raise ``TypeError`` for anything but True and False, numbers and NumPy's bools included."""
    if value is not True and value is not False:
        kind = type(value)
        raise TypeError(f"{named(name, value)}: must be True or False, not {kind.__module__}.{kind.__qualname__}")


def check_kinds(q: Tensor, k: Tensor, v: Tensor, options: Options | None = None) -> None:
    """Check everything of the tensors but their sizes and strides. Errors as `check_forward`."""
    check_tensors(q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has {tensor.dim()} dims, shape {tuple(tensor.shape)}: must be (batch, seqlen, heads, head_dim)"
            )
        if tensor.dtype not in DTYPE_NAMES and (name == "v" or tensor.dtype is not _INT8):
            int8 = "" if name == "v" else f", and {_INT8} of q and k beside v of torch.float8_e4m3fn"
            raise TypeError(f"{name} has dtype {tensor.dtype}: allowed are {listed(DTYPE_NAMES)}{int8}")
    if _INT8 in (q.dtype, k.dtype):
        if not q.dtype == k.dtype or v.dtype is not torch.float8_e4m3fn:
            raise TypeError(
                f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}: {_INT8} must be that of both q and k, "
                "beside v of torch.float8_e4m3fn"
            )
    elif not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}: must be the same")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on devices {q.device}, {k.device} and {v.device}: must be the same")
    if options is not None:
        _check_option_kinds(q, options)


def _check_option_kinds(q: Tensor, options: Options) -> None:
    """What `check_kinds` checks, of the tensors among the options."""
    sink, qv, block_mask = options.sink, options.qv, options.block_mask
    if sink is not None:
        check_tensors(sink=sink)
        # float64 has no use but beside float64.
        allowed = _SINK_DTYPES if q.dtype is not torch.float64 else (*_SINK_DTYPES, torch.float64)
        if sink.dtype not in allowed:
            raise TypeError(f"sink has dtype {sink.dtype}: allowed are {listed(allowed)}")
        check_device("sink", sink, q)
    if qv is not None:
        check_tensors(qv=qv)
        if is_fp8(q.dtype):
            raise TypeError(f"qv is given, and q has dtype {q.dtype}: {_NO_QV}")
        if qv.dtype != q.dtype:
            raise TypeError(f"qv has dtype {qv.dtype}, q {q.dtype}: must be the same")
        check_device("qv", qv, q)
    if block_mask is not None:
        if options.mask_mod is not None:
            raise ValueError("block_mask and mask_mod are both given: a block mask has a mask_mod of its own")
        check_device("block_mask", block_mask.counts, q)
    if options.fp8 is not None:
        check_scale_kinds(q, options.fp8)
    for name, mod in (("score_mod", options.score_mod), ("mask_mod", options.mask_mod)):
        for i, tensor in enumerate(() if mod is None else mod.aux):
            check_device(f"{name}.aux[{i}]", tensor, q)


def check_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
    options: Options | None = None,
) -> Problem:
    """Check the tensors of a forward call against each other and describe them.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), last stride 1, other strides free.
        k: (batch, seqlen_k, heads_kv, head_dim), same dtype and device as q.
        v: (batch, seqlen_k, heads_kv, head_dim_v), same dtype and device as q, but e4m3 where q and k are int8.
        softmax_scale: ``None`` means ``head_dim ** -0.5``, with qv ``(head_dim + head_dim_v) ** -0.5``.
        causal: bottom-right aligned causal mask.
        return_lse: the caller also wants the log-sum-exp.
        options: whatever else is asked for, ``None`` for nothing. Its sink is (heads_q,), fp32, bf16 or fp16 (fp64 too
            beside fp64); its qv (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q, last stride 1; both, and
            all that modifications and block masks hold, on the device of q.

    Raises:
        TypeError: not a tensor, an unsupported dtype, or a mix of dtypes.
        ValueError: rank, sizes, strides, devices, scale or options do not fit; the message says which and what does.
    """
    check_kinds(q, k, v, options)
    batch, seqlen_q, heads_q, head_dim = q.shape
    fp8 = fp8_of(q.dtype, options)
    if fp8 is not None and not fp8.v_transposed:
        refuse_transposed(k, v)
    if fp8 is None or not fp8.v_transposed:
        _, seqlen_k, heads_kv, head_dim_v = v.shape
    else:
        # What is wrong with the other dims of V^T is said further on.
        (_, seqlen_k, heads_kv, _), head_dim_v = k.shape, v.shape[2]
    if not batch == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"q, k and v have batch sizes (dim 0) {batch}, {k.shape[0]} and {v.shape[0]}: must be the same"
        )
    if k.shape[1] != seqlen_k:
        raise ValueError(f"k and v have sequence lengths (dim 1) {k.shape[1]} and {seqlen_k}: must be the same")
    if k.shape[2] != heads_kv:
        raise ValueError(f"k and v have {k.shape[2]} and {heads_kv} heads (dim 2): must be the same")
    if k.shape[3] != head_dim:
        raise ValueError(f"q and k have head dims (dim 3) {head_dim} and {k.shape[3]}: must be the same")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_strides(name, tensor)
    score_columns = head_dim
    fields: dict[str, Any] = {}
    if fp8 is not None:
        fields = describe_fp8(fp8, v, (batch, seqlen_q, seqlen_k), (heads_q, heads_kv))
        fields["qk_dtype"] = "int8" if q.dtype is _INT8 else ""
    if options is not None:
        fields |= _describe_options(options, (batch, seqlen_q, heads_q, head_dim_v), seqlen_k)
        score_columns += head_dim_v if options.qv is not None else 0
    if softmax_scale is None:
        scale = default_softmax_scale(max(score_columns, 1))
    else:
        scale = check_softmax_scale(softmax_scale)
    return Problem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=DTYPE_NAMES[v.dtype],
        softmax_scale=scale,
        causal=bool(causal),
        return_lse=bool(return_lse),
        **fields,
    )


def _describe_options(options: Options, out_shape: tuple[int, int, int, int], seqlen_k: int) -> dict[str, Any]:
    """Check options against the sizes of the call; returns the fields of the `Problem` that describe them."""
    batch, seqlen_q, heads_q, _ = out_shape
    if options.sink is not None:
        check_shape("sink", options.sink, "(heads_q,)", (heads_q,))
    if options.qv is not None:
        check_shape("qv", options.qv, "(batch, seqlen_q, heads_q, head_dim_v)", out_shape)
        check_strides("qv", options.qv)
    block_mask = options.block_mask
    if block_mask is not None:
        _check_block_mask(block_mask, batch, heads_q, seqlen_q, seqlen_k)
    score_mod = options.score_mod
    mask_mod = options.mask_mod if block_mask is None else block_mask.mask_mod
    for mod in (score_mod, mask_mod):
        if mod is not None:
            check_sizes(mod, batch, heads_q, seqlen_q, seqlen_k)
    return {
        "window_left": options.window_left,
        "window_right": options.window_right,
        "attention_chunk": options.attention_chunk,
        "softcap": options.softcap,
        "sink": options.sink is not None,
        "qv": options.qv is not None,
        "pack_gqa": options.pack_gqa,
        "sm_margin": options.sm_margin,
        "score_mod": "" if score_mod is None else score_mod.cute,
        "mask_mod": "" if mask_mod is None else mask_mod.cute,
        "score_aux": _aux_codes(score_mod),
        "mask_aux": _aux_codes(mask_mod),
        "block_sparse": block_mask is not None,
    }


def _check_block_mask(block_mask: BlockMask, batch: int, heads_q: int, seqlen_q: int, seqlen_k: int) -> None:
    lengths = (block_mask.seqlen_q, block_mask.seqlen_k)
    if lengths != (seqlen_q, seqlen_k):
        raise ValueError(
            f"block_mask was made for seqlen_q={lengths[0]} and seqlen_k={lengths[1]}, the call has {seqlen_q} and "
            f"{seqlen_k}: must be the same"
        )
    sizes = tuple(block_mask.counts.shape[:2])
    if sizes[0] not in (1, batch) or sizes[1] not in (1, heads_q):
        raise ValueError(
            f"block_mask was made for batch {sizes[0]} and {sizes[1]} heads: allowed are 1 or {batch}, and 1 or "
            f"{heads_q}, as the call has"
        )


def _aux_codes(mod: ScoreMod | MaskMod | None) -> tuple[str, ...]:
    """Dtype letter and dims of each tensor that a modification reads, e.g. ``("f1", "i2")``."""
    return () if mod is None else tuple(f"{AUX_DTYPES[tensor.dtype]}{tensor.dim()}" for tensor in mod.aux)
