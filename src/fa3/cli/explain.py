"""The way of one call from flash_attn_func to the launch, with the reason of each choice.

Shows what each query sees, the backend, the spec and why it was planned so, the artifact's facts if it is in the
store, the FLOPs and bytes, and the least time that each unit of the chip needs. Without a Hopper GPU the plan is that
of an H200.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fa3.cli.demo import parse_shape
from fa3.cli.roofline import roofline
from fa3.errors import FA3Error

if TYPE_CHECKING:
    from fa3.kernel_spec import KernelSpec
    from fa3.plan import DeviceFacts
    from fa3.problem import Problem

DTYPES = ("bf16", "fp16", "fp32", "fp64", "e4m3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fa3 explain``."""
    parser.add_argument("--shape", required=True, help="B,S,H,D: batch, query length, query heads, head dim")
    parser.add_argument("--kv-heads", type=int, help="key and value heads (default: H)")
    parser.add_argument("--seqlen-k", type=int, help="key length (default: S)")
    parser.add_argument("--head-dim-v", type=int, help="head dim of v (default: D)")
    parser.add_argument("--causal", action="store_true", help="causal mask, aligned bottom-right")
    parser.add_argument("--window", metavar="LEFT,RIGHT", help="keys to either side of a query's position; -1 is open")
    parser.add_argument("--attention-chunk", type=int, default=0, metavar="C", help="keys of a chunk (default: none)")
    parser.add_argument("--softcap", type=float, default=0.0, metavar="CAP", help="cap on scores (default: none)")
    parser.add_argument("--sink", action="store_true", help="one more logit a head, without a value")
    parser.add_argument("--qv", action="store_true", help="scores are q · k + qv · v")
    parser.add_argument(
        "--pack-gqa",
        action=argparse.BooleanOptionalAction,
        help="query heads that share a K/V head share tiles (default: the plan chooses)",
    )
    parser.add_argument("--sm-margin", type=int, default=0, metavar="N", help="multiprocessors to leave free")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="element type (default: bf16)")
    parser.add_argument(
        "--scale-blocks", metavar="Q,K", help="e4m3: rows of q, and of k and v, that share a scale (default: a head's)"
    )
    parser.add_argument("--qk-dtype", choices=("e4m3", "int8"), help="e4m3: of q and k (default: e4m3, as v)")
    parser.add_argument("--v-transposed", action="store_true", help="e4m3: v comes as V^T")
    parser.add_argument(
        "--two-level",
        action=argparse.BooleanOptionalAction,
        help="e4m3: partial outputs are added in float32 (default: the plan chooses)",
    )
    parser.add_argument("--out-dtype", choices=("bf16", "fp16"), help="e4m3: of out (default: bf16)")
    parser.add_argument("--softmax-scale", type=float, help="default: D^-0.5, with --qv the columns of v count too")
    parser.add_argument("--lse", action="store_true", help="the call returns the LSE too")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def parse_window(text: str) -> tuple[int, int]:
    """``LEFT,RIGHT`` as two integers from -1 on, of at most 18 digits."""
    found = re.fullmatch(r"(-1|[0-9]{1,18}),(-1|[0-9]{1,18})", text)
    if found is None:
        raise ValueError(f"--window {text!r}: expected LEFT,RIGHT: keys to either side, or -1 for an open one")
    return int(found[1]), int(found[2])


def parse_blocks(text: str) -> tuple[int, int]:
    """``Q,K``: rows that share a scale."""
    from fa3.quantization import is_block

    found = re.fullmatch(r"([0-9]{1,9}),([0-9]{1,9})", text)
    block = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if not is_block(block):
        raise ValueError(f"--scale-blocks {text!r}: expected Q,K: 64 or 128 rows of q, 64, 96 or 128 of k and v")
    return block


def problem_of(args: argparse.Namespace) -> Problem:
    """The problem that the options describe. Raises ``ValueError`` as flash_attn_func would."""
    from fa3.problem import Problem, default_softmax_scale

    batch, seqlen, heads, head_dim = parse_shape(args.shape)
    head_dim_v = head_dim if args.head_dim_v is None else args.head_dim_v
    score_columns = head_dim + (max(head_dim_v, 0) if args.qv else 0)
    left, right = (-1, -1) if args.window is None else parse_window(args.window)
    # As flash_attn_func has it: with 0 on the right a window is causal, and then says nothing of the right.
    causal = args.causal or right == 0
    out_dtype = args.out_dtype or ("bf16" if args.dtype == "e4m3" else "")
    q_block, k_block = (0, 0) if args.scale_blocks is None else parse_blocks(args.scale_blocks)
    if args.dtype != "e4m3":
        # The problem would say the same of its fields, whose names are not those of the options.
        for option, given in (
            ("--scale-blocks", args.scale_blocks is not None),
            ("--qk-dtype", args.qk_dtype is not None),
            ("--v-transposed", args.v_transposed),
            ("--two-level, --no-two-level", args.two_level is not None),
            ("--out-dtype", args.out_dtype is not None),
        ):
            if given:
                raise ValueError(f"{option}: goes with --dtype e4m3, not {args.dtype}")
    return Problem(
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen if args.seqlen_k is None else args.seqlen_k,
        heads_q=heads,
        heads_kv=heads if args.kv_heads is None else args.kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=args.dtype,
        softmax_scale=default_softmax_scale(score_columns) if args.softmax_scale is None else args.softmax_scale,
        causal=causal,
        return_lse=args.lse,
        window_left=left,
        window_right=-1 if causal else right,
        attention_chunk=args.attention_chunk,
        softcap=args.softcap,
        sink=args.sink,
        qv=args.qv,
        pack_gqa=args.pack_gqa,
        sm_margin=args.sm_margin,
        out_dtype=out_dtype,
        q_block=q_block,
        k_block=k_block,
        v_transposed=args.v_transposed,
        two_level=args.two_level,
        qk_dtype="int8" if args.qk_dtype == "int8" else "",
    )


def mask_words(problem: Problem) -> str:
    """Which keys a query sees, by the bounds that are in force."""
    left, right, chunk = problem.bounds
    if problem.mask == "full":
        asked = problem.causal or problem.attention_chunk or (problem.window_left, problem.window_right) != (-1, -1)
        return f"full: every query sees all {problem.seqlen_k} keys" + (", what was asked hides none" if asked else "")
    shift = problem.seqlen_k - problem.seqlen_q
    position = "p = i" + (f" {'+' if shift > 0 else '-'} {abs(shift)}" if shift else "")
    keys = ["keys"]
    if left >= 0:
        keys.append("from p" + (f" - {left}" if left else "") + (" on" if right < 0 else ""))
    if right >= 0:
        keys.append(("to p" if left >= 0 else "up to p") + (f" + {right}" if right else ""))
    if chunk:
        keys.append(f"of its chunk, {chunk} keys from {chunk} * floor(p / {chunk}) on")
    return f"{problem.mask}: query i, at position {position}, sees {' '.join(keys)}"


def packing_words(problem: Problem, packed: bool) -> str:
    """Whether query heads share tiles, and who said so."""
    if problem.group_size == 1:
        return "no: each query head has a K/V head of its own"
    who = "the plan's choice" if problem.pack_gqa is None else "as asked"
    if packed:
        return f"yes, {who}: the {problem.group_size} query heads of a K/V head share tiles"
    if problem.dtype == "e4m3":
        return "no: kernels of e4m3 pack no heads"
    return "no, though asked for: kernels with qv pack no heads" if problem.pack_gqa else f"no, {who}"


def _device_facts() -> tuple[DeviceFacts, str]:
    """Facts of the Hopper GPU, or of an assumed H200, and its name."""
    import torch

    from fa3.plan import H200

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return H200, f"an assumed {H200.name}"
    from fa3.backends import hopper

    facts = hopper.device_facts(torch.device("cuda", torch.cuda.current_device()))
    return facts, facts.name


def _artifact(spec: KernelSpec) -> dict[str, Any]:
    """Where the artifact is and what is known about it; or that it is not there, and what the first call does."""
    from fa3.compiler.build import require_compiler
    from fa3.compiler.store import default_store

    try:
        store = default_store()
        path = store.find(spec)
        facts = store.facts(spec)
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
    facts, card = _device_facts()
    no_plan = planning.why_not(problem)
    if no_plan is None and problem.seqlen_k == 0:
        no_plan = "there is no key, so out is 0 without a kernel"
    flops, bytes_moved, pairs = planning.flops(problem), planning.bytes_moved(problem), planning.visible_pairs(problem)
    limits = roofline(
        flops=flops,
        # One for each score, and at least one more for the tanh of a cap.
        exponentials=problem.batch * problem.heads_q * pairs * (2 if problem.softcap else 1),
        bytes_moved=bytes_moved,
        device=facts,
        dtype=problem.dtype,
    )
    result: dict[str, Any] = {
        "problem": asdict(problem),
        "mask": mask_words(problem),
        "visible_pairs": pairs,
        "first_row_with_keys": problem.first_row_with_keys,
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
    result["gradients"] = _gradients(problem, facts)
    if no_plan is not None:
        return {**result, "plan": None, "no_plan": no_plan}
    planned = planning.plan(problem, facts)
    result["plan"] = {
        "spec": planned.spec.as_dict(),
        "name": planned.spec.name,
        "threads": planned.spec.threads,
        "shared_bytes": planned.spec.shared_bytes,
        "grid_blocks": planned.order.blocks,
        "column_parts": [
            min(planning.MAX_COLUMNS, problem.head_dim_v - first)
            for first in range(0, problem.head_dim_v, planning.MAX_COLUMNS)
        ],
        "packing": packing_words(problem, planned.spec.pack_gqa),
        "order": asdict(planned.order),
        "reasons": list(planned.reasons),
    }
    result["artifact"] = _artifact(planned.spec)
    if planned.transpose is not None:
        result["plan"]["before"] = planned.transpose.name
        result["artifact_before"] = _artifact(planned.transpose)
    return result


def _gradients(problem: Problem, facts: DeviceFacts) -> dict[str, Any]:
    """The plan of the gradients, or why there is none."""
    from fa3.backward_plan import plan_backward, why_no_backward
    from fa3.mods import derivative_of

    if problem.dtype == "e4m3":
        nothing = "a call in e4m3 has none: flash_attn_fp8_func has those of its 16-bit q, k and v"
        return {"exist": False, "plan": None, "no_plan": nothing}
    derivative = derivative_of(problem.score_mod) if problem.score_mod else ""
    missing = why_no_backward(problem)
    if missing is None and problem.score_mod and not derivative:
        missing = f"score_mod {problem.score_mod} names no derivative"
    if missing is not None:
        return {"exist": True, "plan": None, "no_plan": missing}
    planned = plan_backward(problem, facts, derivative)
    return {
        "exist": True,
        "plan": [spec.name for spec in (planned.prepare, planned.main, planned.finish)],
        "parts": planned.parts,
        "grid_blocks": planned.order.blocks,
        "reasons": list(planned.reasons),
        "flops": planned.flops,
    }


def _gradient_lines(gradients: dict[str, Any]) -> list[str]:
    """Kernels of the gradients, and why."""
    if not gradients["exist"]:
        return [gradients["no_plan"]]
    if gradients["plan"] is None:
        return [f"the hopper backend has no kernels for them, PyTorch computes them in tiles: {gradients['no_plan']}"]
    return [
        f"kernels {', '.join(gradients['plan'])}",
        *(f"- {reason}" for reason in gradients["reasons"]),
        f"{gradients['flops'] / 1e9:,.2f} GFLOP",
    ]


def _lines(said: dict[str, Any]) -> list[str]:
    """The explanation as text, from the call down to the chip."""
    planned, limits, bits = said["plan"], said["roofline"], 8 if said["problem"]["dtype"] == "e4m3" else 16
    lines = ["flash_attn_func", *(f"  {line}" for line in _call_lines(said))]
    lines += ["", f"backend here: {said['backend']}", f"  {said['backend_reason']}"]
    lines += ["", f"plan for {said['planned_for']}"]
    if planned is None:
        lines.append(f"  the hopper backend has none: {said['no_plan']}")
    else:
        lines += [f"  {line}" for line in _plan_lines(said["problem"], planned)]
        for name in ("artifact_before", "artifact"):
            if name in said:
                of_pass = " of the pass before" if name != "artifact" else ""
                lines += ["", f"artifact{of_pass}: {said[name]['state']}"]
                lines += [f"  {line}" for line in _artifact_lines(said[name])]
    lines += ["", "gradients", *(f"  {line}" for line in _gradient_lines(said["gradients"]))]
    lines += [
        "",
        "work",
        f"  {said['flops'] / 1e9:,.2f} GFLOP for the pairs that are seen, {said['bytes'] / 1e6:,.2f} MB moved at "
        f"least; the matrix of scores that is never made: {said['score_matrix_bytes'] / 1e6:,.1f} MB in float32",
        f"  least time on {limits['sm_count']} SMs at {limits['clock_mhz']:.0f} MHz "
        f"and {limits['bytes_per_second'] / 1e12:.1f} TB/s:",
        f"    tensor cores {limits['tensor_us']:10,.2f} us   ({bits}-bit)",
        f"    exponentials {limits['exp_us']:10,.2f} us",
        f"    memory       {limits['memory_us']:10,.2f} us",
        f"  bound by {limits['bound']}",
    ]
    return lines


def _call_lines(said: dict[str, Any]) -> list[str]:
    """Shapes, mask and options of the call."""
    problem = said["problem"]
    batch, rows, keys, heads = (problem[name] for name in ("batch", "seqlen_q", "seqlen_k", "heads_q"))
    lines = [
        f"q    ({batch}, {rows}, {heads}, {problem['head_dim']}) {problem['qk_dtype'] or problem['dtype']}",
        f"k    ({batch}, {keys}, {problem['heads_kv']}, {problem['head_dim']})",
        _v_line(problem),
    ]
    lines += _scale_lines(problem) if problem["dtype"] == "e4m3" else []
    lines += [f"qv   ({batch}, {rows}, {heads}, {problem['head_dim_v']})"] if problem["qv"] else []
    lines += [f"sink ({heads},)"] if problem["sink"] else []
    lines += [f"mask {said['mask']}"]
    pairs, share = said["visible_pairs"], said["visible_pairs"] / max(rows * keys, 1)
    lines += [f"     {pairs:,} of {rows * keys:,} (query, key) pairs of a head are seen: {share:.1%}"]
    if said["first_row_with_keys"]:
        lse = "their head's sink" if problem["sink"] else "-inf"
        lines += [f"     the first {said['first_row_with_keys']:,} queries see no key: out 0, LSE {lse}"]
    cap = f"; softcap {problem['softcap']:g}" if problem["softcap"] else ""
    return [*lines, f"softmax_scale {problem['softmax_scale']:.6g}{cap}"]


def _v_line(problem: dict[str, Any]) -> str:
    batch, keys, heads, columns = (problem[name] for name in ("batch", "seqlen_k", "heads_kv", "head_dim_v"))
    dtype = f" {problem['dtype']}" if problem["qk_dtype"] else ""
    if problem["v_transposed"]:
        return f"V^T  ({batch}, {heads}, {columns}, {keys + -keys % 16}){dtype}"
    return f"v    ({batch}, {keys}, {heads}, {columns}){dtype}"


def _scale_lines(problem: dict[str, Any]) -> list[str]:
    """Scales of e4m3, and what out is."""
    shared = "scales of q, k and v: one a head"
    if problem["q_block"]:
        shared = f"scales: of {problem['q_block']} rows of q, of {problem['k_block']} of k and v"
    return [shared, f"out  {problem['out_dtype']}"]


def _plan_lines(problem: dict[str, Any], planned: dict[str, Any]) -> list[str]:
    """Spec, tile class, packing, order and launch, and why."""
    spec, order, parts = planned["spec"], planned["order"], planned["column_parts"]
    dims, launches = f"head dims {problem['head_dim']} and {problem['head_dim_v']}", "one launch"
    if len(parts) > 1:
        dims += f"; columns of v in {len(parts)} parts, {' and '.join(map(str, parts))}, each with the scores anew"
        launches = f"{len(parts)} launches"
    before = [f"spec of a pass before: {planned['before']}"] if "before" in planned else []
    return [
        *before,
        f"spec {planned['name']}",
        f"tile class ({spec['head_dim']}, {spec['head_dim_v']}) for {dims}",
        f"packed heads: {planned['packing']}",
        *(f"- {reason}" for reason in planned["reasons"]),
        f"order: heads side by side: {order['section']}, query tiles of each before the next: {order['levels']:,}",
        f"{launches} of {planned['grid_blocks']:,} blocks of {planned['threads']} threads, "
        f"{planned['shared_bytes']:,} bytes of shared memory each",
    ]


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
