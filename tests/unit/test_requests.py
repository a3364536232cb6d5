"""Requests to stop or save: signals are taken over and given back, and all replicas act after the same step."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from paceline.errors import ReadFailed
from paceline.training.requests import LAG, Requests, Signals, Stopped
from paceline.world import Work, World


def test_a_signal_asks_to_stop_and_the_previous_one_is_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        assert signal.getsignal(signal.SIGTERM) != before
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_is_answered_at_once_and_only_once() -> None:
    answers: list[bool] = []

    def answer() -> None:
        answers.append(signals.stop)
        os.kill(os.getpid(), signal.SIGINT)  # another, while the first is answered

    signals = Signals(answer)
    with signals:
        for _ in range(2):  # the second comes at once, as launchers deliver it
            os.kill(os.getpid(), signal.SIGINT)
    assert answers == [True]


def test_a_start_stops_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("paceline.training.requests.time.monotonic", lambda: now[0])
    signals = Signals()
    requests = Requests(World(torch.device("cpu")), signals, most_seconds=60)
    requests.exchange(1)
    assert not requests.stop
    now[0] += 60
    requests.exchange(2)
    assert requests.stop
    assert requests.urgent
    assert requests.out_of_time
    signals.stop = True
    assert requests.urgent
    assert not requests.out_of_time  # a signal is why it stops


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_leaves_what_waits_for_images_that_never_come(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGALRM)
    with Signals() as signals:
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        with pytest.raises(Stopped), signals.abandoning(0.0, Stopped()):
            threading.Event().wait()
        assert signals.stop
        with pytest.raises(Stopped), signals.abandoning(0.01, Stopped()):  # it was asked before it began to wait
            threading.Event().wait()
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_time_limit_leaves_what_waits_and_nothing_else() -> None:
    with Signals(most_seconds=0.01) as signals:
        with signals.abandoning(60.0, Stopped()):
            pass
        with pytest.raises(Stopped), signals.abandoning(0.0, Stopped()):
            threading.Event().wait()
        assert not signals.stop
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize(("replicas", "stages"), [(2, 1), (1, 2)])
def test_one_of_several_processes_that_waits_says_why_it_leaves(
    monkeypatch: pytest.MonkeyPatch, replicas: int, stages: int
) -> None:
    monkeypatch.setattr("paceline.training.requests.PATIENCE", 0.01)
    with Signals() as signals:
        requests = Requests(World(torch.device("cpu"), replicas=replicas, stages=stages), signals)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(ReadFailed, match="the images of the next step did not come"), requests.waiting():
            threading.Event().wait()


def test_other_threads_leave_signals_alone() -> None:
    before, inside = signal.getsignal(signal.SIGINT), []

    def enter() -> None:
        with Signals():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert inside == [before]


def test_a_single_replica_acts_after_the_step_in_which_it_is_asked() -> None:
    signals = Signals()
    requests = Requests(World(torch.device("cpu")), signals, save_seconds=0)
    requests.exchange(1)
    assert (requests.stop, requests.save, requests.urgent) == (False, True, False)
    signals.stop = True
    assert requests.urgent
    assert not requests.stop
    requests.exchange(2)
    assert requests.stop


def test_the_clock_of_reports_is_not_that_of_checkpoints() -> None:
    requests = Requests(World(torch.device("cpu")), report_seconds=0)
    requests.exchange(1)
    assert (requests.stop, requests.save, requests.report) == (False, False, True)


class Replica(World):
    """One of two replicas in the same process; a sum waits until it is read, when the other has sent its part."""

    def __init__(self, replica: int, sent: tuple[list[Tensor], list[Tensor]]) -> None:
        super().__init__(torch.device("cpu"), replica, 2)
        self.own, self.other = sent[replica], sent[1 - replica]

    def all_reduce_async(self, values: Tensor, on_host: bool = False) -> Work:
        index = len(self.own)
        self.own.append(values.clone())
        return Work(SimpleNamespace(wait=lambda: values.add_(self.other[index])), self)


def pair() -> tuple[list[Signals], list[Requests]]:
    sent: tuple[list[Tensor], list[Tensor]] = ([], [])
    signals = [Signals(), Signals()]
    return signals, [Requests(Replica(replica, sent), signals[replica], save_seconds=0) for replica in range(2)]


@pytest.mark.parametrize("signaled", [0, 1])
def test_replicas_stop_after_the_same_step_whichever_a_signal_came_to(signaled: int) -> None:
    signals, replicas = pair()
    stopped = []
    for step in range(1, 12):
        signals[signaled].stop = step >= 3
        for requests in replicas:
            requests.exchange(step)
        stopped.append([requests.stop for requests in replicas])
    assert stopped == [[step >= 3 + LAG] * 2 for step in range(1, 12)]
    assert [requests.urgent for requests in replicas] == [signaled == 0, signaled == 1]


def test_replicas_save_by_the_clock_of_the_first() -> None:
    _, replicas = pair()
    for step in range(1, 8):
        for requests in replicas:
            requests.exchange(step)
            assert requests.save == (step > LAG)


def test_nothing_is_under_way_after_draining() -> None:
    signals, replicas = pair()
    signals[0].stop = True
    for requests in replicas:
        requests.exchange(1)
    for requests in replicas:
        requests.drain()
        assert not requests.stop  # the run is at its last step, which ends it anyway
    for step in range(2, 2 + LAG):
        for requests in replicas:
            requests.exchange(step)
            assert not requests.stop
