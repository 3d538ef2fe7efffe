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
    pairing: dict[str, Any] | None = None
    if len(checkpoints) == 2:
        from builders.pairing import pair

        pairing = pair(*checkpoints).to_dict()
    if form == "json":
        report: dict[str, Any] = {"found": found, "pairing": pairing}
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
        return
    for record in found:
        _show(record)
    if pairing is not None:
        click.echo("pair: the drafter fits the target")
        _show(pairing)


def _show(record: dict[str, Any]) -> None:
    """Key and value a line; nested records are indented, long lists counted."""
    for key, value in record.items():
        _show_value(key, value, "")
    click.echo()


def _show_value(key: str, value: Any, indent: str) -> None:
    name = key.replace("_", " ")
    if isinstance(value, dict) and value:
        click.echo(f"{indent}{name}")
        for inner, content in value.items():
            _show_value(inner, content, indent + "  ")
    elif isinstance(value, list | tuple) and len(value) > 8:
        click.echo(f"{indent}{name:<24} {len(value)} entries")
    elif value not in (None, [], (), {}, ""):
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else _text(value)
        click.echo(f"{indent}{name:<24} {text}")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
