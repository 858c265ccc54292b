"""The training script: what it learns, what it writes, and when losses agree."""

import importlib.util
import json
import math
import sys

import pytest
import torch

import fa3
from command_line import ROOT, empty_store, figures_script, on_cpu, result  # noqa: F401
from fa3.cli import plots


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "scripts" / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name.
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_gpt"]


def training_row(name, loss, **changes):
    row = {"impl": name, "attention": name, "step_ms": 10.0, "tokens_per_second": 819, "peak_bytes": 3_000_000_000}
    return {**row, "loss": loss, **changes}


def training_rows(**losses):
    return [training_row(name.replace("_", "-"), loss) for name, loss in losses.items()]


class TestRuns:
    @on_cpu
    def test_losses_fall_and_agree_and_the_file_has_them(self, script, tmp_path, capsys):
        file = tmp_path / "train.json"
        assert script.main(["--tiny", "--compare", "--json", str(file)]) == 0
        written = json.loads(file.read_text())
        assert written["kind"] == "training"
        assert {"gpu", "driver", "torch", "commit", "date", "command", "config", "agreement"} <= set(written)
        assert written["command"] == "python scripts/train_gpt.py --tiny --compare --json train.json"
        assert [row["impl"] for row in written["rows"]] == ["fa3", "math", "best", "best-split"]
        for row in written["rows"]:
            assert len(row["loss"]) == script.TINY.steps
            # Nothing is known at first, and all of it in the same way.
            assert row["loss"][0] == pytest.approx(math.log(script.TINY.vocabulary), abs=0.1)
            assert sum(row["loss"][-4:]) < 0.85 * sum(row["loss"][:4])
            assert row["tokens_per_second"] > 0
        assert written["agreement"]["agrees"] is True
        assert "agrees: True" in capsys.readouterr().out

    @on_cpu
    def test_another_attention_makes_other_losses_and_that_is_seen(self, script, tmp_path, monkeypatch):
        attend = fa3.flash_attn_func
        monkeypatch.setattr(fa3, "flash_attn_func", lambda q, k, v, causal: attend(q, k, v, 0.5, causal))
        file = tmp_path / "train.json"
        assert script.main(["--tiny", "--compare", "--json", str(file)]) == 1
        assert json.loads(file.read_text())["agreement"]["agrees"] is False

    @on_cpu
    def test_gradients_of_one_input_that_are_wrong_are_seen(self, script, tmp_path, monkeypatch):
        attend = fa3.flash_attn_func
        monkeypatch.setattr(fa3, "flash_attn_func", lambda q, k, v, causal: attend(q, k.detach(), v, causal=causal))
        assert script.main(["--tiny", "--compare", "--json", str(tmp_path / "train.json")]) == 1

    @on_cpu
    def test_one_run_writes_a_file_only_where_it_is_told_to(self, script, tmp_path, monkeypatch):
        monkeypatch.setattr(script, "RESULTS", tmp_path / "results")
        assert script.main(["--tiny", "--attention", "math"]) == 0
        assert not (tmp_path / "results").exists()

    def test_a_token_depends_on_the_two_before_it(self, script):
        config = script.Config(steps=40, batch=4, seqlen=512, vocabulary=4)
        data = script.markov_chain(config)
        assert data.shape == (40, 4, 513)
        assert torch.equal(data, script.markov_chain(config))
        rows = data.flatten(0, 1)
        # Entropy of a token, given the one before, and given the two before it.
        entropies = []
        for known in (rows[:, 1:-1], 4 * rows[:, :-2] + rows[:, 1:-1]):
            counts = torch.zeros(16, 4).index_put_((known.flatten(), rows[:, 2:].flatten()), torch.ones(()), True)
            chances = counts / counts.sum(1, keepdim=True)
            entropies.append(-chances[known, rows[:, 2:]].log().mean().item())
        assert entropies[1] < entropies[0] - 0.1

    def test_rotation_depends_on_the_distance_alone(self, script):
        q, k = (torch.randn(1, 1, 1, 8).expand(1, 32, 1, 8) for _ in range(2))
        scores = script.rotated(q)[0, :, 0] @ script.rotated(k)[0, :, 0].T
        torch.testing.assert_close(scores[5, 3], scores[20, 18])
        assert (scores[5, 3] - scores[5, 4]).abs() > 1e-3


class TestAgreement:
    def test_losses_are_compared_over_windows(self, script):
        assert script.difference([1.0, 3.0, 5.0, 5.0], [3.0, 1.0, 5.0, 6.0], 2) == 0.5
        assert math.isnan(script.difference([1.0, 2.0, 3.0, 4.0], [1.0, math.nan, 3.0, 4.0], 2))

    @pytest.mark.parametrize(("loss", "agrees"), [(2.019, True), (2.021, False), (math.nan, False)])
    def test_fa3_may_be_twice_as_far_from_math_as_noise_goes(self, script, loss, agrees):
        rows = training_rows(fa3=[loss] * 4, math=[2.0] * 4, best=[2.01] * 4, best_split=[2.015] * 4)
        verdict = script.agreement(rows, 2)
        assert verdict["bound"] == pytest.approx(0.02)
        assert verdict["agrees"] is agrees

    def test_where_nothing_is_noise_float32_still_rounds(self, script):
        rows = training_rows(fa3=[2.00005] * 4, math=[2.0] * 4, best=[2.0] * 4, best_split=[2.0] * 4)
        assert script.agreement(rows, 2)["agrees"] is True


class TestFigures:
    def training_result(self, script):
        rows = training_rows(fa3=[2.0, 1.5], math=[2.0, 1.5], best=[2.0, 1.5], best_split=[2.0, 1.5])
        rows[2]["attention"] = rows[3]["attention"] = "cudnn"
        config = {"layers": 12, "heads": 12, "head_dim": 64, "batch": 2, "seqlen": 4096, "steps": 2, "window": 2}
        return {
            **result("training", rows),
            "config": config,
            "impls": {},
            "agreement": script.agreement(rows, 2),
        }

    def test_losses_and_step_times_are_drawn(self, script, tmp_path):
        figure = plots.figure_of(self.training_result(script))
        curves, bars = figure.axes
        assert [line.get_label() for line in curves.lines] == [
            "fa3", "SDPA math", "SDPA cudnn", "SDPA cudnn, batch split",
        ]  # fmt: skip
        assert [bar.get_width() for bar in bars.patches] == [10.0] * 4
        plots.save(figure, tmp_path / "training.png")
        assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")

    def test_the_readme_has_the_runs_and_how_near_they_are(self, script, tmp_path):
        (tmp_path / "train.json").write_text(json.dumps(self.training_result(script)))
        figures = figures_script()
        block = figures.readme_training(figures.latest(tmp_path))
        assert "| best (cudnn) | 1.7500 | 10.0 | 819 | 3.0 |" in block
        assert "fa3 from math 0.0000" in block
        assert "`fa3 bench`. [train.json]" in block
        figures.draw(figures.latest(tmp_path), tmp_path / "images")
        assert [path.name for path in (tmp_path / "images").iterdir()] == ["training.png"]
