"""How far the work that a reporter follows has come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sqshforge.host.terminal import Reporter, Tracker


class Following(Reporter):
    """Records the completed shares of the work that a bar would have shown."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.shares: list[float] = []

    @contextlib.contextmanager
    def track(
        self, name: str, total: float | None = None, unit: str = "bytes"
    ) -> Iterator[Tracker]:
        yield _Keeping(name, total, unit, self.shares)


class _Keeping(Tracker):
    def __init__(self, name: str, total: float | None, unit: str, shares: list[float]) -> None:
        super().__init__(name, total, unit)
        self._shares = shares

    def redraw(self) -> None:
        assert self.total is not None
        self._shares.append(self.done / self.total)
