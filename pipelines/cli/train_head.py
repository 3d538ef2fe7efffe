"""`trtspec train-head`: drafters for a target, trained on what the target says."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Literal

import click

from engines.errors import MachineError, UsageError


class NoTorchError(MachineError):
    """Training needs packages that are not installed."""

    rule = "train.no-torch"
    remedy_text = "pip install 'trtspec[train]'"


class TrainUsageError(UsageError):
    """Options of train-head that do not go together."""

    rule = "train.options"
    remedy_text = "See trtspec train-head --help."


class _Finite(click.FloatRange):
    """A range that neither NaN nor infinity is in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is no finite number.", param, ctx)
        return number


@click.command("train-head")
@click.option(
    "--method",
    required=True,
    type=click.Choice(["medusa", "eagle", "eagle3", "draft_model"]),
    help="What to train.",
)
@click.option("--target", required=True, type=click.Path(path_type=Path), help="The target's checkpoint.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to write.")
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help='JSONL with {"prompt", "answer"}, {"prompt"} or {"text"}; any other file: a document a paragraph.',
)
@click.option(
    "--generate",
    type=click.IntRange(1, 10**7),
    help="Let the target write; so many attempts at conversations.",
)
@click.option("--steps", type=click.IntRange(1), help="How long: repeatable, the same weights each time.")
@click.option("--minutes", type=_Finite(0.01), help="How long: by the clock.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option("--heads", type=click.IntRange(1, 16), default=4, show_default=True, help="Medusa's heads.")
@click.option(
    "--layers", type=click.IntRange(1, 64), help="Of a draft model (2 by default) or a Medusa head (1)."
)
@click.option(
    "--draft-vocab",
    type=click.IntRange(2),
    default=8192,
    show_default=True,
    help="Most frequent tokens: all that EAGLE-3 can draft, and what the loss of the others counts.",
)
@click.option("--intermediate", type=click.IntRange(1, 1 << 18), help="MLP width.  [default: the target's]")
@click.option("--learning-rate", type=_Finite(0, 1, min_open=True), default=1e-3, show_default=True)
@click.option("--batch-tokens", type=click.IntRange(16), default=2048, show_default=True)
@click.option("--gamma", type=click.IntRange(1, 16), default=4, show_default=True, help="Draft tokens.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--precision", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
@click.option(
    "--store",
    type=click.Choice(["fp8", "fp16", "fp32"]),
    default="fp16",
    show_default=True,
    help="fp16, fp32: complete. fp8: small, embeddings and lm_head are the target's.",
)
@click.option("--threads", type=click.IntRange(0, 512), default=0, help="CPU threads; 0: one a core.")
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    help="Data and checkpoints, shared by methods.  [default: OUTPUT.work]",
)
@click.option("--resume", is_flag=True, help="Go on with a run that was stopped.")
def train_head(
    method: str,
    target: Path,
    output: Path,
    text: Path | None,
    generate: int | None,
    steps: int | None,
    minutes: float | None,
    seed: int,
    heads: int,
    layers: int | None,
    draft_vocab: int,
    intermediate: int | None,
    learning_rate: float,
    batch_tokens: int,
    gamma: int,
    device: str,
    precision: str,
    store: Literal["fp8", "fp16", "fp32"],
    threads: int,
    work: Path | None,
    resume: bool,
) -> None:
    """Train a drafter for a target, on text of yours or on text that the target writes.

    Prompts are split, one in twenty is held out; what is reported is greedy drafting on those. The
    weights are written in the published formats. After an interrupt or a kill, run the same command
    with --resume.
    """
    if (text is None) == (generate is None):
        raise TrainUsageError("one of --text and --generate is needed, not both")
    if (steps is None) == (minutes is None):
        raise TrainUsageError("one of --steps and --minutes is needed, not both")
    if not output.resolve().name:
        raise TrainUsageError("no name for a folder", place=f"-o {output}")
    for package in ("torch", "transformers", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise NoTorchError(f"{package} is not installed", place="train-head")

    import torch
    from transformers.utils import logging

    from builders.training.loop import Progress, TrainPlan
    from builders.training.run import Sizes, TrainingRun
    from pipelines.console import BuildConsole, duration

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if threads:
        torch.set_num_threads(threads)
    console = BuildConsole()
    run = TrainingRun(
        method=method,
        target=target,
        out=output,
        work=work or Path(f"{output.resolve()}.work"),
        plan=TrainPlan(
            seed=seed,
            steps=steps,
            minutes=minutes,
            batch_tokens=batch_tokens,
            learning_rate=learning_rate,
            depth=heads if method == "medusa" else gamma,
            gamma=gamma,
            precision=precision,
        ),
        sizes=Sizes(heads, layers or (2 if method == "draft_model" else 1), draft_vocab, intermediate),
        text=text,
        generate=generate,
        store=store,
        device=device,
        resume=resume,
        excluded=tuple(_benchmark_prompts()),
        command=("trtspec", *sys.argv[1:]),
    )

    def report(progress: Progress) -> None:
        line = f"step {progress.step}, {progress.share:.0%}, loss {progress.loss:.4f}"
        if progress.held_out is not None:
            held_out_loss, found = progress.held_out
            each = " ".join(f"{p:.2f}" for p in found.per_position)
            line += f"; held out: loss {held_out_loss:.4f}"
            line += f", mean acceptance length {found.mean_length:.2f} at γ {found.gamma} ({each})"
        console.line(f"{line}; {duration(progress.seconds_left)} left")

    started = time.monotonic()
    trained = run.run(console.line, report)
    click.echo(
        f"{output}: {trained.steps} steps, held-out loss {trained.loss:.3f}, mean acceptance length "
        f"{trained.acceptance.mean_length:.2f} at γ {gamma}, {duration(time.monotonic() - started)}"
    )


def _benchmark_prompts() -> list[str]:
    """The prompts that speed is measured on: never trained on, measured separately."""
    records: list[dict[str, Any]] = json.loads(
        (Path(__file__).parent.parent / "prompts.json").read_text("utf-8")
    )
    return [r["text"] for r in records]
