"""The Ray engine: the rows of a local sweep, also when workers die."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from howsmooth.errors import BadInputError, WorkerError
from howsmooth.run import Plan, Ray, read, sweep
from howsmooth.run.ray import load
from problems import sweeps

missing = importlib.util.find_spec("ray") is None
needs_ray = pytest.mark.skipif(missing, reason="ray is not installed; pip install 'howsmooth[ray]' runs this")
# ray's own code on import and at shutdown
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    ray = load()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@needs_ray
@pytest.mark.slow
@pytest.mark.weekly
def test_two_actors_give_the_rows_of_a_local_sweep_and_load_once_each(cluster, tmp_path):
    arguments = {"base": 5, "folder": str(tmp_path)}
    wanted = Plan.of(sweeps.shifted, [{"i": i} for i in range(200)], setup=sweeps.build, setup_arguments=arguments)
    ended = sweep(wanted, tmp_path / "ray.sqlite", engine=Ray(workers=2))
    assert 1 <= len(list(tmp_path.glob("built-*"))) <= 2
    sweep(wanted, tmp_path / "local.sqlite")
    assert ended.done == 200
    assert len(read(tmp_path / "ray.sqlite")) == 200
    assert sweeps.same(read(tmp_path / "ray.sqlite"), read(tmp_path / "local.sqlite"))


@needs_ray
@pytest.mark.slow
def test_killing_a_worker_loses_no_task(cluster, tmp_path):
    wanted = Plan.of(sweeps.located, [{"i": i, "folder": str(tmp_path), "pause": 0.1} for i in range(40)])
    killed: list[int] = []

    def kill() -> None:
        """The worker of a task that has begun and not ended, as soon as a few are done."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and not killed:
            time.sleep(0.005)
            if len(list(tmp_path.glob("did-*"))) < 5:
                continue
            for pid in (int(p.name.removeprefix("pid-")) for p in tmp_path.glob("pid-*")):
                at = (tmp_path / f"pid-{pid}").read_text()
                if at and not (tmp_path / f"did-{at}").exists():
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    return

    killer = threading.Thread(target=kill)
    killer.start()
    ended = sweep(wanted, tmp_path / "r.sqlite", engine=Ray(workers=2))
    killer.join()
    assert len(killed) == 1
    assert sweeps.gone(killed[0])
    assert (ended.done, ended.failed) == (40, 0)
    assert [r.value["i"] for r in read(tmp_path / "r.sqlite")] == list(range(40))


SCRIPT = """
import sys
from howsmooth.errors import WorkerError
from howsmooth.run import Plan, Ray, pool, ray, sweep
from problems import sweeps
pool.QUIET, ray._ANSWER = 1.0, 5.0
plan = Plan.of(sweeps.located, [{"i": i, "folder": sys.argv[1], "pause": 0.5} for i in range(400)])
try:
    sweep(plan, sys.argv[1] + "/r.sqlite", engine=Ray(workers=1))
except WorkerError as error:
    print(f"REFUSED {error}")
"""


def processes(folder: str, name: str) -> list[int]:
    """Processes of the cluster that works in a folder, by what they are called."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes().decode("utf-8", "replace")
            if name in command.partition("\0")[0] and folder in command:
                found.append(int(path.name))
    return found


@needs_ray
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks up processes under /proc")
@pytest.mark.weekly
def test_a_cluster_that_is_gone_ends_the_sweep_with_a_sentence_and_nothing_else_on_standard_output(tmp_path):
    folder = tempfile.mkdtemp(prefix="ray")  # a short name, which sockets need
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_TMPDIR": folder}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        deadline = time.monotonic() + 240
        while not list(tmp_path.glob("did-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        (raylet,) = processes(folder, "raylet/raylet")
        os.kill(raylet, signal.SIGKILL)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    assert process.returncode == 0
    assert out.startswith("REFUSED expected a Ray cluster that answers, got: ")
    assert out.count("\n") == 1
    assert len(read(tmp_path / "r.sqlite")) >= 1


class Stub:
    """A library that starts as it is told to."""

    def __init__(self, error: Exception):
        self.error = error

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        print("what Ray says")
        raise self.error

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("error", [Exception("The current node timed out.\nMore."), OSError(), TypeError("x")])
def test_a_cluster_that_does_not_start_is_one_sentence(tmp_path, monkeypatch, capsys, error):
    monkeypatch.setattr("howsmooth.run.ray.load", lambda: Stub(error))
    with pytest.raises(
        WorkerError, match=r"^expected a Ray cluster at this machine, got: [^\n]+; start one with `ray start --head`$"
    ):
        sweep(Plan.of(sweeps.value, [{"i": 0}]), tmp_path / "r.sqlite", engine=Ray())
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@needs_ray
@pytest.mark.weekly
def test_failures_are_tried_on_another_actor_and_then_recorded(cluster, tmp_path):
    moody = Plan.of(sweeps.moody, [{"i": i, "folder": str(tmp_path), "times": 1 + 8 * (i == 3)} for i in range(5)])
    ended = sweep(moody, tmp_path / "r.sqlite", engine=Ray(workers=2, tries=2))
    rows = read(tmp_path / "r.sqlite")
    assert (ended.done, ended.failed) == (4, 1)
    assert rows[3].reason is not None
    assert rows[3].reason.startswith("RuntimeError: not enough memory")
    for i in range(5):
        assert len(set((tmp_path / f"moody-{i}").read_text().splitlines())) == 2


@pytest.mark.slow
@needs_ray
@pytest.mark.weekly
def test_actors_that_cannot_be_prepared_end_the_sweep(cluster, tmp_path):
    wanted = Plan.of(sweeps.shifted, [{"i": 0}], setup=sweeps.refuse_to_build)
    with pytest.raises(WorkerError, match="expected a model, got none"):
        sweep(wanted, tmp_path / "r.sqlite", engine=Ray(workers=1))


@needs_ray
@pytest.mark.weekly
def test_more_than_the_cluster_has_is_refused(cluster, tmp_path):
    with pytest.raises(WorkerError, match="ask for less"):
        sweep(Plan.of(sweeps.value, [{"i": 0}]), tmp_path / "r.sqlite", engine=Ray(cpus=64))


def test_a_missing_ray_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(WorkerError, match=r"pip install 'howsmooth\[ray\]'"):
        sweep(Plan.of(sweeps.value, [{"i": 0}]), tmp_path / "r.sqlite", engine=Ray())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": -1}, {"tries": 0}, {"cpus": 0}, {"gpus": -1.0}])
def test_bad_options_are_refused(options):
    with pytest.raises(BadInputError, match="expected"):
        Ray(**options)
