"""Sets of kernels to compile ahead of the first call: what ships, and what tests and sweeps ask for beyond that.

Pure Python and pure arithmetic, as `fa3.plan`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fa3.backward_plan import backward_specs, plan_backward
from fa3.backward_spec import BACKWARD_CLASSES
from fa3.fp8_tiles import fp8_rows
from fa3.kernel_spec import KernelSpec
from fa3.plan import H200, forward_specs, fp8_specs, make_spec
from fa3.problem import Problem
from fa3.quantization import default_block
from fa3.quantize_plan import plan_quantize, quantize_specs
from fa3.spec import FP8, INT8, ForwardSpec, TransposeSpec
from fa3.tiles import CANDIDATES, MODIFIED, QV, TILES, TileChoice

PRESETS = (
    "smoke",
    "forward",
    "backward",
    "training",
    "features",
    "schedule",
    "fp8",
    "accuracy",
    "all",
    "tests",
    "sweep",
)


def shipped_specs(preset: str) -> tuple[KernelSpec, ...]:
    """The specs of a preset, in a fixed order.

    ``smoke``: one kernel. ``forward``: all that `fa3.plan.plan` can choose for plain calls and windows. ``backward``:
    all that `fa3.backward_plan.plan_backward` can choose for their gradients. ``training``: both. ``features``: caps,
    modifications, block masks and qv at the usual head dims. ``schedule``: combinations of the forward schedule's
    switches, for tests and the ablation. ``fp8``: attention in e4m3, and quantization. ``all``: all of these, which are
    the shipped ones. ``accuracy``: what ``fa3 accuracy`` runs by default. ``tests``: the shipped ones, and what the GPU
    tests ask for beyond them. ``sweep``: what the sweep of the tile tables tries.

    Raises:
        ValueError: unknown preset.
    """
    if preset == "smoke":
        return (make_spec("bf16", 128, "full", TILES[128, 128]["full"][-1][1]),)
    if preset not in _SETS:
        raise ValueError(f"preset={preset!r}: allowed are {', '.join(PRESETS)}")
    return tuple(dict.fromkeys(itertools.chain.from_iterable(specs() for specs in _SETS[preset])))


_ALIBI = {"score_mod": "fa3.kernels.mods:alibi", "score_aux": "f1"}
_BIAS = {"score_mod": "fa3.kernels.mods:relative_bias", "score_aux": "f2"}
_PREFIX = {"mask_mod": "fa3.kernels.mods:prefix_lm", "mask_aux": "i1"}
_DOCUMENT = {"mask_mod": "fa3.kernels.mods:document_causal", "mask_aux": "i2"}


def _features() -> Iterator[ForwardSpec]:
    """Of each option that changes the machine code, and of some together; others are compiled when first asked for."""
    for kind, mask in (*(((128, 128), mask) for mask in TILES[128, 128]), ((256, 256), "full")):
        yield make_spec("bf16", kind, mask, MODIFIED[kind], softcap=True)
    yield make_spec("bf16", 128, "causal", MODIFIED[128, 128], **_ALIBI)
    for kind in ((64, 64), (128, 128), (256, 256)):
        yield make_spec("bf16", kind, "blocks", MODIFIED[kind], **_DOCUMENT)
    yield make_spec("bf16", 128, "full", MODIFIED[128, 128], **_BIAS, **_PREFIX)
    yield make_spec("bf16", 128, "window", MODIFIED[128, 128], softcap=True, **_BIAS, **_PREFIX)
    for kind, mask in (((64, 256), "full"), ((128, 128), "causal")):
        yield make_spec("bf16", kind, mask, QV[kind], qv=True)


def _transposes() -> Iterator[TransposeSpec]:
    """The pass before attention that turns v to V^T."""
    yield TransposeSpec()


def _accuracy() -> Iterator[KernelSpec]:
    """Full masks at three head dims, and every way to quantize, also those that nobody would choose."""
    for spec in (*forward_specs(), *fp8_specs()):
        if spec.mask == "full" and spec.head_dim == spec.head_dim_v in (64, 128, 256) and not spec.pack_gqa:
            yield spec
    for head_dim in (64, 128, 256):
        # Short rows and long ones have other blocks, and either is attended to with and without float32 sums.
        blocks = default_block(head_dim), default_block(head_dim, two_level=True)
        of_keys = sorted({of_k for _, of_k in blocks})
        for of_k, add in itertools.product(of_keys, (False, True)):
            for _, choice in fp8_rows((head_dim, head_dim), "full", False, of_k, True, add):
                yield make_spec(FP8, head_dim, "full", choice, key_block=of_k)
                yield make_spec(FP8, head_dim, "full", choice, key_block=of_k, qk_dtype=INT8)
        kinds: tuple[int | str, ...] = ("head", *sorted({rows for block in blocks for rows in block}))
        # q and k, v of a head among them; then V^T.
        ways = [(*way, False, FP8) for way in itertools.product(kinds, (False, True), ("", "fp32"))]
        ways += [(*way, False, INT8) for way in itertools.product(kinds[1:], (True,), ("", "fp32"))]
        for rows, rotate, rope, transpose, out in (*ways, ("head", False, "", True, FP8)):
            planned = plan_quantize(
                rows=rows,
                rotate=rotate,
                rope=rope,
                interleaved=False,
                transpose=transpose,
                out=out,
                dtype="bf16",
                batch=1,
                seqlen=1024,
                heads=4,
                head_dim=head_dim,
                facts=H200,
            )
            if planned.amax is not None:
                yield planned.amax
            yield planned.spec


def _more_features() -> Iterator[ForwardSpec]:
    """More of the features: at every usual head dim, under every mask."""
    for kind in ((64, 64), (256, 256)):
        for mask in TILES[kind]:
            yield make_spec("bf16", kind, mask, MODIFIED[kind], softcap=True)
        yield make_spec("bf16", kind, "causal", MODIFIED[kind], **_ALIBI)
    for kind in ((64, 64), (128, 128)):
        yield make_spec("bf16", kind, "blocks", MODIFIED[kind], softcap=True, **_DOCUMENT)
    yield make_spec("bf16", 64, "blocks", MODIFIED[64, 64], **_BIAS, **_DOCUMENT)
    for kind, mask in itertools.product(((64, 64), (128, 128), (64, 256)), ("full", "causal")):
        yield make_spec("bf16", kind, mask, QV[kind], qv=True)


def _features_of_gradients() -> Iterator[KernelSpec]:
    """Gradients in a fixed order of every tile class under every mask, and those of the features."""
    causal: dict[str, Any] = {"causal": True}
    window: dict[str, Any] = {"window_left": 100}
    softcap: dict[str, Any] = {"softcap": 20.0}
    alibi: dict[str, Any] = {"score_mod": _ALIBI["score_mod"], "score_aux": ("f1",)}
    bias: dict[str, Any] = {"score_mod": _BIAS["score_mod"], "score_aux": ("f2",)}
    prefix: dict[str, Any] = {"mask_mod": _PREFIX["mask_mod"], "mask_aux": ("i1",)}
    blocks: dict[str, Any] = {"block_sparse": True, "mask_mod": _DOCUMENT["mask_mod"], "mask_aux": ("i2",)}
    for kind in BACKWARD_CLASSES:
        for mask in ({}, causal, window):
            yield from _gradients(kind, mask, deterministic=True)
    for kind, options in (
        ((64, 64), causal | softcap),
        ((128, 128), softcap),
        ((256, 256), softcap),
        ((64, 64), causal | alibi),
        ((128, 128), causal | alibi),
        ((128, 128), bias | prefix),
        ((128, 128), window | softcap | bias | prefix),
        ((64, 64), blocks | softcap),
        ((128, 128), blocks | softcap),
        ((64, 64), blocks | bias),
    ):
        yield from _gradients(kind, options)
    for kind, deterministic in itertools.product(((64, 64), (128, 128), (256, 256)), (False, True)):
        yield from _gradients(kind, blocks, deterministic)


def _gradients(kind: tuple[int, int], options: dict[str, Any], deterministic: bool = False) -> tuple[KernelSpec, ...]:
    """The kernels for the gradients of a bf16 call; ``options`` are fields of `Problem`."""
    sizes: dict[str, Any] = {"batch": 1, "seqlen_q": 1024, "seqlen_k": 1024, "heads_q": 1, "heads_kv": 1}
    problem = Problem(**sizes, head_dim=kind[0], head_dim_v=kind[1], dtype="bf16", softmax_scale=1.0, **options)
    # The ready-made modifications only add to scores.
    planned = plan_backward(problem, H200, "fa3.kernels.mods:additive", deterministic)
    return planned.prepare, planned.main, planned.finish


def _schedules() -> Iterator[ForwardSpec]:
    switches = (False, True)
    # The paper's ablation is in fp16, at d 128 without a mask.
    full = make_spec("fp16", 128, "full", TILES[128, 128]["full"][-1][1])
    for specialized, pingpong, overlap in itertools.product(switches, switches, switches):
        yield replace(full, warp_specialized=specialized, pingpong=pingpong, overlap=overlap)
    # Elsewhere each switch off alone, or all of them.
    causal = make_spec("bf16", 128, "causal", TILES[128, 128]["causal"][-1][1])
    for switch in ("warp_specialized", "pingpong", "overlap"):
        yield replace(causal, **{switch: False})  # type: ignore[arg-type]
    for spec in (
        causal,
        make_spec("bf16", 64, "full", TILES[64, 64]["full"][-1][1]),
        make_spec("bf16", 256, "causal", TILES[256, 256]["causal"][-1][1]),
    ):
        yield replace(spec, warp_specialized=False, pingpong=False, overlap=False)
    # A window without a producer warp: skipped steps load too.
    yield replace(make_spec("bf16", 128, "window", TILES[128, 128]["window"][-1][1]), warp_specialized=False)
    # References that always move; a single stage.
    yield replace(make_spec("bf16", 128, "full", TILES[128, 128]["full"][-1][1]), rescale_threshold=0.0)
    yield make_spec("bf16", 128, "full", TileChoice(192, 80, 1))


def _sweep() -> Iterator[ForwardSpec]:
    for kind, choices in CANDIDATES.items():
        for mask, choice in itertools.product(("full", "causal", "window"), choices):
            yield make_spec("bf16", kind, mask, choice)


_SHIPPED = (forward_specs, _features, _schedules, backward_specs, fp8_specs, quantize_specs, _transposes)

#: Preset -> the sets that it is made of.
_SETS = {
    "forward": (forward_specs,),
    "backward": (backward_specs,),
    "training": (forward_specs, backward_specs),
    "features": (_features,),
    "schedule": (_schedules,),
    "fp8": (fp8_specs, quantize_specs, _transposes),
    "accuracy": (_accuracy,),
    "all": _SHIPPED,
    "tests": (*_SHIPPED, _more_features, _features_of_gradients),
    "sweep": (_sweep,),
}
