"""The Ray engine: the rows of a local sweep, also when workers die."""

import importlib.util
import os
import signal
import sys
import threading
import time

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
def test_two_actors_give_the_rows_of_a_local_sweep_and_load_once_each(cluster, tmp_path):
    arguments = {"base": 5, "folder": str(tmp_path)}
    wanted = Plan.of(sweeps.shifted, [{"i": i} for i in range(200)], setup=sweeps.build, setup_arguments=arguments)
    ended = sweep(wanted, tmp_path / "ray.sqlite", engine=Ray(workers=2))
    assert 1 <= len(list(tmp_path.glob("built-*"))) <= 2
    sweep(wanted, tmp_path / "local.sqlite")
    assert ended.done == 200
    assert len(read(tmp_path / "ray.sqlite")) == 200
    assert sweeps.same(read(tmp_path / "ray.sqlite"), read(tmp_path / "local.sqlite"))


def gone(pid: int) -> bool:
    """Whether a process has ended, within a while."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@needs_ray
@pytest.mark.slow
def test_killing_a_worker_loses_no_task(cluster, tmp_path):
    wanted = Plan.of(sweeps.located, [{"i": i, "folder": str(tmp_path)} for i in range(120)])

    killed: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pids = [int(p.name.removeprefix("pid-")) for p in tmp_path.glob("pid-*")]
            if len(list(tmp_path.glob("did-*"))) > 20 and pids:
                os.kill(pids[0], signal.SIGKILL)
                killed.append(pids[0])
                return
            time.sleep(0.005)

    killer = threading.Thread(target=kill)
    killer.start()
    ended = sweep(wanted, tmp_path / "r.sqlite", engine=Ray(workers=2))
    killer.join()
    assert len(killed) == 1
    assert gone(killed[0])
    assert (ended.done, ended.failed) == (120, 0)
    rows = read(tmp_path / "r.sqlite")
    assert [r.value["i"] for r in rows] == list(range(120))
    assert max(r.tries for r in rows) == 2  # what it was at was tried on another


@pytest.mark.slow
@needs_ray
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
def test_actors_that_cannot_be_prepared_end_the_sweep(cluster, tmp_path):
    wanted = Plan.of(sweeps.shifted, [{"i": 0}], setup=sweeps.refuse_to_build)
    with pytest.raises(WorkerError, match="expected a model, got none"):
        sweep(wanted, tmp_path / "r.sqlite", engine=Ray(workers=1))


@needs_ray
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
