"""`trtspec convert` and `trtspec truncate`: checkpoints from other checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click


@click.command()
@click.argument("gguf", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to write.")
@click.option(
    "--dtype",
    type=click.Choice(["F32", "F16", "BF16"]),
    default="F32",
    show_default=True,
    help="F32 holds every dequantized value exactly.",
)
def convert(gguf: Path, output: Path, dtype: Literal["F32", "F16", "BF16"]) -> None:
    """Turn a Llama-type GGUF file into a Hugging Face folder.

    The tokenizer, its special tokens and the chat template come along.
    """
    from builders.checkpoints.gguf import convert_gguf
    from pipelines.console import BuildConsole

    with BuildConsole().task(f"convert {gguf.name}") as progress:
        convert_gguf(gguf, output, dtype=dtype, progress=progress)
    click.echo(f"{output}")


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--layers", required=True, type=click.IntRange(1), help="How many first layers to keep.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to write.")
def truncate(checkpoint: Path, layers: int, output: Path) -> None:
    """Make a draft checkpoint of a model's first layers, its norm, embeddings and tokenizer.

    Without training such a drafter is seldom right. It is the starting point of a distilled one, and
    a second checkpoint that fits its target by construction.
    """
    from builders.checkpoints.truncate import truncate_checkpoint
    from pipelines.console import BuildConsole

    with BuildConsole().task(f"truncate {checkpoint.name}") as progress:
        truncate_checkpoint(checkpoint, layers, output, progress=progress)
    click.echo(f"{output}")
