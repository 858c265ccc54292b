"""Tables and pictures of README, docs/backward.md and docs/fp8.md, from the files in benchmarks/results alone.

    python scripts/make_figures.py           write docs/images and the blocks between the pages' markers
    python scripts/make_figures.py --check   write nothing; exit code 1 if a block is not up to date

Of several result files of one kind the one with the latest date counts. What has no file yet is left out, and the
script says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
README = ROOT / "README.md"
BACKWARD = ROOT / "docs" / "backward.md"
FP8 = ROOT / "docs" / "fp8.md"

#: Kind -> (file, result).
Results = dict[str, tuple[Path, dict[str, Any]]]

#: Kind of a result file -> the picture made of it, and its alternative text.
PICTURES = {
    "speed": ("speed.png", "Forward speed of fa3 and of its peers by sequence length"),
    "ablation": ("ablation.png", "The switches of the schedule, off and on"),
    "host": ("host.png", "Host time of one call"),
    "speed-bwd": ("backward.png", "Backward speed of fa3 and of its peers by sequence length"),
    "training": ("training.png", "Losses and step times of a small GPT with fa3 and with other attention"),
    "accuracy": ("fp8-accuracy.svg", "Errors of attention in e4m3 and in 16 bits by sequence length"),
    "fp8-speed": ("fp8-speed.svg", "Speed of attention in e4m3 and in bf16 by sequence length"),
}
#: Kinds of result files that are shown.
KINDS = (*PICTURES, "odd", "gqa-bwd", "speed-fwd+bwd")
#: Columns of the tables, in this order.
IMPLS = ("fa3", "fa3-det", "official", "fa4", "cudnn", "fa2")
TABLE_SEQLENS = (1024, 4096, 16384)
#: Of the errors of e4m3: sequence lengths, and head dim and length at which kinds of data are compared.
ACCURACY_SEQLENS = (1024, 8192, 32768, 131072)
ACCURACY_CASE = (128, 8192)
#: Columns of the speed of e4m3, and what the rows of its quantize pass are called.
FP8_COLUMNS = {
    "official": "official",
    "fa3-rows": "v in rows",
    "fa3-transposed": "V^T",
    "fa3-blocks": "V^T, blocks",
    "fa3-int8": "V^T, blocks, int8 scores",
    "fa3-two-level": "V^T, two levels",
    "fa3-bf16": "bf16",
}
FP8_PASSES = {
    "q-blocks": "q, rotated, a scale a block",
    "q-blocks-rope": "q, RoPE, rotated, a scale a block",
    "k-blocks-rope": "k, RoPE, rotated, a scale a block",
    "q-int8-rope": "q in int8, RoPE, rotated, a scale a block",
    "v-rows": "v in rows, a scale a block",
    "v-transposed": "V^T, a scale a block",
    "q-head": "q, rotated, a scale a head",
    "copy": "copy",
}
#: Short and odd shapes that the README shows, the first of the file; the file has them all.
TABLE_SHAPES = 8


def latest(folder: Path) -> Results:
    """Kind -> (file, result) of the latest measurement on a GPU of each kind."""
    found: Results = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        kind = result.get("kind")
        if kind not in KINDS or not result["rows"] or result["gpu"] is None:
            continue
        # The speed that is shown is that of bf16; a training run has no rows of one dtype.
        if kind.startswith(("speed", "gqa")) and any(row["dtype"] != "bf16" for row in result["rows"]):
            continue
        if kind not in found or result["date"] > found[kind][1]["date"]:
            found[kind] = (path, result)
    return found


def speed_table(result: dict[str, Any], heads_shown: bool = False) -> list[str]:
    """Markdown table of burst TFLOPS; the fastest of a line is bold. Of gradients, also fa3's ratio to cuDNN."""
    rows = [row for row in result["rows"] if row["regime"] == "burst"]
    ratios = any("to_cudnn" in row for row in rows)
    impls = [impl for impl in IMPLS if any(row["impl"] == impl for row in rows)]
    heads_column, ratio_column = "heads/K/V heads | " if heads_shown else "", " fa3 / cudnn |" if ratios else ""
    lines = [
        f"| head dim | {heads_column}mask | sequence | " + " | ".join(impls) + " |" + ratio_column,
        "| --- | --- | --- |" + " --- |" * (len(impls) + heads_shown + ratios),
    ]
    # The heads of a grid's cells follow from their head dim.
    cells = sorted({(row["d"], row["h"] // row["hk"], row["causal"], row["s"]) for row in rows})
    seqlens = {s for _, _, _, s in cells}
    shown = sorted(seqlens) if heads_shown else [s for s in TABLE_SEQLENS if s in seqlens] or sorted(seqlens)
    for d, group, causal, s in cells:
        if s not in shown:
            continue
        of_cell = [
            row for row in rows if (row["d"], row["h"] // row["hk"], row["causal"], row["s"]) == (d, group, causal, s)
        ]
        speed = {row["impl"]: row["tflops"] for row in of_cell}
        best = max(speed.values())
        texts = [
            "" if impl not in speed else f"**{speed[impl]:.0f}**" if speed[impl] == best else f"{speed[impl]:.0f}"
            for impl in impls
        ]
        ratio = next((row.get("to_cudnn") for row in of_cell if row["impl"] == "fa3"), None)
        heads = f"{of_cell[0]['h']}/{of_cell[0]['hk']} | " if heads_shown else ""
        last = "" if not ratios else "  |" if ratio is None else f" {ratio:.2f} |"
        lines.append(f"| {d} | {heads}{'causal' if causal else 'full'} | {s} | " + " | ".join(texts) + " |" + last)
    return lines


def accuracy_tables(result: dict[str, Any]) -> list[str]:
    """Markdown tables of errors: of the paper's data by head dim and sequence length, and of all kinds at one shape.

    The smallest error of e4m3 in a column is bold; beside it, its ratio to that of exact sums.
    """
    paper = [row for row in result["rows"] if row["data"] == "paper"]
    columns = [(d, s) for d, s in sorted({(row["d"], row["s"]) for row in paper}) if s in ACCURACY_SEQLENS]
    lines = _error_table(paper, columns, lambda row: (row["d"], row["s"]), [f"d {d}, {s}" for d, s in columns])
    one_shape = [row for row in result["rows"] if (row["d"], row["s"]) == ACCURACY_CASE]
    kinds = list(dict.fromkeys(row["data"] for row in one_shape))
    if len(kinds) > 1:
        d, s = ACCURACY_CASE
        lines += ["", f"Other data, head dim {d}, {s} tokens:", ""]
        lines += _error_table(one_shape, kinds, lambda row: row["data"], kinds)
    return [*lines, *_official_table(paper)]


def _official_table(rows: list[dict[str, Any]]) -> list[str]:
    """Errors over those of the official kernel on the same data, both rotated; nothing without such rows."""
    from fa3.cli.accuracy import beside_official, label_of, ratio_text

    group = beside_official(rows)
    if not group:
        return []
    seqlens = sorted({row["s"] for row in group})
    lines = ["", "Errors over those of the official kernel, both with rotated q and k of the paper's data; ± is one"]
    lines += ["standard error, over heads of several seeds:", ""]
    lines += ["| | head dim | " + " | ".join(map(str, seqlens)) + " |", "| --- | --- |" + " --- |" * len(seqlens)]
    for label, d in dict.fromkeys((label_of(row), row["d"]) for row in group):
        found = {row["s"]: row for row in group if (label_of(row), row["d"]) == (label, d)}
        lines.append(f"| {label} | {d} | " + " | ".join(ratio_text(found.get(s)) for s in seqlens) + " |")
    return lines


def _error_table(
    rows: list[dict[str, Any]], columns: list[Any], column_of: Callable[[dict[str, Any]], Any], names: list[str]
) -> list[str]:
    from fa3.cli.accuracy import label_of

    lines = ["| | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(columns)]
    best = {
        column: min(
            (
                row["rmse"]
                for row in rows
                if column_of(row) == column and row["dtype"] == "e4m3" and row["impl"] != "exact sums"
            ),
            default=None,
        )
        for column in columns
    }
    for label in dict.fromkeys(map(label_of, rows)):
        found = {column_of(row): row for row in rows if label_of(row) == label}
        texts = []
        for column in columns:
            row = found.get(column)
            text = "" if row is None else f"{row['rmse']:.2e}"
            if row is not None and row["rmse"] == best[column] and row["impl"] != "exact sums":
                text = f"**{text}**"
            ratio = None if row is None else row["to_exact_sums"]
            texts.append(text if ratio is None else f"{text} ({ratio:.2f})")
        if any(texts):
            lines.append(f"| {label} | " + " | ".join(texts) + " |")
    return lines


def fp8_attention_table(result: dict[str, Any], regime: str = "burst") -> list[str]:
    """Markdown table of TFLOPS of e4m3, in steady state with clock and power; the fastest of a line is bold.

    Beside them the speed of v in rows, which the official kernel reads too, and of the fastest e4m3 of fa3, as a
    multiple of the official one's.
    """
    rows = [row for row in result["rows"] if (row["part"], row["regime"]) == ("attention", regime)]
    impls = [impl for impl in FP8_COLUMNS if any(row["impl"] == impl for row in rows)]
    names = [FP8_COLUMNS[impl] for impl in impls]
    lines = [
        "| head dim | mask | sequence | " + " | ".join(names) + " | rows / official | best / official |",
        "| --- | --- | --- |" + " --- |" * (len(impls) + 2),
    ]
    for d, causal, s in sorted({(row["d"], row["causal"], row["s"]) for row in rows}):
        if s not in TABLE_SEQLENS:
            continue
        found = {row["impl"]: row for row in rows if (row["d"], row["causal"], row["s"]) == (d, causal, s)}
        fastest = max(row["tflops"] for row in found.values())
        texts = []
        for impl in impls:
            row = found.get(impl)
            if row is None:
                texts.append("")
                continue
            text = f"**{row['tflops']:.0f}**" if row["tflops"] == fastest else f"{row['tflops']:.0f}"
            if regime == "steady" and row["clock_mhz"] and row["watts"]:
                text += f" ({row['clock_mhz']:.0f} MHz, {row['watts']:.0f} W)"
            texts.append(text)
        ours = {
            impl: row["to_official"]
            for impl, row in found.items()
            if impl.startswith("fa3") and row["dtype"] == "e4m3" and row["to_official"]
        }
        ratios = [ours.get("fa3-rows"), max(ours.values(), default=None)]
        texts += ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        lines.append(f"| {d} | {'causal' if causal else 'full'} | {s} | " + " | ".join(texts) + " |")
    return lines


def fp8_quantize_table(result: dict[str, Any]) -> list[str]:
    """Markdown table of the quantize pass: GB/s, and the share of a copy's."""
    rows = [row for row in result["rows"] if row["part"] == "quantize"]
    head_dims = sorted({row["d"] for row in rows})
    lines = ["| | " + " | ".join(f"head dim {d}" for d in head_dims) + " |", "| --- |" + " --- |" * len(head_dims)]
    for name, words in FP8_PASSES.items():
        found = {row["d"]: row for row in rows if row["impl"] == name}
        texts = [f"{found[d]['gb_per_s']:.0f} ({found[d]['of_copy']:.2f})" if d in found else "" for d in head_dims]
        lines.append(f"| {words} | " + " | ".join(texts) + " |")
    return lines


def fp8_end_to_end_table(result: dict[str, Any]) -> list[str]:
    """Markdown table of RoPE and attention together: milliseconds in bf16 and in FP8, and how many times as fast.

    Behind it, how many times as fast FP8 is without sums in float32, and with int8 scores.
    """
    rows = [row for row in result["rows"] if row["part"] == "end-to-end"]
    seqlens = sorted({row["s"] for row in rows})
    lines = [
        "| head dim | mask | " + " | ".join(str(s) for s in seqlens) + " |",
        "| --- | --- |" + " --- |" * len(seqlens),
    ]
    for d, causal in sorted({(row["d"], row["causal"]) for row in rows}):
        texts = []
        for s in seqlens:
            found = {row["impl"]: row for row in rows if (row["d"], row["causal"], row["s"]) == (d, causal, s)}
            both = "bf16" in found and "fp8" in found
            times = f"{found['bf16']['ms']:.2f} → {found['fp8']['ms']:.2f}" if both else ""
            ratios = [f"{found[name]['to_bf16']:.2f}" for name in ("fp8", "fp8-one-level", "fp8-int8") if name in found]
            texts.append(f"{times} ({', '.join(ratios)})" if both else "")
        lines.append(f"| {d} | {'causal' if causal else 'full'} | " + " | ".join(texts) + " |")
    return lines


def training_table(result: dict[str, Any]) -> list[str]:
    """Markdown table of the runs of a small GPT: loss, time of a step, tokens a second, memory."""
    lines = ["| attention | last loss | ms a step | tokens/s | memory at its peak, GB |", "| --- |" + " --- |" * 4]
    window = result["config"]["window"]
    for row in result["rows"]:
        name = row["impl"] if row["impl"] == row["attention"] else f"{row['impl']} ({row['attention']})"
        loss = statistics.fmean(row["loss"][-window:])
        memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f}"
        lines.append(f"| {name} | {loss:.4f} | {row['step_ms']:.1f} | {row['tokens_per_second']} | {memory} |")
    return lines


def agreement(result: dict[str, Any]) -> str:
    """A sentence on how near the losses of all runs are."""
    apart = result["agreement"]
    return (
        f"Largest difference of losses, averaged over {apart['window']} steps: fa3 from math {apart['fa3-math']:.4f}, "
        f"PyTorch's fastest from math {apart['best-math']:.4f}, that one from itself with the batch split "
        f"{apart['split-best']:.4f}."
    )


def origin(path: Path, result: dict[str, Any], root: str = "") -> str:
    """One line that says where a picture or a table comes from; ``root`` leads from the page to the root."""
    versions = ", ".join(f"{impl}: {version}" for impl, version in result["impls"].items())
    return (
        f"{result['gpu']}, driver {result['driver']}, CUDA {result['cuda']}, torch {result['torch']}, "
        f"CuTe DSL {result['cutlass']}, {result['date'][:10]}, commit `{result['commit'][:12]}`; "
        f"`{result['command']}`{'; ' if versions else ''}{versions}. "
        f"[{path.name}]({root}benchmarks/results/{path.name})"
    )


def host_table(result: dict[str, Any]) -> list[str]:
    """Markdown table of host time."""
    rows = result["rows"]
    return [
        "| " + " | ".join(row["impl"] for row in rows) + " |",
        "|" + " --- |" * len(rows),
        "| " + " | ".join(f"{row['host_us']:.1f}" for row in rows) + " |",
    ]


def odd_table(result: dict[str, Any]) -> list[str]:
    """Markdown table of short and odd shapes: microseconds of a call in a row of calls, host included."""
    rows = result["rows"]
    impls = [impl for impl in IMPLS if any(row["impl"] == impl for row in rows)]
    lines = [
        "| batch, sequence, heads/K/V heads, head dim | mask | " + " | ".join(impls) + " |",
        "| --- | --- |" + " --- |" * len(impls),
    ]
    fields = ("b", "s", "h", "hk", "d", "dv", "causal", "window")
    shapes = list(dict.fromkeys(tuple(row[field] for field in fields) for row in rows))
    for shape in shapes[:TABLE_SHAPES]:
        b, s, h, hk, d, dv, causal, window = shape
        times = {row["impl"]: row["call_us"] for row in rows if tuple(row[field] for field in fields) == shape}
        best = min(times.values())
        texts = [
            "" if impl not in times else f"**{times[impl]:.0f}**" if times[impl] == best else f"{times[impl]:.0f}"
            for impl in impls
        ]
        dims = f"{d}" if d == dv else f"{d}/{dv}"
        mask = f"window {window}" if window else "causal" if causal else "full"
        lines.append(f"| {b}, {s}, {h}/{hk}, {dims} | {mask} | " + " | ".join(texts) + " |")
    return lines


def block(results: Results) -> str:
    """The README's block on speed."""
    lines: list[str] = []
    if "speed" in results:
        path, result = results["speed"]
        lines += [f"![{PICTURES['speed'][1]}](docs/images/speed.png)", ""]
        lines += ["Forward, TFLOPS in short bursts, 16k tokens in all, bold is the fastest of the line:", ""]
        lines += [*speed_table(result), "", origin(path, result), ""]
    if "odd" in results:
        path, result = results["odd"]
        lines += ["Short and odd shapes, microseconds of a call in a row of calls, the host's time included:", ""]
        lines += [*odd_table(result), "", origin(path, result), ""]
    if "ablation" in results:
        path, result = results["ablation"]
        lines += [f"![{PICTURES['ablation'][1]}](docs/images/ablation.png)", "", origin(path, result), ""]
    if "host" in results:
        path, result = results["host"]
        lines += ["Host time of one call in microseconds, GPU not waited for:", "", *host_table(result), ""]
        lines += [origin(path, result), ""]
    return _block("speed", lines)


def markers(name: str) -> tuple[str, str]:
    """What stands before and behind a block."""
    return f"<!-- {name}: written by scripts/make_figures.py -->", f"<!-- end of {name} -->"


def readme_training(results: Results) -> str:
    """The README's block on gradients and training."""
    return _block("training", _backward_picture(results, "docs/images") + _training_lines(results, "docs/images"))


def backward_page(results: Results) -> str:
    """The block of docs/backward.md."""
    lines = _backward_lines(results, "images", "../")
    if "gqa-bwd" in results:
        path, result = results["gqa-bwd"]
        lines += ["Query heads that share K/V heads, backward, TFLOPS in short bursts:", ""]
        lines += [*speed_table(result, heads_shown=True), "", origin(path, result, "../"), ""]
    if "speed-fwd+bwd" in results:
        path, result = results["speed-fwd+bwd"]
        lines += ["Forward and backward in turn, TFLOPS in short bursts:", ""]
        lines += [*speed_table(result), "", origin(path, result, "../"), ""]
    return _block("backward", lines)


def accuracy_block(results: Results) -> str:
    """The block of docs/fp8.md on errors."""
    lines: list[str] = []
    if "accuracy" in results:
        path, result = results["accuracy"]
        lines += [f"![{PICTURES['accuracy'][1]}](images/{PICTURES['accuracy'][0]})", ""]
        lines += ["Root mean square errors of the paper's data; in parentheses over those of exact sums:", ""]
        lines += [*accuracy_tables(result), "", origin(path, result, "../"), ""]
    return _block("fp8-accuracy", lines)


def fp8_speed_block(results: Results) -> str:
    """The block of docs/fp8.md on speed."""
    lines: list[str] = []
    if "fp8-speed" in results:
        path, result = results["fp8-speed"]
        parts = {row["part"] for row in result["rows"]}
        steady = any(row["regime"] == "steady" for row in result["rows"])
        lines += [f"![{PICTURES['fp8-speed'][1]}](images/{PICTURES['fp8-speed'][0]})", ""]
        lines += ["Attention of the same e4m3 numbers, TFLOPS in short bursts, 16k tokens in all; the last columns are"]
        lines += ["multiples of the official kernel's speed:", "", *fp8_attention_table(result), ""]
        if steady:
            lines += ["The same in steady state, at the power limit:", ""]
            lines += [*fp8_attention_table(result, "steady"), ""]
        if "quantize" in parts:
            lines += ["The quantize pass over 64 MiB, GB/s of bytes that must be moved; in parentheses the share of a"]
            lines += ["copy's. A scale a head needs two passes, which read twice and are counted once:", ""]
            lines += [*fp8_quantize_table(result), ""]
        if "end-to-end" in parts:
            lines += ["RoPE and attention of bf16 q, k and v, milliseconds: RoPE in float32 by "]
            lines[-1] += f"{result.get('rope', 'PyTorch')} and"
            lines += [
                "`flash_attn_func` → `flash_attn_fp8_func(rope=...)`; in parentheses how many times as fast as bf16,"
            ]
            lines += ["then with one level of sums, then with int8 scores:", ""]
            lines += [*fp8_end_to_end_table(result), ""]
        lines += [origin(path, result, "../"), ""]
    return _block("fp8-speed", lines)


def _block(name: str, lines: list[str]) -> str:
    begin, end = markers(name)
    lines = lines or ["Not measured yet: no result file of a GPU is in benchmarks/results.", ""]
    return "\n".join([begin, "", *lines, end])


def _backward_picture(results: Results, images: str) -> list[str]:
    if "speed-bwd" not in results:
        return []
    picture = f"![{PICTURES['speed-bwd'][1]}]({images}/backward.png)"
    return [picture, "", "In numbers, and how it is done: [docs/backward.md](docs/backward.md).", ""]


def _backward_lines(results: Results, images: str, root: str = "") -> list[str]:
    if "speed-bwd" not in results:
        return []
    path, result = results["speed-bwd"]
    return [
        f"![{PICTURES['speed-bwd'][1]}]({images}/backward.png)",
        "",
        "Backward alone, TFLOPS in short bursts, 16k tokens in all, 2.5 times the FLOPs of the forward:",
        "",
        *speed_table(result),
        "",
        origin(path, result, root),
        "",
    ]


def _training_lines(results: Results, images: str, root: str = "") -> list[str]:
    if "training" not in results:
        return []
    path, result = results["training"]
    config = result["config"]
    return [
        f"![{PICTURES['training'][1]}]({images}/training.png)",
        "",
        f"A GPT of {config['layers']} layers and {config['heads']} heads of {config['head_dim']}, batch "
        f"{config['batch']}, {config['seqlen']} tokens each, {config['steps']} steps; same seed, weights and data:",
        "",
        *training_table(result),
        "",
        *([agreement(result), ""] if "agreement" in result else []),
        origin(path, result, root),
        "",
    ]


#: Page -> (name of its block, what writes it).
BLOCKS: tuple[tuple[Path, str, Callable[[Results], str]], ...] = (
    (README, "speed", block),
    (README, "training", readme_training),
    (BACKWARD, "backward", backward_page),
    (FP8, "fp8-accuracy", accuracy_block),
    (FP8, "fp8-speed", fp8_speed_block),
)


def updated(page: str, new_block: str, name: str = "speed") -> str:
    """The page with its block replaced. Raises ``ValueError`` if the markers are not there once each."""
    begin, end = markers(name)
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must hold each of the markers {begin!r} and {end!r} once")
    before, rest = page.split(begin)
    return before + new_block + rest.split(end)[1]


def draw(results: Results, images: Path) -> None:
    """Write the pictures of all kinds that have a result file, and say which have none."""
    from fa3.cli import plots

    for kind, (name, _) in PICTURES.items():
        if kind not in results:
            print(f"{name} skipped: no result file of kind {kind}")
            continue
        path, result = results[kind]
        plots.save(plots.figure_of(result), images / name)
        print(f"docs/images/{name} from {path.name}")


def main() -> int:
    """Write, or check, pages and pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    results = latest(RESULTS)
    pages = {path: path.read_text() for path, _, _ in BLOCKS}
    wanted = dict(pages)
    for path, name, write in BLOCKS:
        wanted[path] = updated(wanted[path], write(results), name)
    if args.check:
        missing = [
            PICTURES[kind][0] for kind in results if kind in PICTURES and not (IMAGES / PICTURES[kind][0]).exists()
        ]
        stale = [path.name for path in pages if pages[path] != wanted[path]] + missing
        if stale:
            print(f"{', '.join(stale)} not up to date: run `make figures`", file=sys.stderr)
        return 1 if stale else 0
    draw(results, IMAGES)
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
