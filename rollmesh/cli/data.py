"""`rollmesh data prepare|check`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from rollmesh.cli.options import OVERRIDES, read_config
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rollmesh.data.check import DataReport

_FROM_HELP = (
    "Files of the dataset as published: a file, a folder, a pattern, a hub id in the local cache, or a source like "
    "'{path: openai/gsm8k, subset: main}'. May be given several times."
)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    group = typer.Typer(help="Training data: made of published datasets, and checked.", no_args_is_help=True)
    group.command("prepare")(_prepare)
    group.command("check", context_settings=OVERRIDES)(_check)
    app.add_typer(group, name="data")


def _prepare(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Dataset: gsm8k, math, dapo_math, aime, geo3k or countdown.")
    ],
    given: Annotated[list[str], typer.Option("--from", metavar="FILES", help=_FROM_HELP)],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder to write.")],
    held_out: Annotated[
        list[str] | None,
        typer.Option("--eval-from", metavar="FILES", help="Files of held-out problems, as the published test split."),
    ] = None,
    hold_out: Annotated[
        int, typer.Option("--hold-out", min=0, help="Without --eval-from: this many problems are held out.")
    ] = 0,
) -> None:
    """Make train.parquet, and eval.parquet, of a published dataset, with its instruction in every prompt.

    Nothing is downloaded but what a hub id names. Problems come once, and held-out ones are not trained on.
    """
    if held_out and hold_out:
        raise ConfigError("--eval-from and --hold-out are given", hint="leave one of them out")
    from rollmesh.data.prepare import prepare
    from rollmesh.data.recipes import recipe_named

    recipe = recipe_named(name)
    training, evaluation = [_source(text) for text in given], [_source(text) for text in held_out or ()]
    show = _progress if sys.stderr.isatty() else _silent
    written = prepare(recipe, training, evaluation, out, hold_out=hold_out, report=show)
    for file in written:
        typer.echo(f"{file.path}: {file.rows} rows")
        for reason, count in file.left_out.most_common():
            typer.echo(f"  left out: {count} x {reason} (first: {file.examples[reason]})")
    evaluated = f" --data.eval={written[1].path}" if len(written) > 1 else ""
    scored = f" --{recipe.reward}" if recipe.reward else ""
    typer.echo(f"use them with: --data.train={written[0].path}{evaluated}{scored}")


def _found(command: str, config_path: Path, context: typer.Context, examples: int) -> DataReport:
    """The report on the data of a command's configuration."""
    if command == "run":
        config = read_config(config_path, context)
        from rollmesh.data.check import check_data

        return check_data(config, examples=examples)
    from rollmesh.mesh.config.trainers.configs import CONFIGS

    if command not in CONFIGS:
        raise ConfigError(f"--for {command}: no such command", hint=f"known: run, {', '.join(CONFIGS)}")
    from rollmesh.trainers import read_trainer_config

    trainer = read_trainer_config(command, config_path, context.args)
    from rollmesh.data.check_rows import check_rows

    return check_rows(trainer, examples=examples)


def _show_template(model: str, *, as_json: bool) -> None:
    from rollmesh.data.check import load_check_tokenizer
    from rollmesh.data.check_report import template_lines
    from rollmesh.mesh.chat.description import describe
    from rollmesh.mesh.chat.probing import facts_of
    from rollmesh.mesh.chat.template import ChatTemplate
    from rollmesh.mesh.config.inputs import ModelSection

    facts = facts_of(ChatTemplate.of(load_check_tokenizer(ModelSection(path=model))))
    if as_json:
        typer.echo(json.dumps(dict(describe(facts)), indent=2, ensure_ascii=False))
        return
    for line in template_lines(facts):
        typer.echo(line)


def _silent(_file: str, _rows: int) -> None:
    """Shows nothing: no one watches."""


def _progress(file: str, rows: int) -> None:
    typer.echo(f"\r{file}: {rows} rows", nl=False, err=True)


def _source(text: str) -> DataSource:
    """A path, or a source as in the configuration.

    Raises:
        ConfigError: it is neither.
    """
    try:
        values: Any = yaml.safe_load(text) if text.startswith("{") else {"path": text}
        return DataSource.model_validate(values)
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"{text!r} is no source of data", hint="write a path, or {path: ..., split: ...}") from error


def _check(
    context: typer.Context,
    config_path: Annotated[
        Path | None, typer.Argument(metavar="CFG.YAML", help="Configuration; see `rollmesh run --help`.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option("--template", metavar="MODEL", help="Only the chat template of this model folder or hub id."),
    ] = None,
    command: Annotated[
        str, typer.Option("--for", metavar="COMMAND", help="Whose configuration it is: run, sft, rm or dpo.")
    ] = "run",
    examples: Annotated[int, typer.Option("--examples", min=0, help="Rows that are named for each finding.")] = 3,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 for duplicates, leaks and skipped rows too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")] = False,
) -> None:
    """Read all data of a configuration, as a run or a trainer would, and say what would be skipped or go wrong.

    It shows rows by source and by data_source, and the lengths of prompts in tokens. It finds duplicates, held-out
    prompts that are trained on, images that cannot be read, and rows that no reward function scores. With --for it
    reads the rows of a trainer: pairs that contradict each other are found too. It says how the model's chat template
    writes conversations, and shows the first row as it is trained. Exits with 3 where a run would fail.
    """
    if template is not None:
        _show_template(template, as_json=as_json)
        return
    if config_path is None:
        raise ConfigError("CFG.YAML is missing", hint="give a configuration, or --template with a model folder")
    found = _found(command, config_path, context, examples)
    from rollmesh.data.check_report import lines, to_json

    if as_json:
        typer.echo(json.dumps(to_json(found), indent=2))
    else:
        for line in lines(found, lambda text: typer.style(text, fg=typer.colors.GREEN, bold=True)):
            # Colours are left out where no terminal is.
            typer.echo(line)
    if found.errors or (strict and found.warnings):
        raise typer.Exit(DataError.exit_code)
