"""The `Trainer` of transformers: its loggers get what the tracker says."""

from typing import Any, final

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from howsmooth.training.recorder import Recorder


@final
class HuggingFaceCallback(TrainerCallback):
    """Calls a recorder after every optimiser step and hands its numbers to a trainer's loggers.

    A callback does not know its trainer, so it is told: `HuggingFaceCallback.into(trainer, recorder)` makes one and adds it.

    Args:
        recorder: Called with the number of the step and the last loss.
        trainer: Whose loggers get the numbers.
    """

    def __init__(self, recorder: Recorder, trainer: Trainer):
        self.recorder, self.trainer, self._loss = recorder, trainer, None

    @classmethod
    def into(cls, trainer: Trainer, recorder: Recorder) -> "HuggingFaceCallback":
        """A callback of this trainer, added to it."""
        callback = cls(recorder, trainer)
        trainer.add_callback(callback)
        return callback

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        values = self.recorder(state.global_step, self._loss)
        if values:
            due = control.should_log
            self.trainer.log(values)
            control.should_log = due  # the trainer's own line is still to come
        if self.recorder.stopped:
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        loss = (logs or {}).get("loss")
        self._loss = self._loss if loss is None else float(loss)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.recorder.close()
