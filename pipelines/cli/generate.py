"""`trtspec generate`: text from a bundle, streamed, then what speculation did for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from engines.engine import Engine, Generation


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", "prompts", multiple=True, help="A user message; repeat for a batch.")
@click.option(
    "--prompt-file", type=click.Path(path_type=Path, dir_okay=False), help="One message, from a file."
)
@click.option("--system", default="", help="A system message before the prompt.")
@click.option("--raw", is_flag=True, help="No chat template: continue the prompt as it stands.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(0), default=256, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="0: off.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="1: off.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--gamma",
    type=int,
    default=None,
    help="Draft tokens (of a tree: levels) a step at most; 0: plain decoding.",
)
@click.option(
    "--confidence-threshold",
    type=float,
    default=None,
    help="Stop drafting where the drafter's probability of its own draft falls below; 0: never.",
)
@click.option("--stop", multiple=True, help="Text that ends the output; repeatable.")
@click.option("--threads", type=click.IntRange(0, 512), default=0, help="CPU threads; 0: one a core.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def generate(
    bundle: Path,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    system: str,
    raw: bool,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    gamma: int | None,
    confidence_threshold: float | None,
    stop: tuple[str, ...],
    threads: int,
    form: str,
) -> None:
    """Generate text with the engine in BUNDLE.

    The text streams to standard output, the figures follow on standard error.
    """
    from engines.engine import Engine
    from engines.files import read_text
    from engines.sampling import SamplingParams

    for text in (*prompts, system, *stop):
        if not text.isprintable() and any("\ud800" <= c <= "\udfff" for c in text):
            raise click.UsageError("The text on the command line is not UTF-8.")
    texts = list(prompts)
    if prompt_file is not None:
        texts.append(read_text(prompt_file, max_bytes=16 << 20))
    if not texts:
        raise click.UsageError("Nothing to generate from: give --prompt or --prompt-file.")
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    engine = Engine.open(bundle, threads=threads, slots=None if len(texts) > 1 else 1)
    asked = [_prompt(engine, text, system, raw) for text in texts]
    single = form == "text" and len(texts) == 1
    results = engine.generate_batch(
        asked,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        gamma=gamma,
        confidence_threshold=confidence_threshold,
        on_text=(lambda _, text: _stream(text)) if single else None,
    )
    if form == "json":
        import json

        rows = [_record(text, result) for text, result in zip(texts, results, strict=True)]
        click.echo(json.dumps({"outputs": rows, "seconds_by_phase": vars(engine.times)}, indent=2))
        return
    if single:
        click.echo()
    else:
        for text, result in zip(texts, results, strict=True):
            click.echo(f"### {text}\n{result.text}\n")
    _report(engine, results)


def _prompt(engine: Engine, text: str, system: str, raw: bool) -> list[int]:
    if raw:
        return engine.encode(engine.codec.encode(text))
    if not system:
        return engine.encode(text)
    return engine.encode([{"role": "system", "content": system}, {"role": "user", "content": text}])


def _stream(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _record(prompt: str, result: Generation) -> dict[str, object]:
    return {
        "prompt": prompt,
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.reason.value,
        "seconds": result.seconds,
        "prefill_seconds": result.prefill_seconds,
        "acceptance": result.acceptance.to_dict(),
    }


def _report(engine: Engine, results: list[Generation]) -> None:
    """Three lines of figures at most 80 columns wide."""
    tokens = sum(len(r.tokens) for r in results)
    seconds = max(r.seconds for r in results)
    stats = results[0].acceptance
    for result in results[1:]:
        stats = stats.merge(result.acceptance)
    times = engine.times
    facts = engine.facts
    lines = [
        f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds if seconds else 0:.1f} tokens/s"
        f" ({facts.method}, {facts.precision})"
    ]
    if stats.drafted:
        lines.append(
            f"{stats.accepted} of {stats.drafted} draft tokens accepted"
            f" ({stats.acceptance_rate:.0%}), {stats.mean_acceptance_length:.2f} tokens a step,"
            f" γ {stats.mean_draft_length:.1f}"
        )
    lines.append(
        f"time: prefill {times.prefill:.2f} s, steps {times.step:.2f} s ({times.steps}),"
        f" drafting on the host {times.propose:.3f} s, rest {times.host:.3f} s"
    )
    if not facts.lossless:
        lines.append(f"not lossless: {facts.lossless_note}")
    for line in lines:
        click.echo(line, err=True)
