"""The parts of a step, named once for all observers: watch for hangs, nsys, torch's profiler.

`with phases("forward"):` tells every observer when that part begins and ends. The names:
    step: data, forward, backward, clip, optimizer          a step, and its parts
    report, evaluation, save, trace                         between steps
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

TRACE = "trace"
"""The part in which torch's profiler writes what it has recorded."""


class Observer:
    """Follows a run; is made before it, entered when it begins, and left when it ends."""

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *error: Any) -> None:
        """End what was begun; parts that an error cuts short are not reported one by one."""

    def begin(self, phase: str) -> None:
        raise NotImplementedError

    def end(self, phase: str) -> None:
        raise NotImplementedError


class Phases:
    """Makes the context managers of the parts, and is one itself, around the whole run."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)
        self._phases: dict[str, _Phase] = {}
        self._open = ExitStack()

    def __call__(self, name: str) -> _Phase:
        if name not in self._phases:
            self._phases[name] = _Phase(name, self._observers)
        return self._phases[name]

    def __enter__(self) -> Phases:
        for observer in self._observers:
            self._open.enter_context(observer)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


class _Phase:
    """One part. It has no state, so it is made once and entered in every step."""

    def __init__(self, name: str, observers: tuple[Observer, ...]) -> None:
        self._name, self._observers = name, observers

    def __enter__(self) -> None:
        for observer in self._observers:
            observer.begin(self._name)

    def __exit__(self, *error: Any) -> None:
        for observer in reversed(self._observers):
            observer.end(self._name)
