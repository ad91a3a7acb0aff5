"""`hadron eval`: tasks of lm-eval. Everything about progress goes to stderr, the figures to stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hadron.cli import console
from hadron.cli.generate import SHIPPED, SHIPPED_NOTE, Bars, load
from hadron.cli.options import GroupedCommand, engine_options, json_object, option
from hadron.errors import UsageError

if TYPE_CHECKING:
    from hadron.eval.harness import Tasks

_TASKS, _PROMPTS, _OUTPUT = "The tasks", "Their prompts", "Output"


@click.command(
    cls=GroupedCommand,
    epilog="Exit codes: 0 done; 1 the checkpoint or its results have errors; 2 wrong usage or unreadable input; "
    "130 interrupted.",
)
@click.argument("model", required=False)
@option("--tasks", metavar="NAME,...", group=_TASKS, help="Tasks, groups, tags, or patterns such as mmlu_*.")
@option("--list-tasks", is_flag=True, group=_TASKS, help="Print the names of all tasks and end.")
@option(
    "--include-path",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    group=_TASKS,
    help="A folder with more task files; may be given several times.",
)
@option(
    "--limit",
    type=click.FloatRange(min=0, min_open=True),
    group=_TASKS,
    help="Only so many documents of each task; below 1: this part of them.",
)
@option("--num-fewshot", type=click.IntRange(min=0), group=_PROMPTS, help="Examples before each document.")
@option(
    "--apply-chat-template",
    is_flag=True,
    group=_PROMPTS,
    help="Put documents through the checkpoint's chat template.",
)
@option(
    "--fewshot-as-multiturn/--no-fewshot-as-multiturn",
    default=True,
    show_default=True,
    group=_PROMPTS,
    help="With the chat template: examples are turns of their own.",
)
@option("--system-instruction", metavar="TEXT", group=_PROMPTS, help="What stands before everything else.")
@option(
    "--chat-template-kwargs",
    metavar="JSON",
    group=_PROMPTS,
    help='Switches of the chat template, such as {"enable_thinking": false}.',
)
@option(
    "--gen-kwargs",
    metavar="NAME=X,...",
    group=_PROMPTS,
    help="How to generate, in every task that does, such as temperature=0.6,do_sample=True,max_gen_toks=512.",
)
@option("--seed", type=int, default=1234, show_default=True, group=_PROMPTS, help="Of examples and sampled answers.")
@option(
    "--confirm-run-unsafe-code",
    is_flag=True,
    group=_TASKS,
    help="Let tasks run code that the model wrote.",
)
@option(
    "--bootstrap-iters",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    group=_OUTPUT,
    help="Resamplings for standard errors of figures that are no means; 0: no standard errors.",
)
@option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    group=_OUTPUT,
    help="Write results.json into this folder.",
)
@option("--log-samples", is_flag=True, group=_OUTPUT, help="With --output: every document, answer and score too.")
@option("--json", "as_json", is_flag=True, group=_OUTPUT, help="Print one JSON object when done.")
@engine_options
def command(
    model: str | None,
    tasks: str | None,
    list_tasks: bool,
    include_path: tuple[Path, ...],
    limit: float | None,
    num_fewshot: int | None,
    apply_chat_template: bool,
    fewshot_as_multiturn: bool,
    system_instruction: str | None,
    chat_template_kwargs: str | None,
    gen_kwargs: str | None,
    seed: int,
    confirm_run_unsafe_code: bool,
    bootstrap_iters: int,
    output: Path | None,
    log_samples: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Evaluate MODEL, a folder or a Hub id, which is downloaded, on tasks of lm-eval.

    Without MODEL, the small model that ships with Hadron is used. Needs the extra `eval`. Tasks
    whose data is not on this machine are fetched by lm-eval; those called hadron_* ship with Hadron.

    \b
    Examples:
      hadron eval path/to/checkpoint --tasks hadron_word_problems,hadron_tools --limit 100
      hadron eval path/to/checkpoint --tasks mmlu --num-fewshot 5 --activation-quantization declared
    """  # fmt: skip
    from hadron.eval.harness import Asked, Tasks, evaluate
    from hadron.eval.report import as_json as json_text
    from hadron.eval.report import lines, prepare, write

    if list_tasks:
        _list(Tasks(include_path), as_json)
        return 0
    names = [name for name in (tasks or "").split(",") if name]
    if not names:
        raise UsageError(
            "no task is named", where="--tasks", found="nothing", accepted="names with commas between them",
            hint="`hadron eval --list-tasks` prints all",
        )  # fmt: skip
    switches, generation = _switches(chat_template_kwargs), _gen_kwargs(gen_kwargs)
    known = Tasks(include_path)
    asked = Asked(
        tasks=known.matching(names),
        limit=limit,
        num_fewshot=num_fewshot,
        apply_chat_template=apply_chat_template,
        fewshot_as_multiturn=fewshot_as_multiturn,
        system_instruction=system_instruction,
        switches=switches,
        gen_kwargs=generation,
        log_samples=log_samples and output is not None,
        seed=seed,
        bootstrap_iters=bootstrap_iters,
        confirm_run_unsafe_code=confirm_run_unsafe_code,
    )
    if output is not None:
        prepare(output)
    if model is None:
        click.echo(SHIPPED_NOTE, err=True)
    llm = load(model or str(SHIPPED), settings)
    with Bars() as bars:
        results = evaluate(llm, asked, known, bars.report)
    if as_json:
        click.echo(json_text(results))
    else:
        console.write(lines(results))
    for path in write(output, results) if output is not None else ():
        click.echo(f"written: {path}", err=True)
    return 0


def _list(known: Tasks, as_json: bool) -> None:
    listed = known.listed()
    if as_json:
        click.echo(json.dumps(listed))
        return
    sys.stdout.writelines(f"{kind[:-1]:<6}{name}\n" for kind, names in listed.items() for name in names)


def _switches(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    return json_object(text, "switches of the chat template", "--chat-template-kwargs", '{"enable_thinking": false}')


def _gen_kwargs(text: str | None) -> dict[str, Any]:
    """`temperature=0.6,do_sample=True`: values as JSON or Python write them, else text."""
    values: dict[str, Any] = {}
    for word in (text or "").split(","):
        name, equals, value = word.partition("=")
        if not word:
            continue
        if not equals or not name:
            raise UsageError(
                "settings of generation cannot be read",
                where="--gen-kwargs",
                found=repr(word)[:80],
                accepted="names and values, such as temperature=0.6,do_sample=True",
                hint="separate them with commas",
            )
        try:
            values[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except ValueError:
            values[name] = value
    return values
