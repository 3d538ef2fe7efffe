"""The command line: one module a command, loaded when it is called, so that `--help` is instant."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import click

from engines.errors import MachineError, TrtspecError
from engines.files import DISK_FULL, DiskFullError

__all__ = ["cli", "main"]

# name -> (module, function, one-line help)
COMMANDS = {
    "build": ("pipelines.cli.build", "build", "Build bundles from deployment specs."),
    "generate": ("pipelines.cli.generate", "generate", "Generate text with a bundle."),
    "inspect": ("pipelines.cli.inspect", "inspect", "Say what checkpoints and bundles are; check a pair."),
    "convert": ("pipelines.cli.convert", "convert", "Turn a GGUF file into a Hugging Face folder."),
    "truncate": ("pipelines.cli.convert", "truncate", "Make a draft checkpoint of a model's first layers."),
    "train-head": ("pipelines.cli.train_head", "train_head", "Train a drafter for a target."),
}
INTERRUPTED = 130


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, function, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), function)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"trtspec {version('trtspec')}")
        ctx.exit()


@click.group(cls=_Lazy, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """From LLM checkpoints to speculative-decoding engines that are proved to pay.

    Exit codes: 0 ok, 1 a check failed, 2 usage, 3 environment, 130 interrupted.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    try:
        code: Any = cli.main(arguments, prog_name="trtspec", standalone_mode=False)
    except click.exceptions.Abort:
        code = _interrupted()
    except ImportError as error:  # an extension module turns Ctrl-C into this while it loads
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        code = _interrupted()
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (TrtspecError, OSError, MemoryError) as caught:
        if debug:
            raise
        problem = caught if isinstance(caught, TrtspecError) else _from_system(caught)
        _show(problem, arguments)
        code = problem.exit_code
    sys.exit(code if isinstance(code, int) else 0)


def _interrupted() -> int:
    click.echo("Interrupted. What was finished is kept; run the command again to go on.", err=True)
    return INTERRUPTED


def _from_system(error: OSError | MemoryError) -> TrtspecError:
    """What the machine refused: no permission, no memory, a folder where a file should be."""
    if isinstance(error, OSError):
        place = str(error.filename or "")
        if error.errno in DISK_FULL:
            return DiskFullError(str(error.strerror), place=place)
        return MachineError(error.strerror or str(error), place=place, remedy="Check the path.")
    return MachineError("out of memory", remedy="Lower the limits, or use a larger machine.")


def _show(error: TrtspecError, arguments: list[str]) -> None:
    """The message on standard error; as JSON where the command was asked for JSON."""
    if "--format json" in " ".join(arguments) or "--format=json" in arguments:
        click.echo(json.dumps({"error": error.to_dict()}, ensure_ascii=False), err=True)
    else:
        click.echo(f"error {error}", err=True)
