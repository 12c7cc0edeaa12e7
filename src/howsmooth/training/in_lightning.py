"""Lightning's `Trainer`: its loggers get what the tracker says. For `lightning` and for `pytorch_lightning`."""

import sys
from typing import Any, final

from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.training.recorder import Recorder

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _base() -> type:
    """The class of callbacks of the package that is in use, or of the one that is installed."""
    for name in _PACKAGES:
        if name in sys.modules:
            return sys.modules[name].Callback
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        try:
            from pytorch_lightning import Callback
        except ModuleNotFoundError:
            raise BadInputError("expected the package lightning, which is missing; pip install lightning") from None
    return Callback


@final
class LightningCallback(_base()):
    """Calls a recorder after every optimiser step and hands its numbers to the trainer's loggers.

    Args:
        recorder: Called with the number of the step and the last loss.
    """

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        due = trainer.global_step % self.recorder.every == 0
        values = self.recorder(trainer.global_step, float(loss) if due and isinstance(loss, Tensor) else None)
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step=trainer.global_step)
        if self.recorder.stopped:
            trainer.should_stop = True

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.recorder.close()
