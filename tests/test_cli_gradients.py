"""``fa3 bench --direction``: gradients of every implementation, their ratios and goals; and figures of them."""

import json
import os

import pytest
import torch

import fa3
from command_line import empty_store, figures_script, on_cpu, result, row  # noqa: F401
from fa3.cli import bench, gradients, measure, peers, plots
from fa3.cli.main import main
from test_cli_bench import bench_arguments

CPU = torch.device("cpu")


def backward_rows(**ms):
    """Rows of one cell, d 128, full, 16k: an implementation each."""
    rows = [row(name.replace("_", "-"), direction="bwd", ms=each, tflops=1100 / each) for name, each in ms.items()]
    gradients.add_ratios(rows)
    return rows


class TestDirections:
    @pytest.mark.parametrize("direction", ["bwd", "fwd+bwd"])
    @pytest.mark.parametrize("heads_first", [False, True])
    def test_a_call_returns_the_gradients_of_its_inputs_and_does_so_again(self, direction, heads_first):
        q, k, v = (torch.randn(2, 48, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
        forward = peers._sdpa if heads_first else peers._flash_attn_func("fa3")
        call = gradients.differentiated(forward, direction, heads_first)(q, k, v, True)
        first, again = call(), call()
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        dout = torch.randn(2, 48, 4, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        out, _ = fa3.reference(*leaves, causal=True)
        expected = torch.autograd.grad(out, leaves, dout)
        for gradient, once_more, right in zip(first, again, expected, strict=True):
            torch.testing.assert_close(gradient, right)
            torch.testing.assert_close(once_more, right)

    def test_of_the_backward_alone_the_forward_is_done_once(self):
        asked = []

        def prepare(q, k, v, causal):
            def attend():
                asked.append(q.requires_grad)
                return (q * k * v, None)

            return attend

        tensors = [torch.randn(1, 4, 1, 8) for _ in range(3)]
        for direction, count in (("bwd", 1), ("fwd+bwd", 3)):
            asked.clear()
            call = gradients.differentiated(prepare, direction, False)(*tensors, False)
            for _ in range(3):
                call()
            assert asked == [True] * count

    def test_an_implementation_whose_gradients_are_wrong_is_noted(self):
        def scaled(q, k, v, causal):
            return lambda: fa3.flash_attn_func(q, k, 1.1 * v, causal=causal)

        cell = measure.make_cell(64, True, 128, 128, 64)
        impls = [
            peers.Impl(name, "1", gradients.differentiated(prepare, "bwd", False), direction="bwd")
            for name, prepare in (("tiled", peers._flash_attn_func("fa3")), ("fa3", scaled), ("fa4", lambda *_: list))
        ]
        notes = []
        entrants = measure.enter(
            [(impl, None) for impl in impls], cell, measure.inputs(cell, torch.float32, CPU), CPU, notes
        )
        assert [entrant.impl.name for entrant in entrants] == ["tiled", "fa3"]
        assert notes[0].startswith("64-causal-128: fa3 differs from tiled: dv: 0.1000 of its norm")
        assert notes[1].startswith("64-causal-128: fa4 left out: ")

    def test_gradients_that_are_no_numbers_disagree(self):
        good, bad = torch.ones(3), torch.full((3,), torch.nan)
        assert gradients.disagreement([good] * 3, [good] * 3) is None
        assert gradients.disagreement([good, bad, good], [good] * 3) == "dk: nan"

    @on_cpu
    def test_the_tiled_backend_is_asked_for_by_its_name_and_only_then(self, monkeypatch):
        monkeypatch.setenv("FA3_BACKEND", "hopper")
        (impl,), _ = peers.find(CPU, ("tiled",), "bwd")
        with impl.context():
            assert os.environ["FA3_BACKEND"] == "tiled"
            call = impl.prepare(*(torch.randn(1, 8, 1, 8) for _ in range(3)), False)
            assert len(call()) == 3
        assert os.environ["FA3_BACKEND"] == "hopper"
        monkeypatch.delenv("FA3_BACKEND")
        with impl.context():
            assert os.environ["FA3_BACKEND"] == "tiled"
        assert "FA3_BACKEND" not in os.environ

    def test_on_a_gpu_determinism_is_a_row_of_gradients_alone(self):
        gpu = torch.device("cuda")
        found, missing = peers.find(gpu, ("fa3", "fa3-det"), "fwd")
        assert [impl.name for impl in found] == ["fa3"]
        assert missing == {"fa3-det": "forward the same as fa3"}
        found, _ = peers.find(gpu, ("fa3", "fa3-det"), "bwd")
        assert [(impl.name, impl.direction) for impl in found] == [("fa3", "bwd"), ("fa3-det", "bwd")]
        q, k, v = (torch.randn(1, 8, 1, 8) for _ in range(3))
        assert found[1].prepare(q, k, v, True)()[0].shape == q.shape
        assert "fa3-det" not in {impl.name for impl in peers.find(gpu)[0]} | set(peers.find(gpu)[1])

    def test_deterministic_gradients_are_asked_for_as_such(self, monkeypatch):
        asked = []
        monkeypatch.setattr(fa3, "flash_attn_func", lambda q, k, v, **options: asked.append(options))
        peers._deterministic(None, None, None, True)()
        assert asked == [{"causal": True, "deterministic": True}]

    def test_flops_are_those_of_five_products(self):
        cell = measure.make_cell(128, False, 16384, 16384, 2048)
        speed = {}
        for direction in gradients.DIRECTIONS:
            impl = peers.Impl("fa3", "1", lambda q, k, v, causal: list, direction=direction)
            entry = measure.row(measure.Entrant(impl, [], 3.0), cell, "bf16", measure.Sample(3.0), "burst")
            assert entry["direction"] == direction
            speed[direction] = entry["tflops"]
        assert speed["bwd"] == pytest.approx(2.5 * speed["fwd"], rel=1e-4)
        assert speed["fwd+bwd"] == pytest.approx(3.5 * speed["fwd"], rel=1e-4)


class TestRatios:
    def test_fa3_is_compared_with_cudnn_and_with_the_best_peer_of_its_regime(self):
        rows = backward_rows(fa3=2.0, fa3_det=2.5, cudnn=3.0, fa2=2.2)
        steady = [dict(entry, regime="steady", ms=2 * entry["ms"]) for entry in rows[:1]]
        gradients.add_ratios([*rows, *steady])
        ours, deterministic, cudnn, _ = rows
        assert (ours["to_cudnn"], ours["to_best_peer"], ours["goal"]) == (1.5, 1.1, 1.13)
        assert (deterministic["to_cudnn"], deterministic["to_best_peer"]) == (1.2, 0.88)
        assert "to_cudnn" not in cudnn
        assert (steady[0]["to_cudnn"], steady[0]["to_best_peer"]) == (None, None)

    def test_a_goal_is_met_or_missed_or_there_is_none(self):
        assert gradients.verdict(backward_rows(fa3=2.0, cudnn=2.26)[0]) == "met"
        assert gradients.verdict(backward_rows(fa3=2.0, cudnn=2.25)[0]) == "missed"
        assert gradients.verdict(backward_rows(fa3=2.0, fa2=2.25)[0]) == ""
        for change in ({"direction": "fwd+bwd"}, {"hk": 8}, {"s": 2048}, {"b": 2}, {"dtype": "fp16"}, {"d": 96}):
            assert gradients.goal_of(row(**{"direction": "bwd", **change})) is None

    def test_every_cell_of_the_default_grid_has_a_goal(self):
        cells = bench._choose_cells(bench_arguments("--direction", "bwd"), on_gpu=True)
        assert len(cells) == 18
        impl = peers.Impl("fa3", "1", lambda q, k, v, causal: list, direction="bwd")
        entries = [
            measure.row(measure.Entrant(impl, [], 1.0), cell, "bf16", measure.Sample(1.0), "burst") for cell in cells
        ]
        assert all(gradients.goal_of(entry) > 1.0 for entry in entries)

    def test_gqa_has_few_kv_heads_at_its_own_lengths(self):
        cells = bench._choose_cells(bench_arguments("--gqa"), on_gpu=True)
        shapes = {(cell.batch, cell.seqlen, cell.heads, cell.heads_kv, cell.head_dim, cell.causal) for cell in cells}
        assert {(8, 2048, 32, 8, 128, True), (8, 2048, 16, 1, 128, True), (1, 16384, 16, 1, 128, False)} < shapes
        tensors = measure.inputs(measure.Cell(8, True, 16, 1, 4, 2), torch.float32, CPU)
        assert [tuple(x.shape) for x in tensors[0]] == [(1, 16, 4, 8), (1, 16, 2, 8), (1, 16, 2, 8)]


class TestRun:
    @on_cpu
    @pytest.mark.parametrize("direction", ["bwd", "fwd+bwd"])
    def test_its_file_has_the_rows_of_the_forward_and_the_ratios(self, tmp_path, capsys, direction):
        file, picture = tmp_path / "bwd.json", tmp_path / "bwd.png"
        arguments = ["bench", "--direction", direction, "--quick", "--tokens", "128", "--hidden", "64"]
        arguments += ["--cells", "64-full-128,64-causal-64", "--json", str(file), "--png", str(picture)]
        assert main(arguments) == 0
        written = json.loads(file.read_text())
        assert written["kind"] == f"speed-{direction}"
        assert [(entry["impl"], entry["direction"]) for entry in written["rows"]] == [("tiled", direction)] * 2
        assert set(row()) | {"to_cudnn", "to_best_peer"} == set(written["rows"][0])
        assert written["notes"] == ["no GPU"]
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"CPU, {direction}, burst, TFLOPS" in capsys.readouterr().out

    @on_cpu
    def test_the_time_limit_counts_here_too(self, tmp_path):
        file = tmp_path / "none.json"
        arguments = ["bench", "--direction", "bwd", "--cells", "64-full-128", "--limit", "-1", "--json", str(file)]
        assert main(arguments) == 1
        assert json.loads(file.read_text())["notes"][-1] == "stopped after -1 s: 1 cells not measured"

    @on_cpu
    def test_gqa_is_a_run_of_its_own_kind_in_every_direction(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(gradients, "GQA_HEAD_DIM", 16)
        monkeypatch.setattr(gradients, "GQA_SHAPES", (gradients.GqaShape(1, 32, 4, 2, True),))
        for direction, kind in (("fwd", "gqa"), ("bwd", "gqa-bwd")):
            file, picture = tmp_path / f"{kind}.json", tmp_path / f"{kind}.png"
            arguments = ["bench", "--gqa", "--direction", direction, "--quick"]
            assert main([*arguments, "--json", str(file), "--png", str(picture)]) == 0
            written = json.loads(file.read_text())
            assert written["kind"] == kind
            assert [(entry["h"], entry["hk"]) for entry in written["rows"]] == [(4, 2)]
            assert "4/2 heads" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "refusal"),
        [
            (["--gqa", "--cells", "128-full-512"], "--cells: --gqa has no use for it"),
            (["--gqa", "--head-dims", "64"], "--head-dims: --gqa has no use for it"),
            (["--host", "--direction", "bwd"], "--direction bwd: --host measures the forward alone"),
            (["--sweep", "--direction", "fwd+bwd"], "--direction fwd+bwd: --sweep measures the forward alone"),
        ],
        ids=" ".join,
    )
    def test_what_would_change_nothing_is_refused(self, capsys, arguments, refusal):
        assert main(["bench", *arguments]) == 2
        assert capsys.readouterr().err == f"fa3 bench: {refusal}\n"

    def test_the_table_has_a_line_a_cell_with_ratio_goal_and_verdict(self, capsys):
        slow = [dict(entry, causal=True) for entry in backward_rows(fa3=3.0, cudnn=2.0, fa2=4.0)]
        gradients.add_ratios(slow)
        drawn = result("speed-bwd", [*backward_rows(fa3=2.0, fa3_det=2.5, cudnn=3.0, fa2=2.2), *slow])
        drawn["impls"] = dict.fromkeys(("fa3", "fa3-det", "cudnn", "fa2"), "1")
        bench.print_result(drawn, "bwd")
        lines = [line.split() for line in capsys.readouterr().out.splitlines() if "128-" in line]
        assert [line[1] for line in lines] == ["128-full-16384", "128-causal-16384"]
        assert "1.500 1.13 met 1.100" in " ".join(lines[0])
        assert "0.667 1.10 missed 0.667" in " ".join(lines[1])


def backward_result(kind="speed-bwd", rows=None, **changes):
    return {**result(kind, rows or backward_rows(fa3=2.0, fa3_det=2.5, cudnn=3.0, fa2=2.2)), **changes}


class TestFigures:
    @pytest.mark.parametrize("kind", ["speed-bwd", "speed-fwd+bwd", "gqa-bwd"])
    def test_every_kind_can_be_drawn(self, kind, tmp_path):
        plots.save(plots.figure_of(backward_result(kind)), tmp_path / "drawn.png")
        assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")

    def test_shapes_of_other_heads_are_other_panels(self):
        rows = [row(direction="bwd", h=heads, hk=heads_kv) for heads, heads_kv in ((16, 16), (32, 8), (16, 1))]
        figure = plots.figure_of(backward_result("gqa-bwd", rows))
        titles = [axes.get_title() for axes in figure.axes]
        assert titles == [
            "head dim 128, full, bf16", "head dim 128, 32/8 heads, full, bf16", "head dim 128, 16/1 heads, full, bf16"
        ]  # fmt: skip

    def test_the_table_has_the_ratio_to_cudnn(self, tmp_path):
        (tmp_path / "bwd.json").write_text(json.dumps(backward_result()))
        script = figures_script()
        block = script.backward_page(script.latest(tmp_path))
        assert "| head dim | mask | sequence | fa3 | fa3-det | cudnn | fa2 | fa3 / cudnn |" in block
        assert "| 128 | full | 16384 | **550** | 440 | 367 | 500 | 1.50 |" in block

    def test_the_page_of_the_backward_has_those_of_few_kv_heads_too(self, tmp_path):
        rows = backward_rows(fa3=2.0, cudnn=2.5)
        (tmp_path / "gqa.json").write_text(json.dumps(backward_result("gqa-bwd", [{**each, "hk": 1} for each in rows])))
        script = figures_script()
        block = script.backward_page(script.latest(tmp_path))
        assert "| 128 | 16/1 | full | 16384 | **550** | 440 | 1.25 |" in block
        assert "(../benchmarks/results/gqa.json)" in block

    def test_without_result_files_the_pages_say_so(self, tmp_path, capsys):
        script = figures_script()
        results = script.latest(tmp_path)
        assert "Not measured yet" in script.readme_training(results)
        assert "Not measured yet" in script.backward_page(results)
        script.draw(results, tmp_path / "images")
        assert "backward.png skipped: no result file of kind speed-bwd" in capsys.readouterr().out
        assert not (tmp_path / "images").exists()
