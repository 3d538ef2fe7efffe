"""`trtspec inspect`: what a checkpoint or a bundle is, by its own evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from builders.checkpoints.types import Checkpoint


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def inspect(paths: tuple[Path, ...], form: str) -> None:
    """Say what each PATH is: a checkpoint folder, heads for the checkpoint before, or a bundle.

    Checkpoints are read by their headers only. With two, the first is taken as target and the second as
    drafter (a draft model, or Medusa or EAGLE heads), and whether they fit is proved, too.
    """
    from engines.bundle import MANIFEST, open_bundle

    found: list[dict[str, Any]] = []
    checkpoints: list[Checkpoint] = []
    pairing: dict[str, Any] | None = None
    for path in paths:
        if (path / MANIFEST).is_file():
            found.append({"bundle": str(path), **open_bundle(path).manifest.model_dump(mode="json")})
            continue
        facts, checkpoint, fits = _read(path, checkpoints[0] if checkpoints else None)
        found.append(facts)
        checkpoints += [checkpoint] if checkpoint else []
        pairing = fits or pairing
    if form == "text":
        _table(found)
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


def _read(
    path: Path, target: Checkpoint | None
) -> tuple[dict[str, Any], Checkpoint | None, dict[str, Any] | None]:
    """What lies at `path`: its description; the checkpoint, if it is one; heads' fit with the target."""
    from tempfile import TemporaryDirectory

    from builders.checkpoints.describe import describe, describe_head
    from builders.checkpoints.heads.convert import convert_head, needs_conversion
    from builders.checkpoints.heads.reader import is_head, read_head
    from builders.checkpoints.reader import read_checkpoint
    from builders.pairing import pair_head

    if target is None or not (needs_conversion(path) or is_head(path)):
        checkpoint = read_checkpoint(path, borrow=target)
        return describe(checkpoint), checkpoint, None
    with TemporaryDirectory() as folder:
        plain = path
        if needs_conversion(path):
            plain = Path(folder) / "plain"
            convert_head(path, plain)
        if not is_head(plain):
            checkpoint = read_checkpoint(plain, borrow=target)
            return describe(checkpoint) | {"path": str(path)}, checkpoint, None
        head = read_head(plain, target)
        return describe_head(head) | {"path": str(path)}, None, pair_head(target, head)


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
            texts = [_text(v) for v in value] if isinstance(value, list | tuple) else [_text(value)]
            found[name] = ("; " if any(" " in text for text in texts) else " ").join(texts)
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
