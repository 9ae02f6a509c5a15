"""A callback for Transformers' ``Trainer``, and so for TRL's trainers: weights into inference
servers as they are trained. Needs ``transformers`` with what its Trainer needs.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from torch import nn
from transformers import TrainerCallback

from streamer.api import connect
from streamer.drivers.factory import Servers
from streamer.exceptions import StreamerError, UsageError
from streamer.integrations.replicas import Replicas
from streamer.options import ConnectOptions, Options
from streamer.ranks import Ranks, several_ranks
from streamer.registry import open_source
from streamer.report import Report
from streamer.session import Session
from streamer.source import WeightSource

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

KEPT = 16
"""How many reports a callback keeps."""

log = logging.getLogger("streamer")


class StreamerCallback(TrainerCallback):
    """Pushes the model to one or several inference servers every so many optimizer steps.

        with StreamerCallback("http://localhost:8000").attach(trainer):
            trainer.train()

    A push is made at the end of a step, before evaluation and saving; training goes on when the
    servers serve the new weights, under the version ``step-N``, where N is ``state.global_step``:
    micro-batches of gradient accumulation are no steps. The last step of a training is pushed
    whatever ``every`` is; with ``load_best_model_at_end`` so is the model that was loaded, under
    the version of its own step.

    Every rank has this callback and calls it. What is sharded (FSDP, DTensor) is gathered; of a
    model that each rank holds whole, under DDP, rank 0 sends its own and the others wait. PEFT
    models are merged on the way. See `streamer.open_source` for what can be sent.

    The servers are left at the end of the training, when a push fails, and when the ``with`` block
    ends, whatever ended it. Without ``with``, an error elsewhere in the training leaves the
    connection open until `close`, the next training, or the end of the process.

    ``reports`` holds the reports of the last 16 pushes, of any training. The trainer's next log
    entry after a push gets ``streamer/seconds`` and ``streamer/gb_per_s``.
    """

    def __init__(
        self,
        to: Servers | None,
        *,
        every: int = 1,
        at_start: bool = False,
        on_error: str = "raise",
        source: Callable[[nn.Module], object] = lambda model: model,
        **options: Unpack[ConnectOptions],
    ) -> None:
        """``to`` and ``options`` are those of `streamer.connect`; only rank 0 uses them.

        ``at_start`` also pushes before the first step, to servers that have other weights than the
        model. ``source`` makes what is pushed of the model, on every rank: for servers that hold
        another dtype, ``lambda model: streamer.cast(model, "bfloat16")``. A `WeightSource` that it
        returns is not closed: it may be kept for the next push.

        ``on_error="raise"`` ends the training with the `StreamerError` of a push, and at the start
        if a server cannot be joined, which several ranks only see at their first push.
        ``"warn"`` logs it, trains on, and tries again at the next push; a server that was left in
        the middle of an update answers nothing until then.

        Raises `UsageError` for an argument that cannot be right.
        """
        if every < 1:
            raise UsageError(f"every must be at least 1 step, not {every}")
        if on_error not in ("raise", "warn"):
            raise UsageError(f"on_error must be raise or warn, not {on_error!r}")
        Options.parse(options)
        self._to = to
        self._every = every
        self._at_start = at_start
        self._raise = on_error == "raise"
        self._source = source
        self._options = options
        self._session: Session | None = None
        self._pushed: int | None = None
        self._figures: dict[str, float] = {}
        self.reports: deque[Report] = deque(maxlen=KEPT)

    def attach(self, trainer: Trainer) -> Self:
        """Make it the first callback of ``trainer``, and return it.

        It is then ahead of those of ``report_to``, as Weights & Biases, which are told the figures
        of a push only in this way: `Trainer` puts the ones it is given behind them.
        """
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(other for other in callbacks if other is not self)]
        return self

    def close(self) -> None:
        """Leave the servers. Idempotent; the next training connects anew."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        """Connect, and push if asked to."""
        self.close()
        self._pushed = None
        self._session = (connect if self._raise else Session)(self._to, **self._options)
        if self._at_start:
            self._push(given["model"], state.global_step)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        """Push, if it is the turn of this step."""
        if state.global_step % self._every == 0:
            self._push(given["model"], state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        """Add the figures of the last push to what is logged, once."""
        figures, self._figures = self._figures, {}
        given["logs"].update(figures)
        if state.log_history:  # it has a copy of the logs already
            state.log_history[-1].update(figures)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        """Push what the training ends with, unless the servers have it, and leave them."""
        step = state.global_step
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            step = int(state.best_model_checkpoint.rpartition("-")[2])
        if self._pushed != step:
            self._push(given["model"], step)
        self.close()

    def _push(self, model: nn.Module, step: int) -> None:
        assert self._session is not None
        try:
            with self._opened(model) as source:
                report = self._session.push(source, weight_version=f"step-{step}")
        except StreamerError as error:
            if self._raise:
                self.close()
                raise
            log.warning("step %d was not pushed, and training goes on: %s", step, error)
            return
        except BaseException:
            self.close()
            raise
        self._pushed = step
        self.reports.append(report)
        self._figures = {
            "streamer/seconds": report.seconds.total,
            "streamer/gb_per_s": report.gb_per_s,
        }

    @contextlib.contextmanager
    def _opened(self, model: nn.Module) -> Iterator[WeightSource]:
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            raise UsageError(
                "the model is partitioned by DeepSpeed ZeRO-3, whose parameters cannot be read: "
                "use ZeRO-2, or FSDP"
            )
        made = self._source(model)
        source = open_source(made)
        try:
            replicated = source.ranks is None and several_ranks()
            yield Replicas(source, Ranks.of()) if replicated else source
        finally:
            if source is not made:
                source.close()
