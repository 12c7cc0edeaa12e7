"""Dealing with the transformers library: quietly, and without running code that comes with a model."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from howsmooth.errors import BadInputError, foreign, reason
from howsmooth.models.folder import tokenizer_room

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


@contextmanager
def offline() -> Iterator[None]:
    """No network, whatever a folder asks for."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def runs(name: str) -> Iterator[None]:
    """Inside it, what a model's own code raises is told in one sentence. name: the model's."""
    try:
        yield
    except Exception as error:
        if not foreign(error):
            raise
        raise BadInputError(
            f"expected inputs that {name} runs on, got {type(error).__name__} from it ({reason(error)[:160]}); check their "
            "shapes and kinds"
        ) from error  # where in the module it happened is worth knowing


def tokenizer_of(where: str) -> Any:
    """The tokenizer beside a model's weights."""
    folder = Path(where)
    if not folder.is_dir():
        return _tokenizer(where, where)
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZERS):  # the library would make an empty one
        raise BadInputError(f"expected a tokenizer beside the model, got none in {where!r}; save it there or pass ids")
    try:
        with tokenizer_room(folder) as room, offline():
            return _tokenizer(str(room), where)
    except OSError as error:
        raise BadInputError(f"expected a tokenizer that can be read, got {where!r} ({error.strerror}); pass ids") from None


def _tokenizer(where: str, name: str) -> Any:
    from transformers import AutoTokenizer

    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        except Exception as error:  # its files may make the library raise anything
            raise BadInputError(
                f"expected a tokenizer beside the model, got none in {name!r} ({reason(error)}); pass ids"
            ) from None
    tokenizer.name_or_path = name
    return tokenizer
