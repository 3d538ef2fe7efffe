"""`trtspec inspect`: what a checkpoint or a bundle is, by its own evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def inspect(paths: tuple[Path, ...], form: str) -> None:
    """Say what each PATH is: a checkpoint folder or a bundle.

    Checkpoints are read by their headers only. With two checkpoints, the first is taken as target and
    the second as drafter, and whether they fit is proved, too.
    """
    from engines.bundle import MANIFEST, open_bundle

    found: list[dict[str, Any]] = []
    checkpoints = []
    for path in paths:
        if (path / MANIFEST).is_file():
            found.append({"bundle": str(path), **open_bundle(path).manifest.model_dump(mode="json")})
            continue
        from builders.checkpoints.describe import describe
        from builders.checkpoints.reader import read_checkpoint

        checkpoint = read_checkpoint(path)
        checkpoints.append(checkpoint)
        found.append(describe(checkpoint))
    if form == "text":
        _table(found)
    pairing: dict[str, Any] | None = None
    if len(checkpoints) == 2:
        from builders.pairing import pair

        pairing = pair(*checkpoints).to_dict()
    if form == "json":
        report: dict[str, Any] = {"found": found, "pairing": pairing}
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
        return
    if pairing is not None:
        click.echo("\nThe drafter fits the target:")
        _table([pairing])


def _table(records: list[dict[str, Any]]) -> None:
    """One row a field, one column a record; fields that no record has are left out."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    flat = [_flatten(record) for record in records]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    for _ in flat:
        table.add_column(overflow="fold")
    for field in dict.fromkeys(key for record in flat for key in record):
        table.add_row(field, *(Text(record.get(field, "–")) for record in flat))
    Console(highlight=False).print(table)


def _flatten(record: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested records by `outer inner`; long lists counted, digests shortened."""
    found: dict[str, str] = {}
    for key, value in record.items():
        name = f"{prefix}{key.replace('_', ' ')}"
        if isinstance(value, dict) and value:
            found |= _flatten(value, f"{name} ") if len(value) <= 32 else {name: f"{len(value)} entries"}
        elif isinstance(value, list | tuple) and (len(value) > 16 or any(isinstance(v, dict) for v in value)):
            found[name] = f"{len(value)} entries"
        elif value not in (None, [], (), {}, ""):
            found[name] = " ".join(map(_text, value)) if isinstance(value, list | tuple) else _text(value)
    return found


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if value >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    is_digest = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return f"{text[:16]}…" if is_digest else text
