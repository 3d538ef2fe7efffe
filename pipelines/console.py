"""What a build shows: progress bars with time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pipelines.stages import Progress as OnProgress

__all__ = ["BuildConsole", "duration", "megabytes"]


class BuildConsole:
    """Writes to standard error, so that standard output stays clean for results."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)

    def line(self, text: str) -> None:
        """One line of text."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, label: str) -> Iterator[OnProgress]:
        """A bar for one stage; the yielded function takes (done, in all). No bar without a terminal."""
        if not self.console.is_terminal:
            yield lambda done, total: None
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as bars:
            task = bars.add_task(escape(label), total=None)
            yield lambda done, total: bars.update(task, completed=done, total=total)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; all columns but the first are figures."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


def megabytes(size: float) -> str:
    """1234567890 → `1.23 GB`."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """75 → `1 min 15 s`."""
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"
