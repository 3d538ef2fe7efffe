"""`trtspec build`: deployment specs → bundles."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.argument("specs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("build/bundles"),
    show_default=True,
    help="Each bundle goes to a folder of its name in here.",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("build/cache"),
    show_default=True,
    help="Finished stages.",
)
@click.option(
    "--threads", type=click.IntRange(0, 512), default=0, help="CPU threads for timing; 0: one a core."
)
@click.option("--dry-run", is_flag=True, help="Show the plan and the estimates; write nothing.")
def build(specs: tuple[Path, ...], output_dir: Path, cache_dir: Path, threads: int, dry_run: bool) -> None:
    """Build one bundle a SPEC.

    Stages: intake, pairing, quantize, emit, compile, package. Finished ones are reused; after an
    interrupt or a kill, run the same command again.
    """
    from pipelines.spec import SpecError, load_spec

    loaded = [(path, load_spec(path)) for path in specs]  # all of them, before anything is built
    names: dict[str, Path] = {}
    for path, spec in loaded:
        if spec.name in names:
            raise SpecError(f"the name {spec.name!r} of {names[spec.name]} again", place=f"{path} name")
        names[spec.name] = path

    from pipelines.build import Build, summary
    from pipelines.console import BuildConsole
    from pipelines.stages import StageCache

    console = BuildConsole()
    command = ["trtspec", *sys.argv[1:]]
    builds = [
        Build(spec, StageCache(cache_dir), output_dir / spec.name, threads, command, console)
        for _, spec in loaded
    ]
    if dry_run:
        for one in builds:
            _show_plan(one)
        return
    summary([one.run() for one in builds], console)


def _show_plan(one: object) -> None:
    from pipelines.build import Build

    assert isinstance(one, Build)
    click.echo(f"{one.spec.name} → {one.out}")
    for stage, state, note in one.plan():
        click.echo(f"  {stage:<9} {state:<7} {note}")
