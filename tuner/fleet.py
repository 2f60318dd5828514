"""Several GPUs at once: a tuner each, in threads; GPUs of one kind share the problems, others each tune them all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cupyq.devices import DeviceSpec
from cupyq.errors import TuningError
from cupyq.kernels import Problem

from .results import RunResult
from .study import Tuner

MakeTuner = Callable[[DeviceSpec], Tuner]


def shares(fleet: Sequence[DeviceSpec], problems: Sequence[Problem]) -> list[list[Problem]]:
    """Return what each GPU tunes: all problems, dealt out in turn among GPUs of the same identity."""
    kinds: dict[object, list[int]] = {}
    for place, device in enumerate(fleet):
        kinds.setdefault(device.identity, []).append(place)
    dealt: list[list[Problem]] = [[] for _ in fleet]
    for places in kinds.values():
        for turn, place in enumerate(places):
            dealt[place] = list(problems[turn :: len(places)])
    return dealt


def run(
    fleet: Sequence[DeviceSpec], problems: Sequence[Problem], make: MakeTuner
) -> list[tuple[DeviceSpec, RunResult]]:
    """Tune on every GPU of `fleet` at once; Ctrl-C ends all of them and keeps what is done.

    Parameters
    ----------
    fleet : sequence of DeviceSpec
    problems : sequence of Problem
    make : callable
        Makes the tuner of a GPU. Each must have an objective of its own; the store may be shared.

    Returns
    -------
    list of (DeviceSpec, RunResult)
        One each kind of GPU, the problems of its cards together.

    Raises
    ------
    TuningError
        No GPU could tune anything.
    """
    tuners = [make(device) for device in fleet]
    dealt = shares(fleet, problems)
    results: list[RunResult] = [RunResult() for _ in fleet]
    faults: list[BaseException] = []

    def work(place: int) -> None:
        try:
            results[place] = tuners[place].run(dealt[place])
        except BaseException as error:  # noqa: BLE001  (raised again by the thread that waits)
            faults.append(error)

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(fleet))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        for tuner in tuners:
            tuner.stop.set()
        for thread in threads:
            thread.join()
    finally:
        for tuner in tuners:
            tuner.close()
    grave = [fault for fault in faults if not isinstance(fault, TuningError)]
    if grave or len(faults) == len(fleet):
        raise (grave or faults)[0]
    return _by_kind(fleet, results)


def _by_kind(fleet: Sequence[DeviceSpec], results: Sequence[RunResult]) -> list[tuple[DeviceSpec, RunResult]]:
    merged: dict[object, tuple[DeviceSpec, RunResult]] = {}
    for device, result in zip(fleet, results, strict=True):
        first = merged.setdefault(device.identity, (device, RunResult()))[1]
        first.problems += result.problems
        first.seconds = max(first.seconds, result.seconds)
        first.interrupted |= result.interrupted
        first.out_of_time |= result.out_of_time
    return list(merged.values())
