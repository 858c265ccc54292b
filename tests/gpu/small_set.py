"""One small call of every shipped bf16 kernel, and of each kind of FP8: to be run under compute-sanitizer.

See ``make sanitize``.

Lengths are multiples of nothing, so that every kernel runs its tails, and each has rows without keys.
"""

from typing import Literal

import torch

import fa3
from fa3 import mods
from fa3.backends import hopper, hopper_backward
from fa3.backward_spec import BackwardSpec
from fa3.compiler.store import default_store
from fa3.options import Options
from fa3.presets import shipped_specs
from fa3.spec import ForwardSpec, TransposeSpec

BATCH, HEADS, HEADS_KV = 1, 2, 1


def options_of(spec: ForwardSpec, seqlen_q: int, seqlen_k: int) -> Options:
    """Options that the kernel of a spec is for."""
    ids = torch.arange(seqlen_k, device="cuda", dtype=torch.int32)[None] // 50
    ready_made = {
        "fa3.kernels.mods:alibi": lambda: mods.alibi(mods.alibi_slopes(HEADS, "cuda")),
        "fa3.kernels.mods:relative_bias": lambda: mods.relative_bias(torch.randn(HEADS, 33, device="cuda")),
        "fa3.kernels.mods:prefix_lm": lambda: mods.prefix_lm(torch.tensor([70], device="cuda", dtype=torch.int32)),
        "fa3.kernels.mods:document_causal": lambda: mods.document(ids, causal=True),
    }
    score_mod = ready_made[spec.score_mod]() if spec.score_mod else None
    mask_mod = ready_made[spec.mask_mod]() if spec.mask_mod else None
    block_mask = None
    if spec.mask == "blocks":
        block_mask = fa3.create_block_mask(mask_mod, 1, None, seqlen_q, seqlen_k, device="cuda")
        mask_mod = None
    left, right = (60, 20) if spec.mask == "window" else (-1, -1)
    return Options(
        window_left=left,
        window_right=right,
        softcap=20.0 if spec.softcap else 0.0,
        sink=torch.randn(HEADS, device="cuda"),
        qv=torch.randn(BATCH, seqlen_q, HEADS, spec.head_dim_v, device="cuda", dtype=torch.bfloat16)
        if spec.qv
        else None,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
    )


def tensors_of(
    spec: ForwardSpec | BackwardSpec, seqlen_q: int, seqlen_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of the dims of a spec."""
    q = torch.randn(BATCH, seqlen_q, HEADS, spec.head_dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(BATCH, seqlen_k, HEADS_KV, spec.head_dim, device="cuda", dtype=q.dtype)
    v = torch.randn(BATCH, seqlen_k, HEADS_KV, spec.head_dim_v, device="cuda", dtype=q.dtype)
    return q, k, v


def call_gradients(spec: BackwardSpec) -> None:
    """The kernels of a spec and those around it, in no fixed order and in one."""
    q, k, v = tensors_of(spec, 331, 203)
    causal = spec.mask == "causal"
    left, right = (60, 20) if spec.mask == "window" else (-1, -1)
    options = Options(window_left=left, window_right=right, sink=torch.randn(HEADS, device="cuda"))
    out, lse = hopper.forward(q, k, v, None, causal, True, options)
    assert lse is not None
    for deterministic in (False, True):
        asked = options._replace(deterministic=deterministic)
        gradients = hopper_backward.backward(
            torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, None, causal, asked
        )
        assert all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None)


def call_listed_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, options: Options
) -> None:
    """Gradients with a block mask, in no fixed order and in one."""
    for deterministic in (False, True):
        asked = options._replace(deterministic=deterministic)
        gradients = hopper_backward.backward(torch.randn_like(out), None, q, k, v, out, lse, None, False, asked)
        assert all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None)


#: Head dim, rows that share a scale, layout of v, whether partial outputs are added in float32 (of 256 in parts), and
#: the dtype of q and k.
FP8_KINDS: tuple[tuple[int, tuple[int, int] | str | None, str, bool, Literal["e4m3", "int8"]], ...] = (
    (64, "head", "row", False, "e4m3"),
    (64, None, "transposed", False, "int8"),
    (128, "head", "row", False, "e4m3"),
    (128, None, "transposed", True, "e4m3"),
    (256, "tensor", "transposed", False, "e4m3"),
    (256, "head", "row", True, "e4m3"),
    (256, (128, 128), "transposed", True, "e4m3"),
    (256, None, "transposed", True, "int8"),
)


def call_fp8(
    head_dim: int,
    block: tuple[int, int] | str | None,
    v_layout: str,
    two_level: bool,
    qk_dtype: Literal["e4m3", "int8"],
) -> None:
    """The passes that quantize, with a rotary embedding where positions allow it, and attention of what they made."""
    for seqlen_q, seqlen_k in ((331, 203), (203, 331)):
        shapes = (seqlen_q, HEADS, head_dim), (seqlen_k, HEADS_KV, head_dim), (seqlen_k, HEADS_KV, head_dim)
        q, k, v = (torch.randn(BATCH, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        angles = torch.randn(seqlen_k, head_dim // 2, device="cuda")
        # Kernels that ship.
        rope = (angles.cos(), angles.sin()) if seqlen_q <= seqlen_k and block != "head" else None
        x = fa3.quantize_qkv(q, k, v, rope=rope, block=block, v_layout=v_layout, qk_dtype=qk_dtype)
        for tensor in x.dequantize():
            assert torch.isfinite(tensor).all()
        out, lse = fa3.flash_attn_quantized_func(
            x, causal=True, sink=torch.randn(HEADS, device="cuda"), two_level=two_level, return_lse=True
        )
        assert torch.isfinite(out).all()
        assert torch.isfinite(lse).all()


def call_transposition() -> None:
    """The pass that turns v of e4m3 to V^T; its bytes are numbers of no meaning."""
    v = torch.randint(0, 127, (2, 203, 3, 240), device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    out = hopper._transposed(default_store().load(TransposeSpec()), v)
    assert torch.isfinite(out.float()).all()


def main() -> None:
    count = 0
    for spec in shipped_specs("backward"):
        if isinstance(spec, BackwardSpec) and spec.dtype == "bf16":
            call_gradients(spec)
            count += 1
    for spec in dict.fromkeys((*shipped_specs("forward"), *shipped_specs("features"))):
        if not isinstance(spec, ForwardSpec) or spec.dtype != "bf16":
            continue
        seqlen_q, seqlen_k = (331, 331) if spec.mask == "blocks" else (331, 203)
        q, k, v = tensors_of(spec, seqlen_q, seqlen_k)
        options = options_of(spec, seqlen_q, seqlen_k)
        out, lse = hopper.forward_with_spec(spec, q, k, v, return_lse=True, options=options)
        assert torch.isfinite(out).all()
        assert lse is not None
        assert not torch.isnan(lse).any()
        count += 1
        if spec.mask == "blocks":
            call_listed_gradients(q, k, v, out, lse, options)
            count += 1
    for kind in FP8_KINDS:
        call_fp8(*kind)
        count += 2
    call_transposition()
    count += 1
    torch.cuda.synchronize()
    print(f"{count} calls")


if __name__ == "__main__":
    main()
