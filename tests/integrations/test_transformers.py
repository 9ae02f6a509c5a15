"""The callback in real trainings of tiny models, against the reference server."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import streamer
from streamer import ServerError, StreamerError, UsageError
from streamer.integrations.transformers import KEPT, StreamerCallback

pytestmark = [
    pytest.mark.usefixtures("no_threads_left"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]

STEPS = 3
PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "transformers.md"


class Recorder(TrainerCallback):
    """A callback behind others, as those of ``report_to`` are: what it is told, and can act."""

    def __init__(self, act: Any = None) -> None:
        self.logs: list[dict[str, float]] = []
        self._act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._act is not None:
            self._act(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.logs.append(dict(given["logs"]))


def make_trainer(
    model: Any, data: Any, folder: Path, *callbacks: TrainerCallback, **options: Any
) -> Trainer:
    values = {"max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1}
    values |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    values |= {"dataloader_pin_memory": False, "learning_rate": 0.01, **options}
    return Trainer(
        model,
        TrainingArguments(str(folder), **values),
        train_dataset=data,
        eval_dataset=data[:2],
        callbacks=list(callbacks),
    )


def versions(callback: StreamerCallback) -> list[str]:
    return [report.weight_version for report in callback.reports]


def test_nothing_imports_transformers() -> None:
    code = "import sys, streamer.integrations; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_step(server: Any, model: Any, data: Any, tmp_path: Path) -> None:
    callback = StreamerCallback(server.url)
    seen: list[tuple[str, bool, bool]] = []

    def look(step: int) -> None:
        seen.append((server.weight_version, server.paused, server.holds(model.state_dict())))

    trainer = make_trainer(
        model, data, tmp_path, callback, Recorder(look), gradient_accumulation_steps=2
    )
    trainer.train()
    assert seen == [(f"step-{step}", False, True) for step in (1, 2, 3)]
    assert versions(callback) == ["step-1", "step-2", "step-3"]
    assert server.calls.count("POST /init_weight_transfer_engine") == 1
    assert server.calls.count("POST /shutdown_weight_transfer_engine") == 1


@pytest.mark.parametrize(
    ("every", "at_start", "expected"),
    [(2, False, [2, 3]), (2, True, [0, 2, 3]), (3, False, [3]), (7, False, [3])],
)
def test_which_steps(
    server: Any,
    model: Any,
    data: Any,
    tmp_path: Path,
    every: int,
    at_start: bool,
    expected: list[int],
) -> None:
    callback = StreamerCallback(server.url, every=every, at_start=at_start)
    make_trainer(model, data, tmp_path, callback).train()
    assert versions(callback) == [f"step-{step}" for step in expected]
    assert server.holds(model.state_dict())


def test_figures(server: Any, model: Any, data: Any, tmp_path: Path) -> None:
    recorder = Recorder()
    callback = StreamerCallback(server.url, every=2)
    trainer = make_trainer(model, data, tmp_path, recorder, callback)
    assert callback.attach(trainer) is callback  # which was behind the recorder
    trainer.train()
    for logs in (recorder.logs, trainer.state.log_history):
        assert ["streamer/seconds" in entry for entry in logs] == [False, True, False, False]
        assert logs[1]["streamer/seconds"] == callback.reports[0].seconds.total
        assert logs[1]["streamer/gb_per_s"] == callback.reports[0].gb_per_s
        assert "loss" in logs[1]


def test_reports_are_bounded(server: Any, model: Any, data: Any, tmp_path: Path) -> None:
    callback = StreamerCallback(server.url)
    make_trainer(model, data, tmp_path, callback, max_steps=KEPT + 2).train()
    assert versions(callback) == [f"step-{step}" for step in range(3, KEPT + 3)]


def test_peft(server: Any, adapted: Any, data: Any, tmp_path: Path) -> None:
    make_trainer(adapted, data, tmp_path, StreamerCallback(server.url)).train()
    assert server.weight_version == "step-3"
    merged = adapted.merge_and_unload().state_dict()
    assert server.holds(merged)


def test_compiled(server: Any, model: Any, data: Any, tmp_path: Path) -> None:
    trainer = make_trainer(
        model, data, tmp_path, StreamerCallback(server.url), torch_compile_backend="eager"
    )
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "OptimizedModule"
    assert server.holds(model.state_dict())


def test_what_is_pushed_can_be_made(server: Any, model: Any, data: Any, tmp_path: Path) -> None:
    callback = StreamerCallback(
        server.url, source=lambda model: streamer.cast(model, "bfloat16"), every=STEPS
    )
    make_trainer(model, data, tmp_path, callback).train()
    assert server.holds({name: value.bfloat16() for name, value in model.state_dict().items()})


def test_a_source_of_the_user_s_own_is_kept(
    server: Any, model: Any, data: Any, tmp_path: Path, make_source: Any
) -> None:
    kept = make_source({"w": torch.arange(4.0)})
    callback = StreamerCallback(server.url, source=lambda model: kept)
    make_trainer(model, data, tmp_path, callback).train()
    assert versions(callback) == ["step-1", "step-2", "step-3"]
    assert kept.closed == 0


def test_what_is_opened_here_is_closed(
    server: Any, model: Any, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []
    monkeypatch.setattr(
        "streamer_module.source.ModuleSource.close", lambda self: closed.append(self)
    )
    make_trainer(model, data, tmp_path, StreamerCallback(server.url)).train()
    assert len(closed) == STEPS


def test_best_model(server: Any, model: Any, data: Any, tmp_path: Path) -> None:
    every_step = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1}
    callback = StreamerCallback(server.url)
    trainer = make_trainer(
        model,
        data,
        tmp_path,
        callback,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first step is the best one
        save_steps=1,
        learning_rate=0.003,
        **every_step,
    )
    trainer.train()
    assert versions(callback) == ["step-1", "step-2", "step-3", "step-1"]
    assert server.holds(model.state_dict())


def test_resumed(server: Any, model: Any, data: Any, tmp_path: Path) -> None:
    make_trainer(model, data, tmp_path, save_strategy="steps", save_steps=1, max_steps=2).train()
    callback = StreamerCallback(server.url, every=2, at_start=True)
    trainer = make_trainer(model, data, tmp_path, callback, max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    assert versions(callback) == ["step-2", "step-4", "step-5"]
    trainer.train()  # once more, from the start
    assert versions(callback)[3:] == ["step-0", "step-2", "step-4", "step-5"]


# What goes wrong


def test_raises(server: Any, model: Any, data: Any, tmp_path: Path) -> None:
    server.fail("/start_weight_update", text="no")
    callback = StreamerCallback(server.url)
    trainer = make_trainer(model, data, tmp_path, callback)
    with pytest.raises(ServerError, match="no"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("streamer")]
    assert not server.paused


def test_nobody_there(unused_url: str, model: Any, data: Any, tmp_path: Path) -> None:
    trainer = make_trainer(model, data, tmp_path, StreamerCallback(unused_url))
    with pytest.raises(StreamerError):
        trainer.train()
    assert trainer.state.global_step == 0


def test_warns_and_tries_again(
    server: Any, model: Any, data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.fail("/start_weight_update", text="not now")
    callback = StreamerCallback(server.url, on_error="warn")
    make_trainer(model, data, tmp_path, callback).train()
    [record] = [record for record in caplog.records if record.name == "streamer"]
    assert "step 1 was not pushed" in record.getMessage()
    assert "not now" in record.getMessage()
    assert versions(callback) == ["step-2", "step-3"]
    assert server.holds(model.state_dict())


def test_the_last_step_is_tried_again(
    server: Any, model: Any, data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = StreamerCallback(server.url, every=3, on_error="warn")

    def refuse(step: int) -> None:
        if step == 2:
            server.fail("/start_weight_update")

    make_trainer(model, data, tmp_path, Recorder(refuse), callback).train()
    assert "step 3 was not pushed" in caplog.text
    assert versions(callback) == ["step-3"]


def test_warns_of_nobody(
    unused_url: str, model: Any, data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = StreamerCallback(unused_url, on_error="warn", at_start=True)
    trainer = make_trainer(model, data, tmp_path, callback)
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert [f"step {step} was not pushed" in caplog.text for step in range(4)] == [True] * 4


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_training_fails(
    server: Any, model: Any, data: Any, tmp_path: Path, error: type[BaseException]
) -> None:
    def fail(step: int) -> None:
        raise error("made to fail")

    trainer = make_trainer(model, data, tmp_path, Recorder(fail))
    with (
        pytest.raises(error, match="made to fail"),
        StreamerCallback(server.url).attach(trainer) as callback,
    ):
        trainer.train()
    assert versions(callback) == ["step-1"]
    assert "POST /shutdown_weight_transfer_engine" in server.calls


def test_interrupted_within_a_push(server: Any, model: Any, data: Any, tmp_path: Path) -> None:
    def interrupt(model: torch.nn.Module) -> object:
        raise KeyboardInterrupt

    trainer = make_trainer(model, data, tmp_path, StreamerCallback(server.url, source=interrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def test_zero_3(server: Any, model: Any, data: Any, tmp_path: Path) -> None:
    next(model.parameters()).ds_id = 0
    trainer = make_trainer(model, data, tmp_path, StreamerCallback(server.url))
    with pytest.raises(UsageError, match="ZeRO-3"):
        trainer.train()


def test_documentation(server: Any, model: Any, data: Any, tmp_path: Path) -> None:
    names = {"trainer": make_trainer(model, data, tmp_path), "streamer": streamer}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(code.replace("http://localhost:8000", server.url), names)
    assert server.weight_version == "step-3"


@pytest.mark.parametrize("wrong", [{"every": 0}, {"on_error": "ignore"}, {"paws": "keep"}])
def test_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        StreamerCallback("http://localhost:8000", **wrong)
