"""Changing scores and masking keys by functions of the caller's own, in FlexAttention's sense.

A modification is a pair of twins that say the same: one function in CuTe DSL, compiled into the kernel, and one in
PyTorch, for every other device. The CuTe twin is named by ``"module:function"`` and imported only to compile, so a
machine without a compiler can use it. A score modification may name a third function, its derivative in CuTe DSL; the
PyTorch twin is differentiated by autograd.

Indices count the queries and keys of a sequence from 0: they are indices, not positions, so with unequal lengths the
bottom-right alignment of the causal mask is not in them. A kernel works on whole tiles, so it also asks for queries
and keys behind the last one, and forgets the answer: a twin that reads a tensor by such an index must clamp it.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Kernels know it too; here it is a word of the public `BlockMask`.
from fa3.spec import BLOCK as BLOCK
from fa3.twins import derivative_of as derivative_of
from fa3.twins import name_of
from fa3.twins import register as register
from fa3.twins import twin as twin

#: Tensors that a modification may read.
MAX_AUX = 2

#: Their dtypes, and the letter that stands for each in a spec.
AUX_DTYPES = {torch.float32: "f", torch.int32: "i"}

#: Dims that each may have.
MAX_AUX_DIMS = 3

#: What a mask does to a block.
EMPTY, CUT, WHOLE = 0, 1, 2

#: Rows and columns of the picture of a block mask, and how it draws each kind of block.
_PICTURE_CELLS = 32
_PICTURE = {EMPTY: "··", CUT: "▒▒", WHOLE: "██"}


# Modifications ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, init=False)
class _Modification:
    cute: str
    torch: Callable[..., Tensor]
    aux: tuple[Tensor, ...] = ()

    def __init__(
        self, cute: str | Callable[..., object], torch: Callable[..., Tensor], aux: tuple[Tensor, ...] = ()
    ) -> None:
        self._set(name_of(cute, "cute"), torch, aux, "")

    def _set(self, cute: str, torch: Callable[..., Tensor], aux: tuple[Tensor, ...], derivative: str) -> None:
        if not callable(torch):
            raise TypeError(f"torch={torch!r}: must be a function, not {type(torch).__name__}")
        _check_aux(aux)
        register(cute, torch, derivative)
        # A frozen dataclass lets its fields be set in no other way.
        object.__setattr__(self, "cute", cute)
        object.__setattr__(self, "torch", torch)
        object.__setattr__(self, "aux", aux)


@dataclass(frozen=True, eq=False, init=False)
class ScoreMod(_Modification):
    """``score_mod(score, batch, head, q_index, kv_index, *aux) -> score``, applied to the scaled score.

    Attributes:
        cute: ``"module:function"`` of the CuTe DSL twin, which takes (score: Float32, batch, head, q_index,
            kv_index: Int32, aux: tuple of cute.Tensor) and returns a Float32. The function itself may be given, if it
            stands at the top level of a module with a file: kernels are compiled in another process.
        torch: the PyTorch twin: takes (score, batch, head, q_index, kv_index, *aux), tensors that broadcast
            against each other, and returns the new scores.
        aux: tensors that both read: at most two, float32 or int32, contiguous, of 1 to 3 dims, on q's device. No
            gradient comes back to them.
        derivative: ``"module:function"`` of a CuTe DSL function that takes (grad: Float32, score: Float32, batch,
            head, q_index, kv_index: Int32, aux: tuple of cute.Tensor) and returns a Float32: the gradient of the score
            before the modification, given ``grad``, that of the score after it, and ``score``, the one before. The
            function itself may be given here too. Empty: the one that ``cute`` was given before, if any; with none the
            Hopper kernels have no gradient, and the tiled backend computes it by autograd of the PyTorch twin.

    Raises:
        TypeError: ``torch`` is no function, ``cute`` or ``derivative`` neither a name nor a function, ``aux`` no tuple
            of float32 and int32 tensors.
        ValueError: ``cute`` or ``derivative`` cannot be imported elsewhere, ``cute`` has another PyTorch twin or
            derivative, or ``aux`` has too many tensors or dims or is not contiguous.
    """

    derivative: str = ""

    def __init__(
        self,
        cute: str | Callable[..., object],
        torch: Callable[..., Tensor],
        aux: tuple[Tensor, ...] = (),
        derivative: str | Callable[..., object] = "",
    ) -> None:
        name = name_of(cute, "cute")
        self._set(name, torch, aux, "" if derivative == "" else name_of(derivative, "derivative"))
        object.__setattr__(self, "derivative", derivative_of(name))


class MaskMod(_Modification):
    """``mask_mod(batch, head, q_index, kv_index, *aux) -> bool``: whether the query sees the key.

    Attributes and errors: as `ScoreMod`, without the score and the derivative; the CuTe DSL twin returns a Boolean.
    """


def _check_aux(aux: object) -> None:
    allowed = " and ".join(str(dtype) for dtype in AUX_DTYPES)
    if not isinstance(aux, tuple):
        raise TypeError(f"aux must be a tuple of tensors, not {type(aux).__name__}")
    if len(aux) > MAX_AUX:
        raise ValueError(f"aux has {len(aux)} tensors: allowed are at most {MAX_AUX}")
    for i, tensor in enumerate(aux):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"aux[{i}] must be a torch.Tensor, not {type(tensor).__name__}")
        if tensor.dtype not in AUX_DTYPES:
            raise TypeError(f"aux[{i}] has dtype {tensor.dtype}: allowed are {allowed}")
        if not 1 <= tensor.dim() <= MAX_AUX_DIMS:
            raise ValueError(f"aux[{i}] has {tensor.dim()} dims: allowed are 1 to {MAX_AUX_DIMS}")
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ValueError(f"aux[{i}] must be contiguous (aux[{i}].contiguous() makes such a copy)")


# Ready-made modifications -----------------------------------------------------------------------------------------
#
# Their CuTe DSL twins have the same names in fa3/kernels/mods.py.


def _alibi(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor, slopes: Tensor) -> Tensor:
    return score - slopes[head] * (q_index - kv_index).abs()


def _relative_bias(
    score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor, bias: Tensor
) -> Tensor:
    farthest = bias.shape[1] // 2
    return score + bias[head, (kv_index - q_index).clamp(-farthest, farthest) + farthest]


def _prefix_lm(batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor, prefix_lengths: Tensor) -> Tensor:
    return (kv_index < prefix_lengths[batch]) | (kv_index <= q_index)


def _document(batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor, document_ids: Tensor) -> Tensor:
    last = document_ids.shape[1] - 1
    return document_ids[batch, q_index.clamp(max=last)] == document_ids[batch, kv_index.clamp(max=last)]


def _document_causal(batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor, document_ids: Tensor) -> Tensor:
    return _document(batch, head, q_index, kv_index, document_ids) & (kv_index <= q_index)


_ALIBI = "fa3.kernels.mods:alibi"
_RELATIVE_BIAS = "fa3.kernels.mods:relative_bias"
_ADDITIVE = "fa3.kernels.mods:additive"
_PREFIX_LM = "fa3.kernels.mods:prefix_lm"
_DOCUMENT = "fa3.kernels.mods:document"
_DOCUMENT_CAUSAL = "fa3.kernels.mods:document_causal"

# A program that comes from another process may call them before anything here has made them.
register(_ALIBI, _alibi, _ADDITIVE)
register(_RELATIVE_BIAS, _relative_bias, _ADDITIVE)
register(_PREFIX_LM, _prefix_lm)
register(_DOCUMENT, _document)
register(_DOCUMENT_CAUSAL, _document_causal)

#: Argument of the constructor, and what each dim of the tensor counts.
_DIMS: dict[str, tuple[str, tuple[str, ...]]] = {
    _ALIBI: ("slopes", ("heads",)),
    _RELATIVE_BIAS: ("bias", ("heads", "2 * max_distance + 1")),
    _PREFIX_LM: ("prefix_lengths", ("batch",)),
    _DOCUMENT: ("document_ids", ("batch", "seqlen")),
    _DOCUMENT_CAUSAL: ("document_ids", ("batch", "seqlen")),
}


def _check_dims(cute: str, tensor: Tensor, dtype: torch.dtype) -> None:
    name, dims = _DIMS[cute]
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}: must be {dtype}")
    if tensor.dim() != len(dims):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must be ({', '.join(dims)})")


def alibi(slopes: Tensor) -> ScoreMod:
    """Attention with linear biases: ``score - slopes[head] * abs(q_index - kv_index)`` (arXiv:2108.12409).

    Under a causal mask of equal lengths that is the paper's form, in which no key stands behind its query. The
    distance is that of indices: with fewer queries than keys, at the end of a sequence, it is not that of positions.

    Args:
        slopes: (heads_q,) float32; `alibi_slopes` makes those of the paper.

    Raises:
        TypeError, ValueError: ``slopes`` has another dtype or shape, or is not contiguous.
    """
    _check_dims(_ALIBI, slopes, torch.float32)
    return ScoreMod(_ALIBI, _alibi, (slopes,))


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slopes of arXiv:2108.12409: float32 (heads,).

    For a power of two ``2 ** (-8 * (i + 1) / heads)``; else those of the next lower power of two, and then every
    other one of the next higher.

    Raises:
        TypeError: ``heads`` is no int.
        ValueError: ``heads`` is below 1.
    """
    given: object = heads
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):
        raise TypeError(f"heads={given!r}: must be an int, not {type(given).__name__}")
    if heads < 1:
        raise ValueError(f"heads={heads}: allowed are 1 and up")
    heads = int(heads)
    lower = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / lower) for i in range(lower)]
    slopes += [2.0 ** (-4 * (2 * i + 1) / lower) for i in range(heads - lower)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def relative_bias(bias: Tensor) -> ScoreMod:
    """``score + bias[head, clamp(kv_index - q_index, -max_distance, max_distance) + max_distance]``.

    Args:
        bias: (heads_q, 2 * max_distance + 1) float32, contiguous: from the farthest key before the query to the
            farthest behind it, beyond which the bias stays the same.

    Raises:
        TypeError, ValueError: ``bias`` has another dtype or shape, or is not contiguous.
    """
    _check_dims(_RELATIVE_BIAS, bias, torch.float32)
    if bias.shape[1] % 2 == 0:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}: must be (heads, 2 * max_distance + 1), an odd number of distances"
        )
    return ScoreMod(_RELATIVE_BIAS, _relative_bias, (bias,))


def prefix_lm(prefix_lengths: Tensor) -> MaskMod:
    """A query sees the keys of its sequence's prefix, and those up to its own index.

    Args:
        prefix_lengths: (batch,) int32.

    Raises:
        TypeError, ValueError: ``prefix_lengths`` has another dtype or shape, or is not contiguous.
    """
    _check_dims(_PREFIX_LM, prefix_lengths, torch.int32)
    return MaskMod(_PREFIX_LM, _prefix_lm, (prefix_lengths,))


def document(document_ids: Tensor, causal: bool = False) -> MaskMod:
    """A query sees the keys of its own document; with ``causal`` only those up to its own index.

    Args:
        document_ids: (batch, seqlen) int32, contiguous: the document that each query and the key of the same index
            belong to.
        causal: hide the keys behind the query too.

    Raises:
        TypeError, ValueError: ``document_ids`` has another dtype or shape, or is not contiguous.
    """
    _check_dims(_DOCUMENT, document_ids, torch.int32)
    if causal is not True and causal is not False:
        raise TypeError(f"causal={causal!r}: must be True or False, not {type(causal).__name__}")
    if causal:
        return MaskMod(_DOCUMENT_CAUSAL, _document_causal, (document_ids,))
    return MaskMod(_DOCUMENT, _document, (document_ids,))


def check_answer(mod: ScoreMod | MaskMod, answer: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The answer of a PyTorch twin, if it broadcasts to ``shape``, (batch, heads, queries, keys).

    Raises:
        ValueError: it does not.
    """
    try:
        answer.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"the PyTorch twin of {mod.cute!r} returned shape {tuple(answer.shape)}: must broadcast to "
            f"(batch, heads, queries, keys) = {tuple(shape)}"
        ) from None
    return answer


def check_sizes(mod: ScoreMod | MaskMod, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
    """Check that a ready-made modification has an entry for all that a call of these sizes asks it for.

    What functions of the caller's own read is theirs to check.

    Raises:
        ValueError: the tensor of the modification is for another batch or number of heads, or for shorter sequences.
    """
    if mod.cute not in _DIMS:
        return
    name, dims = _DIMS[mod.cute]
    longest = max(seqlen_q, seqlen_k)
    for dim, size in zip(dims, mod.aux[0].shape, strict=False):
        wrong = {"batch": size != batch, "heads": size != heads, "seqlen": size < longest}
        if wrong.get(dim):
            needed = {"batch": f"{batch}", "heads": f"{heads}", "seqlen": f"at least {longest}"}[dim]
            raise ValueError(
                f"{name} has shape {tuple(mod.aux[0].shape)}, ({', '.join(dims)}): {dim} must be {needed}, as that of "
                "the call"
            )


# Block masks ------------------------------------------------------------------------------------------------------


def ordered_blocks(kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and indices, as `BlockMask` has them, of what a mask does to the blocks of each row, (..., blocks)."""
    # One descending sort puts the cut blocks before the whole ones and those before the empty ones, each from the
    # last to the first.
    number = torch.arange(kinds.shape[-1], device=kinds.device)
    order = torch.where(kinds == CUT, 2, torch.where(kinds == WHOLE, 1, 0)) * kinds.shape[-1] + number
    counts = torch.stack([(kinds == CUT).sum(-1), (kinds == WHOLE).sum(-1)], dim=-1)
    return counts.int(), order.argsort(-1, descending=True).int()


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of 128 queries x 128 keys a mask leaves empty, cuts, or leaves whole.

    `fa3.create_block_mask` makes one; ``str`` draws it.

    Attributes:
        mask_mod: the mask.
        seqlen_q, seqlen_k: lengths it was made for.
        counts: int32 (batch or 1, heads_q or 1, query blocks, 2): how many blocks are cut, and how many whole.
        indices: int32 (batch or 1, heads_q or 1, query blocks, key blocks): the key blocks of each query block, those
            that are cut first and then the whole ones, each from the last to the first; what follows is not read. A
            block that ends behind the last key counts as cut.

    Raises:
        TypeError: ``mask_mod`` is no `MaskMod`, or ``counts`` or ``indices`` no int32 tensor.
        ValueError: shapes or devices do not fit together, or a tensor is not contiguous.
    """

    mask_mod: MaskMod
    seqlen_q: int
    seqlen_k: int
    counts: Tensor
    indices: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.mask_mod, MaskMod):
            raise TypeError(f"mask_mod must be a MaskMod, not {type(self.mask_mod).__name__}")
        blocks = -(-self.seqlen_q // BLOCK), -(-self.seqlen_k // BLOCK)
        for name, tensor, last in (("counts", self.counts, (blocks[0], 2)), ("indices", self.indices, blocks)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
            if tensor.dtype != torch.int32:
                raise TypeError(f"{name} has dtype {tensor.dtype}: must be torch.int32")
            if tensor.dim() != 4 or tuple(tensor.shape[2:]) != last:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}: for seqlen_q={self.seqlen_q} and "
                    f"seqlen_k={self.seqlen_k} it must be (batch or 1, heads or 1, {last[0]}, {last[1]})"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous ({name}.contiguous() makes such a copy)")
        if self.counts.shape[:2] != self.indices.shape[:2]:
            raise ValueError(
                f"counts and indices have shapes {tuple(self.counts.shape)} and {tuple(self.indices.shape)}: "
                "the first two dims must be the same"
            )
        if len({tensor.device for tensor in (self.counts, self.indices, *self.mask_mod.aux)}) > 1:
            raise ValueError(
                f"counts, indices and the tensors of mask_mod are on devices {self.counts.device}, "
                f"{self.indices.device} and {[str(tensor.device) for tensor in self.mask_mod.aux]}: must be the same"
            )

    @property
    def sparsity(self) -> float:
        """Fraction of the blocks that are not visited; 0.0 where there is none."""
        blocks = self.indices.numel()
        return 1.0 - int(self.counts.sum()) / blocks if blocks else 0.0

    def kinds(self) -> Tensor:
        """What the mask does to each block: int8 (batch or 1, heads_q or 1, query blocks, key blocks).

        0 (`EMPTY`): no query sees a key; 1 (`CUT`): some do; 2 (`WHOLE`): every query of the block sees every key.
        """
        key_blocks = self.indices.shape[-1]
        rank = torch.arange(key_blocks, device=self.indices.device)
        cut, visited = self.counts[..., :1], self.counts.sum(-1, keepdim=True)
        kinds = torch.where(rank < cut, CUT, torch.where(rank < visited, WHOLE, EMPTY)).to(torch.int8)
        # What follows the visited blocks may be anything: it goes into a column that is dropped.
        places = torch.where(rank < visited, self.indices.long(), key_blocks)
        return kinds.new_zeros((*kinds.shape[:-1], key_blocks + 1)).scatter(-1, places, kinds)[..., :key_blocks]

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on another device, with the tensors of its ``mask_mod``."""
        mask_mod = replace(self.mask_mod, aux=tuple(tensor.to(device) for tensor in self.mask_mod.aux))
        return replace(self, mask_mod=mask_mod, counts=self.counts.to(device), indices=self.indices.to(device))

    def __str__(self) -> str:
        """Sizes, and a picture of the first head of the first sequence: queries downward, keys to the right."""
        batch, heads, query_blocks, key_blocks = self.indices.shape
        lines = [
            f"BlockMask(batch={batch}, heads={heads}, seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}, "
            f"mask_mod={self.mask_mod.cute}): {self.sparsity:.1%} of the blocks are not visited"
        ]
        if self.indices.numel():
            kinds = self.kinds()[0, 0].cpu()
            step = -(-max(query_blocks, key_blocks) // _PICTURE_CELLS)
            for rows in kinds.split(step):
                cells = [(int(cell.min()), int(cell.max())) for cell in rows.split(step, dim=1)]
                lines.append("".join(_PICTURE[least if least == most else CUT] for least, most in cells))
        return "\n".join(lines)
