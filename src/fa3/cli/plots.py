"""Pictures of result files and of the demo, with matplotlib (the extra ``bench``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa3.errors import FA3Error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fa3.cli.demo import Measured

Row = dict[str, Any]

#: One colour an implementation, in every picture; fa3 stands out, the peers keep back.
COLOURS = {
    "fa3": "#d1495b",
    "fa3-det": "#e8a4ad",
    "official": "#30638e",
    "fa4": "#4f9d9d",
    "cudnn": "#7fb069",
    "fa2": "#b7b7b7",
    "tiled": "#d1495b",
    # Those of e4m3.
    "fa3-rows": "#e8a4ad",
    "fa3-transposed": "#d1495b",
    "fa3-blocks": "#8f2d3b",
    "fa3-int8": "#7a5195",
    "fa3-two-level": "#edae49",
    "fa3-bf16": "#5a5a5a",
    # Those of a training run.
    "math": "#30638e",
    "best": "#7fb069",
    "best-split": "#c5dbb9",
}
LABELS = {
    "fa3": "fa3",
    "fa3-det": "fa3, deterministic",
    "official": "official FlashAttention-3",
    "fa4": "flash-attn-4",
    "cudnn": "cuDNN (SDPA)",
    "fa2": "FlashAttention-2 (SDPA)",
    "tiled": "fa3, tiled backend",
    "fa3-rows": "fa3, v in rows",
    "fa3-transposed": "fa3, V^T",
    "fa3-blocks": "fa3, V^T, scales of blocks",
    "fa3-int8": "fa3, V^T, scales of blocks, int8 scores",
    "fa3-two-level": "fa3, V^T, two levels",
    "fa3-bf16": "fa3 in bf16",
}


def available() -> bool:
    """Is matplotlib installed."""
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def require() -> None:
    """Raise ``FA3Error`` with the remedy where matplotlib is not installed."""
    if not available():
        raise FA3Error("pictures need matplotlib: pip install matplotlib")


def _new_figure(width: float, height: float) -> Figure:
    require()
    # The object itself and not pyplot: no window system is asked for, and no state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, or by the file's name an SVG; the same figure gives the same bytes."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        with rc_context({"svg.hashsalt": "fa3"}):
            figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    else:
        figure.savefig(path, dpi=150, format="png", metadata={"Software": None})


def figure_of(result: Row, regime: str | None = None) -> Figure:
    """The picture that fits a result file: speed or errors by length, the schedule, host time, a training run."""
    rows = result["rows"]
    if not rows:
        raise ValueError("the result file has no rows to draw")
    if result["kind"] == "training":
        return _training(rows, _subtitle(result))
    if result["kind"] == "accuracy":
        return _accuracy(rows, _subtitle(result))
    if result["kind"] == "fp8-speed":
        return _fp8_speed(rows, _subtitle(result))
    if result["kind"] == "host":
        return _bars(
            [LABELS[row["impl"]] for row in rows],
            [row["host_us"] for row in rows],
            [COLOURS[row["impl"]] for row in rows],
            "host time of one call, microseconds",
            _subtitle(result),
        )
    if regime is None:
        regime = "burst"
    rows = [row for row in rows if row["regime"] == regime]
    if result["kind"] == "ablation":
        return _bars(
            [_schedule(row["spec"]) if "spec" in row else LABELS[row["impl"]] for row in rows],
            [row["tflops"] for row in rows],
            [COLOURS[row["impl"]] for row in rows],
            f"TFLOPS, {regime}",
            _subtitle(result),
        )
    direction = {"fwd": "", "bwd": "backward, ", "fwd+bwd": "forward and backward, "}[rows[0]["direction"]]
    return _speed(rows, f"{_subtitle(result)}, {direction}{regime}")


def _schedule(name: str) -> str:
    """The schedule in words, from the name of a spec: ``..._192x80x3_wpot8``."""
    found = re.search(r"_(\d+x\d+x\d+)_([a-z]+?)t([0-9.]+)$", name)
    if found is None:
        return name
    tiles, letters, threshold = found.groups()
    words = {"w": "warp specialized", "p": "ping-pong", "o": "overlap"}
    switches = ["serial"] if letters == "serial" else [words[letter] for letter in letters if letter in words]
    return f"{' + '.join(switches)} ({tiles}, threshold {threshold})"


def _subtitle(result: Row) -> str:
    driver = f", driver {result['driver']}" if result["driver"] else ""
    return f"{result['gpu'] or 'CPU'}{driver}, torch {result['torch']}, {result['date'][:10]}"


def _speed(rows: Sequence[Row], title: str) -> Figure:
    """One panel for each head dim, share of K/V heads and mask, one group of bars for each sequence length."""
    columns = sorted({(row["d"], row["h"] // row["hk"]) for row in rows})
    masks = sorted({row["causal"] for row in rows})
    impls = [name for name in COLOURS if any(row["impl"] == name for row in rows)]
    figure = _new_figure(4.6 * len(columns), 3.0 * len(masks) + 0.8)
    panels = figure.subplots(len(masks), len(columns), squeeze=False, sharey=True)
    for panel_row, causal in zip(panels, masks, strict=True):
        for axes, (head_dim, group) in zip(panel_row, columns, strict=True):
            cells = [
                row for row in rows if (row["d"], row["h"] // row["hk"], row["causal"]) == (head_dim, group, causal)
            ]
            seqlens = sorted({row["s"] for row in cells})
            for index, impl in enumerate(impls):
                found = [row for row in cells if row["impl"] == impl]
                width = 0.84 / len(impls)
                axes.bar(
                    [seqlens.index(row["s"]) + (index - (len(impls) - 1) / 2) * width for row in found],
                    [row["tflops"] for row in found],
                    width * 0.92,
                    color=COLOURS[impl],
                    label=LABELS[impl],
                )
            dtypes = "/".join(sorted({row["dtype"] for row in cells}))
            heads = "".join(sorted({f", {row['h']}/{row['hk']} heads" for row in cells if group > 1}))
            axes.set_title(f"head dim {head_dim}{heads}, {'causal' if causal else 'full'}, {dtypes}", fontsize=10)
            axes.set_xticks(range(len(seqlens)), [_short(seqlen) for seqlen in seqlens])
            _plain(axes)
        panel_row[0].set_ylabel("TFLOPS")
    for axes in panels[-1]:
        axes.set_xlabel("sequence length")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title, fontsize=10)
    return figure


def _fp8_speed(rows: Sequence[Row], title: str) -> Figure:
    """Panels as of other speed: attention alone, at head dims that several lengths were measured at."""
    found = [row for row in rows if row["part"] == "attention" and row["regime"] == "burst"]
    lengths: dict[int, set[int]] = {}
    for row in found:
        lengths.setdefault(row["d"], set()).add(row["s"])
    most = max((len(seqlens) for seqlens in lengths.values()), default=0)
    if not most:
        raise ValueError("the result file has no rows of attention to draw")
    shown = [row for row in found if most == 1 or len(lengths[row["d"]]) > 1]
    return _speed(shown, f"{title}, e4m3 and bf16, burst")


def _bars(labels: Sequence[str], values: Sequence[float], colours: Sequence[str], unit: str, title: str) -> Figure:
    figure = _new_figure(8.0, 0.42 * len(labels) + 1.2)
    axes = figure.subplots()
    places = range(len(labels))
    bars = axes.barh(places, values, color=list(colours), height=0.72)
    axes.bar_label(bars, fmt="%.0f" if max(values) >= 100 else "%.1f", padding=3, fontsize=9)
    axes.set_yticks(places, labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.margins(x=0.1)
    _plain(axes)
    figure.suptitle(title, fontsize=10)
    return figure


#: Curves of the errors of e4m3: (impl, dtype, of q and k, scales, incoherent, two_level) -> (label, colour, kind of
#: line).
_ERRORS: dict[tuple[Any, ...], tuple[str, str, str]] = {
    ("official", "e4m3", "e4m3", "tensor", False, None): ("official e4m3", COLOURS["official"], "-"),
    ("official", "e4m3", "e4m3", "tensor", True, None): ("official e4m3, incoherent", COLOURS["fa4"], "-"),
    ("fa3", "e4m3", "e4m3", "block", True, False): ("fa3 e4m3, one level", COLOURS["fa3-det"], "-"),
    ("fa3", "e4m3", "e4m3", "block", True, True): ("fa3 e4m3, two levels", COLOURS["fa3"], "-"),
    ("fa3", "e4m3", "int8", "block", True, True): ("fa3 int8 scores, two levels", COLOURS["fa3"], "--"),
    ("exact sums", "e4m3", "e4m3", "block", True, None): ("the same with exact sums", COLOURS["fa3"], ":"),
    ("fa3", "bf16", "bf16", "", False, None): ("fa3 bf16", "#5a5a5a", "-"),
    ("fa3", "fp16", "fp16", "", False, None): ("fa3 fp16", COLOURS["fa2"], "-"),
}


def _accuracy(rows: Sequence[Row], title: str) -> Figure:
    """One panel for each head dim: errors of the paper's data by sequence length."""
    rows = [row for row in rows if row["data"] == "paper"] or list(rows)
    head_dims = sorted({row["d"] for row in rows})
    figure = _new_figure(4.2 * len(head_dims), 4.0)
    panels = figure.subplots(1, len(head_dims), squeeze=False, sharey=True)[0]
    handles: dict[str, Any] = {}
    for axes, head_dim in zip(panels, head_dims, strict=True):
        seqlens = sorted({row["s"] for row in rows if row["d"] == head_dim})
        for key, (label, colour, style) in _ERRORS.items():
            found = {row["s"]: row["rmse"] for row in rows if row["d"] == head_dim and _error_key(row) == key}
            if found:
                places = [seqlens.index(s) for s in sorted(found)]
                errors = [found[s] for s in sorted(found)]
                (handles[label],) = axes.plot(places, errors, style, color=colour, marker="o", markersize=3)
        axes.set_yscale("log")
        axes.set_title(f"head dim {head_dim}", fontsize=10)
        axes.set_xticks(range(len(seqlens)), [_short(seqlen) for seqlen in seqlens])
        axes.set_xlabel("sequence length")
        _plain(axes)
    panels[0].set_ylabel("root mean square error")
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title, fontsize=10)
    return figure


def _error_key(row: Row) -> tuple[Any, ...]:
    of_qk = row.get("qk_dtype", row["dtype"])
    return (row["impl"], row["dtype"], of_qk, row["scales"], row["incoherent"], row["two_level"])


def _training(rows: Sequence[Row], title: str) -> Figure:
    """Two panels: the losses, one over the other, and the time of a step."""
    figure = _new_figure(10.5, 4.0)
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1.0))
    for index, row in enumerate(rows):
        # Curves that agree hide each other, so the first ones are wide.
        width = 1.0 + 1.2 * (len(rows) - 1 - index)
        left.plot(row["loss"], color=COLOURS[row["impl"]], label=_attention(row), linewidth=width, alpha=0.8)
    left.set_xlabel("step")
    left.set_ylabel("loss")
    left.legend(frameon=False)
    places = range(len(rows))
    bars = right.barh(
        places, [row["step_ms"] for row in rows], color=[COLOURS[row["impl"]] for row in rows], height=0.7
    )
    right.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
    right.set_yticks(places, [_attention(row) for row in rows], fontsize=9)
    right.invert_yaxis()
    right.set_xlabel("milliseconds of a step, median")
    right.margins(x=0.15)
    for axes in (left, right):
        _plain(axes)
    figure.suptitle(title, fontsize=10)
    return figure


def _attention(row: Row) -> str:
    """What a run of the training script computed attention by."""
    words = {"fa3": "fa3", "math": "SDPA math", "best": f"SDPA {row['attention']}"}
    return words.get(row["impl"], f"SDPA {row['attention']}, batch split")


def _short(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)


def demo_figure(ours: Measured, plain: Measured, title: str) -> Figure:
    """Two panels: how the errors of every output element are spread, and the memory beside the N x N matrix."""
    import numpy as np

    figure = _new_figure(10.5, 4.0)
    left, right = figure.subplots(1, 2)
    largest = max(ours.max_error, plain.max_error)
    bins = np.linspace(0.0, largest, 60)
    for measured, colour in ((plain, COLOURS["fa2"]), (ours, COLOURS["fa3"])):
        left.hist(
            measured.errors.numpy(),
            bins=bins,
            histtype="stepfilled",
            alpha=0.7,
            color=colour,
            label=measured.label,
            log=True,
        )
    left.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
    left.set_xlabel("absolute error against the float64 oracle")
    left.set_ylabel("output elements")
    left.legend(frameon=False)
    names = [ours.label, plain.label]
    megabytes = [ours.extra_bytes / 1e6, plain.extra_bytes / 1e6]
    bars = right.bar(names, megabytes, color=[COLOURS["fa3"], COLOURS["fa2"]], width=0.55)
    right.bar_label(bars, fmt="{:,.0f} MB", padding=3)
    right.set_ylabel("memory of the call at its peak, MB")
    right.margins(y=0.12)
    for axes in (left, right):
        _plain(axes)
    figure.suptitle(title, fontsize=11)
    return figure
