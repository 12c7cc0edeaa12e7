"""A run written down: loggers of trainers, alarms, the file and its page."""

import json
import math
import shutil
import sqlite3
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import howsmooth as hs
from checks import violations
from howsmooth.report.answer import plain
from howsmooth.run import to_frame
from howsmooth.training import Alarm, Raised, Recorder, TrackingWarning
from howsmooth.training.run_page import RunRecord, write_run_page
from howsmooth_command import app
from marks import first


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        loss = self.head(self.layers(x)).square().mean()
        return {"loss": loss} if labels is not None else loss


X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


def recorder(**more: Any) -> Recorder:
    model = more.pop("model", None) or Tiny()
    return Recorder(hs.Tracker(model, X[:1], check_every=2), more.pop("every", 2), **more)


def test_every_so_many_steps():
    logged: list[dict[str, float]] = []
    record = recorder(log=logged.append)
    answers = [record(step, loss=1.0) for step in range(5)]
    assert [bool(a) for a in answers] == [True, False, True, False, True]
    assert logged == [a for a in answers if a]
    assert record(4) == {}  # the same step again, as under gradient accumulation


def test_alarms_go_off_once():
    model = Tiny()
    record = recorder(model=model, every=1, alarms=[Alarm("constant", above=1e-3), Alarm("entropy", below=1e-9)])
    with pytest.warns(
        TrackingWarning, match=r"step 0: constant of layer \d is .*, above 0.001; on_alarm='stop' ends"
    ) as caught:
        record(0)
    assert {w.filename for w in caught} == {__file__}  # where the recorder was called, however deep the warning is
    record(1)
    assert [(r.layer, r.quantity) for r in record.raised] == [(0, "constant"), (1, "constant")]
    assert not record.stopped


def test_alarms_can_stop_or_call():
    told: list[Raised] = []
    record = recorder(alarms=[Alarm("radius", above=1e-3)], on_alarm=told.append)
    record(0)
    assert {r.layer for r in told} == {0, 1}
    record = recorder(alarms=[Alarm("sink", above=1e-3)], on_alarm="stop")
    with pytest.warns(TrackingWarning):
        record(0)
    assert record.stopped


def kept(folder: Any, broken: bool = False) -> Any:
    model: Any = Tiny()
    with recorder(model=model, folder=folder, alarms=[Alarm("max_logit", above=1e-6)], on_alarm=lambda _: None) as record:
        for step in range(8):
            if broken and step == 6:
                with torch.no_grad():
                    model.layers.layers[1].self_attn.in_proj_weight[0, 0] = torch.nan
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TrackingWarning)
                record(step, loss=3.0 / (step + 1))
    return folder


@pytest.mark.slow
def test_the_file_is_read_back_and_refused_when_damaged(tmp_path):
    kept(tmp_path)
    frame = to_frame(tmp_path / "smoothness.sqlite")
    assert frame["step"].tolist() == [0, 2, 4, 6]
    assert frame["loss"].tolist() == [3.0, 1.0, 0.6, 3 / 7]
    assert min(frame["smoothness/layer_01"].tolist()) > 0
    with pytest.raises(hs.HowSmoothError, match=r"pass resume=True .* to continue it, or choose another name"):
        recorder(folder=tmp_path)
    with pytest.raises(hs.HowSmoothError, match="expected resume or force, got both"):
        recorder(folder=tmp_path, resume=True, force=True)
    with recorder(folder=tmp_path, resume=True) as record:
        record(8)
    assert RunRecord.of(tmp_path).steps == (0, 2, 4, 6, 8)
    with sqlite3.connect(tmp_path / "smoothness.sqlite") as db:
        db.execute("UPDATE results SET value = replace(value, '3.0', '2.0')")
    with pytest.raises(hs.HowSmoothError, match="checksums"):
        RunRecord.of(tmp_path)


@pytest.mark.slow
def test_a_run_can_begin_anew(tmp_path):
    kept(tmp_path)
    with recorder(folder=tmp_path, force=True) as record:
        record(2)
    assert to_frame(tmp_path / "smoothness.sqlite")["step"].tolist() == [2]


@pytest.mark.slow
def test_page_and_command(tmp_path):
    kept(tmp_path / "run<1>", broken=True)
    ended = CliRunner().invoke(app(), ["training", str(tmp_path / "run<1>")])
    assert ended.exit_code == 0, ended.output
    assert "layer 1 is no longer finite" in ended.stdout or "alarms" in ended.stdout
    page = (tmp_path / "run<1>" / "smoothness.html").read_text()
    assert "run<1>" not in page
    assert "step 6: layer 1 is no longer finite" in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [c["name"] for c in data["curves"]] == ["loss", "constant", "max_logit", "entropy", "sink", "radius"]
    assert data["table"][1]["last"] is None
    told = json.loads(CliRunner().invoke(app(), ["training", str(tmp_path / "run<1>"), "--json"]).stdout)
    assert told["steps"] == [0, 2, 4, 6]
    assert told["series"]["constant"]["1"][-1] is None
    refused = CliRunner().invoke(app(), ["training", str(tmp_path)])
    assert refused.exit_code == 2
    assert "expected smoothness.sqlite of a recorder" in refused.stderr
    (tmp_path / "mine.html").write_text("mine")
    refused = CliRunner().invoke(app(), ["training", str(tmp_path / "run<1>"), "--out", str(tmp_path / "mine.html")])
    assert refused.exit_code == 2
    assert (tmp_path / "mine.html").read_text() == "mine"


def exploded() -> RunRecord:
    """A run whose layer 0 grows a hundredfold as its logits do."""
    steps = tuple(range(0, 50, 10))
    series: dict[str, dict[int, list[float | None]]] = {
        "": {0: [0.4, 0.7, 1.5, 12.0, 40.0], 1: [1.0, 1.0, 1.1, 1.1, 1.2]},
        "max_logit": {0: [3.0, 8.0, 20.0, 45.0, 90.0], 1: [2.0] * 5},
        "entropy": {0: [2.1, 2.0, 1.5, 0.6, 0.1], 1: [2.1] * 5},
        "radius": {0: [9.0] * 5, 1: [9.0] * 5},
    }
    alarms = ((30, 0, "max_logit", "step 30: max_logit of layer 0 is 45, above 30"),)
    return RunRecord(Path("run"), steps, (3.0, 2.8, 2.5, 2.4, 2.6), series, alarms, (), {})


def test_the_first_screen_of_a_run_says_what_grew_when_why_and_what_to_do():
    which, when, why, do = map(plain, exploded().sentences())
    assert which == (
        "Layer 0 grew most: 100-fold. How much it amplifies the worst small change went from 0.4 to 40, in 5 updates from "
        "step 0 to step 40."
    )
    assert when == (
        "When: L had doubled by step 20. 1 alarm went off, the first at step 30: max_logit of layer 0 is 45, above 30. The "
        "loss "
        "went from 3 to 2.6."
    )
    assert why == "Why: in layer 0 the largest logit went from 3 to 90, the entropy of attention went from 2.1 to 0.1."
    assert do.startswith("What to do: Cap the logits with `howsmooth.clip_(model, probe, 30, quantity='logit')`")


def test_a_calm_run_needs_nothing_and_a_broken_one_goes_back():
    calm = replace(exploded(), series={"": {0: [1.0] * 5, 1: [2.0] * 5}}, alarms=(), losses=(None,) * 5)
    said = [plain(sentence) for sentence in calm.sentences()]
    assert said[0] == "No layer grew. L stayed within 5 % of where it began, in 5 updates from step 0 to step 40."
    assert said[1:] == [
        "When: L never doubled, and no alarm went off.",
        "Why: neither logits, attention nor the size of the tokens changed much there.",
        "What to do: Nothing has to be done.",
    ]
    broken = replace(exploded(), series={"": {0: [0.4, 0.7, 1.5, 12.0, None], 1: [1.0] * 5}})
    which, *_, do = map(plain, broken.sentences())
    assert which.startswith("Layer 0 is no longer finite. Layer 0 grew most: 30-fold.")
    assert do.startswith("What to do: Go back to weights from before that step")
    nothing = replace(exploded(), series={"": {0: [None] * 5}})
    assert plain(nothing.sentences()[0]).startswith("Nothing was measured in 5 updates")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), first([(1280, "light"), (390, "dark")], 2))
def test_the_page_of_a_run_is_accessible_and_calm(tmp_path, width, scheme):
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright runs this")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium found; install the package chromium to run this")
    page, said = write_run_page(exploded(), tmp_path / "run.html"), []
    with api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        tab.on("console", lambda m: said.append(m.text))
        tab.on("pageerror", lambda e: said.append(str(e)))
        tab.goto(page.as_uri())
        assert violations(tab) == []
        assert tab.inner_text(".answer").startswith("Layer 0 grew most: 100-fold.")
        assert tab.input_value("[data-pick=layer]") == "0"
        tab.locator("[data-chart=constant] svg").focus()
        tab.keyboard.press("ArrowRight")
        assert tab.inner_text(".tip").startswith("layer ")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
    assert said == []


@pytest.mark.slow
def test_the_trainer_of_transformers(tmp_path):
    from transformers import Trainer, TrainingArguments

    from howsmooth.training.huggingface import HuggingFaceCallback

    def run(tracked: bool) -> tuple[list[float], Any]:
        data = [{"x": X[i % 4], "labels": torch.tensor(0)} for i in range(16)]
        args = TrainingArguments(
            str(tmp_path / "out"), max_steps=4, logging_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=1,
        )  # fmt: skip
        model = Tiny()
        trainer = Trainer(model, args, train_dataset=data)
        if tracked:
            HuggingFaceCallback.into(trainer, recorder(model=model, folder=tmp_path / "run"))
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row], trainer.state.log_history

    plain, _ = run(False)
    tracked, history = run(True)
    assert plain == tracked
    assert len(plain) == 4
    logged = [row for row in history if "smoothness/layer_01" in row]
    assert [row["step"] for row in logged] == [2, 4]
    assert RunRecord.of(tmp_path / "run").steps[-2:] == (2, 4)
    assert math.isfinite(RunRecord.of(tmp_path / "run").losses[-1] or math.nan)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed; pip install lightning runs this")
    from lightning.pytorch.loggers import CSVLogger

    from howsmooth.training.in_lightning import LightningCallback

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Tiny()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(tracked: bool) -> Any:
        task = Task()
        callback = LightningCallback(recorder(model=task.model, folder=tmp_path / "run")) if tracked else None
        trainer = lightning.Trainer(
            max_steps=4, accumulate_grad_batches=2, accelerator="cpu", logger=CSVLogger(tmp_path / f"log{tracked}"),
            callbacks=[callback] if callback else [], enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False,
        )  # fmt: skip
        data = torch.utils.data.TensorDataset(X.repeat(8, 1, 1))
        trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=4))
        return task.state_dict()

    plain, tracked = run(False), run(True)
    assert all(torch.equal(plain[k], tracked[k]) for k in plain)
    table = next((tmp_path / "logTrue").rglob("metrics.csv")).read_text()
    assert "smoothness/layer_01" in table
    assert RunRecord.of(tmp_path / "run").steps[-2:] == (2, 4)


def test_bad_input(tmp_path):
    with pytest.raises(hs.HowSmoothError, match="expected either above or below"):
        Alarm("constant")
    with pytest.raises(hs.HowSmoothError, match="expected a quantity among"):
        Alarm("loss", above=1.0)
    with pytest.raises(hs.HowSmoothError, match="above 0"):
        Alarm("constant", above=0.0)
    with pytest.raises(hs.HowSmoothError, match="expected a Tracker"):
        Recorder(Tiny())  # pyright: ignore[reportArgumentType]
    with pytest.raises(hs.HowSmoothError, match="at least 1"):
        recorder(every=0)
