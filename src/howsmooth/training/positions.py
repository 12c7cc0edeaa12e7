"""What transformers reads off the positions of a batch, remembered where the same batch comes again.

It asks whether several sequences lie behind each other in a row, and waits for the device to know. In a run that trains, the
device is busy with the step before, and would then have nothing to do while the next commands are prepared.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final
from unittest import mock

import torch
from torch import Tensor

_MODULE, _NAME = "transformers.masking_utils", "find_packed_sequence_indices"


@final
@dataclass(eq=False)
class Positions:
    """Of one batch, by the order in which they are asked about: positions and what was found."""

    _known: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    _same: list[Tensor] = field(default_factory=list)

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Inside it, what is known is answered at once, and whether the question was the same is looked up by `held`."""
        self._same = []
        library = importlib.import_module(_MODULE) if _MODULE in sys.modules else None
        find: Callable[[Tensor], Tensor | None] | None = getattr(library, _NAME, None)
        if find is None:
            yield
            return
        asked, own = iter(range(sys.maxsize)), threading.get_ident()

        def found(positions: Tensor) -> Tensor | None:
            if threading.get_ident() != own:  # which runs another model meanwhile
                return find(positions)
            i = next(asked)
            if i < len(self._known) and self._known[i][0].shape == positions.shape:
                kept, answer = self._known[i]
                self._same.append((kept == positions).all())
                return answer
            answer = find(positions)
            self._known[i:] = [(positions.clone(), answer)]
            return answer

        with mock.patch.object(library, _NAME, found):
            yield

    def held(self) -> bool:
        """Whether all positions were those that are remembered; what is not is forgotten."""
        if self._same and not bool(torch.stack(self._same).all()):
            self._known = []
            return False
        return True
