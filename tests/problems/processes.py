"""Work that several processes do together, over the loopback."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.func import vjp


def together(count: int, work: Callable[..., Any], *args: Any, seconds: float = 120) -> list[Any]:
    """What `work(rank, *args)` gives in each of so many processes; an error's text where it raised, None where it was killed.

    Processes are forks, so `work` may be any function, and answers are what can be pickled.
    """
    vjp(torch.sin, torch.zeros(1))[1](torch.zeros(1))  # imports a compiler, once instead of in each fork
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in range(count)]
        workers = [
            context.Process(target=_one, args=(rank, count, f"{folder}/store", ends[rank][1], work, args), daemon=True)
            for rank in range(count)
        ]
        for worker in workers:
            worker.start()
        for _, theirs in ends:
            theirs.close()
        found = [_answer(ours, seconds) for ours, _ in ends]
        for worker in workers:
            worker.kill()  # gloo's threads keep a fork from ending by itself
            worker.join()
    return found


def _answer(end: Any, seconds: float) -> Any:
    if not end.poll(seconds):
        raise TimeoutError(f"a process gave no answer in {seconds} s")
    try:
        return end.recv()
    except EOFError:
        return None


def _one(rank: int, count: int, store: str, end: Any, work: Callable[..., Any], args: tuple) -> None:
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), rank=rank, world_size=count)
    try:
        found = work(rank, *args)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    end.send(found)
    end.close()
