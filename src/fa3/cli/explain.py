"""The way of one call from flash_attn_func to the launch, with the reason of each choice.

Shows the backend, the spec and why it was planned so, the artifact's facts if it is in the store, the FLOPs and
bytes, and the least time that each unit of the chip needs. Without a Hopper GPU the plan is that of an H200.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fa3.cli.demo import parse_shape
from fa3.cli.roofline import roofline
from fa3.errors import FA3Error

if TYPE_CHECKING:
    import torch

    from fa3.plan import DeviceFacts, Plan
    from fa3.problem import Problem

DTYPES = ("bf16", "fp16", "fp32", "fp64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fa3 explain``."""
    parser.add_argument("--shape", required=True, help="B,S,H,D: batch, query length, query heads, head dim")
    parser.add_argument("--kv-heads", type=int, help="key and value heads (default: H)")
    parser.add_argument("--seqlen-k", type=int, help="key length (default: S)")
    parser.add_argument("--head-dim-v", type=int, help="head dim of v (default: D)")
    parser.add_argument("--causal", action="store_true", help="causal mask, aligned bottom-right")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="element type (default: bf16)")
    parser.add_argument("--softmax-scale", type=float, help="default: D^-0.5")
    parser.add_argument("--lse", action="store_true", help="the call returns the LSE too")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def problem_of(args: argparse.Namespace) -> Problem:
    """The problem that the options describe. Raises ``ValueError`` as flash_attn_func would."""
    from fa3.problem import Problem

    batch, seqlen, heads, head_dim = parse_shape(args.shape)

    def given(value: int | None, default: int) -> int:
        return default if value is None else value

    return Problem(
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=given(args.seqlen_k, seqlen),
        heads_q=heads,
        heads_kv=given(args.kv_heads, heads),
        head_dim=head_dim,
        head_dim_v=given(args.head_dim_v, head_dim),
        dtype=args.dtype,
        softmax_scale=head_dim**-0.5 if args.softmax_scale is None else args.softmax_scale,
        causal=args.causal,
        return_lse=args.lse,
    )


def _hopper_device() -> torch.device | None:
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return torch.device("cuda", torch.cuda.current_device())
    return None


def _device_facts(device: torch.device | None) -> tuple[DeviceFacts, str]:
    """Facts of the Hopper GPU, or of an assumed H200, and its name."""
    from fa3.plan import H200

    if device is None:
        return H200, f"an assumed {H200.name}"
    from fa3.backends import hopper

    facts = hopper.device_facts(device)
    return facts, facts.name


def _artifact(planned: Plan) -> dict[str, Any]:
    """Where the artifact is and what is known about it; or that it is not there, and what the first call does."""
    from fa3.compiler.build import require_compiler
    from fa3.compiler.store import default_store

    try:
        store = default_store()
        path = store.find(planned.spec)
        facts = store.facts(planned.spec)
    except FA3Error as error:
        return {"state": f"the store cannot be used: {error}"}
    if path is None or facts is None:
        try:
            store.writable_folder(make=False)
            require_compiler(store.target)
        except FA3Error as error:
            return {"state": f"not in the store, and the first call cannot compile it: {error}"}
        return {"state": "not in the store: the first call compiles it, or `fa3 compile` before that"}
    return {"state": "in the store", "path": str(path), **facts}


def explanation(problem: Problem) -> dict[str, Any]:
    """All that ``fa3 explain`` says, as plain values."""
    import torch

    from fa3 import backends
    from fa3 import plan as planning

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hopper = _hopper_device()
    facts, card = _device_facts(hopper)
    no_plan = planning.why_not(problem)
    flops, bytes_moved = planning.flops(problem), planning.bytes_moved(problem)
    limits = roofline(
        flops=flops,
        # One exponential for each score, two FLOPs for each column of q and of v.
        exponentials=flops / (2 * (problem.head_dim + problem.head_dim_v)),
        bytes_moved=bytes_moved,
        device=facts,
    )
    result: dict[str, Any] = {
        "problem": asdict(problem),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "backend": backends.choose(problem, device),
        "backend_reason": backends.backend_reason(problem, device),
        "flops": flops,
        "bytes": bytes_moved,
        "score_matrix_bytes": 4 * problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k,
        "planned_for": card,
        "roofline": {
            "sm_count": facts.sm_count,
            "clock_mhz": facts.boost_clock_hz / 1e6,
            "bytes_per_second": facts.memory_bytes_per_second,
            **asdict(limits),
            "bound": limits.bound,
        },
    }
    if no_plan is not None:
        return {**result, "plan": None, "no_plan": no_plan}
    planned = planning.plan(problem, facts)
    result["plan"] = {
        "spec": planned.spec.as_dict(),
        "name": planned.spec.name,
        "threads": planned.spec.threads,
        "shared_bytes": planned.spec.shared_bytes,
        "grid_blocks": planned.order.blocks,
        "reasons": list(planned.reasons),
    }
    result["artifact"] = _artifact(planned)
    return result


def _lines(said: dict[str, Any]) -> list[str]:
    """The explanation as text, from the call down to the chip."""
    problem = said["problem"]
    mask = "causal, aligned bottom-right" if problem["causal"] else "full"
    lines = [
        "flash_attn_func",
        f"  q    ({problem['batch']}, {problem['seqlen_q']}, {problem['heads_q']}, {problem['head_dim']}) "
        f"{problem['dtype']}",
        f"  k    ({problem['batch']}, {problem['seqlen_k']}, {problem['heads_kv']}, {problem['head_dim']})",
        f"  v    ({problem['batch']}, {problem['seqlen_k']}, {problem['heads_kv']}, {problem['head_dim_v']})",
        f"  mask {mask}; softmax_scale {problem['softmax_scale']:.6g}",
        "",
        f"backend here: {said['backend']}",
        f"  {said['backend_reason']}",
        "",
        f"plan for {said['planned_for']}",
    ]
    planned = said["plan"]
    if planned is None:
        lines.append(f"  the hopper backend has none: {said['no_plan']}")
    else:
        lines.append(f"  spec {planned['name']}")
        lines += [f"  - {reason}" for reason in planned["reasons"]]
        lines.append(
            f"  launch: {planned['grid_blocks']:,} blocks of {planned['threads']} threads, "
            f"{planned['shared_bytes']:,} bytes of shared memory each"
        )
        lines += ["", f"artifact: {said['artifact']['state']}"]
        lines += [f"  {line}" for line in _artifact_lines(said["artifact"])]
    limits = said["roofline"]
    lines += [
        "",
        "work",
        f"  {said['flops'] / 1e9:,.2f} GFLOP, {said['bytes'] / 1e6:,.2f} MB moved at least; "
        f"the matrix of scores that is never made: {said['score_matrix_bytes'] / 1e6:,.1f} MB in float32",
        f"  least time on {limits['sm_count']} SMs at {limits['clock_mhz']:.0f} MHz "
        f"and {limits['bytes_per_second'] / 1e12:.1f} TB/s:",
        f"    tensor cores {limits['tensor_us']:10,.2f} us   (16-bit)",
        f"    exponentials {limits['exp_us']:10,.2f} us",
        f"    memory       {limits['memory_us']:10,.2f} us",
        f"  bound by {limits['bound']}",
    ]
    return lines


def _artifact_lines(artifact: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in artifact.items():
        if name in ("state", "spec", "name", "target"):
            continue
        if isinstance(value, dict):
            plain = ", ".join(f"{key} {item}" for key, item in value.items() if not isinstance(item, (dict, list)))
            lines.append(f"{name}: {plain}")
        elif value is not None:
            lines.append(f"{name}: {value}")
    return lines


def run(args: argparse.Namespace) -> int:
    """Print the explanation. Returns 0."""
    said = explanation(problem_of(args))
    print(json.dumps(said, indent=1) if args.json else "\n".join(_lines(said)))
    return 0
