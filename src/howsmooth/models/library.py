"""Dealing with the transformers library: quietly, and without running code that comes with a model."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from howsmooth.errors import BadInputError

_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "merges.txt")


@contextmanager
def quiet() -> Iterator[None]:
    """The library's progress bars and remarks on loading kept back, and its settings as they were afterwards."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def tokenizer_of(where: str) -> Any:
    """The tokenizer beside a model's weights."""
    from transformers import AutoTokenizer

    folder = Path(where)
    local = folder.is_dir()
    if local and not any(next(folder.glob(pattern), None) for pattern in _TOKENIZERS):  # the library would make an empty one
        raise BadInputError(f"expected a tokenizer beside the model, got none in {where!r}; save it there or pass ids")
    with quiet():
        try:
            return AutoTokenizer.from_pretrained(where, local_files_only=local, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
            raise BadInputError(
                f"expected a tokenizer beside the model, got none in {where!r} ({first_line(error)}); pass ids"
            ) from None
