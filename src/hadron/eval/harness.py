"""Runs tasks of lm-eval on a loaded model. The only place that calls lm-eval, which is imported when it is needed."""

from __future__ import annotations

import contextlib
import difflib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hadron.errors import HadronError, UsageError
from hadron.eval import shipped

if TYPE_CHECKING:
    from hadron.eval.model import Progress
    from hadron.llm import LLM

#: What installs lm-eval.
INSTALL = "pip install 'hadron-llm[eval]'"
_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be evaluated, and how; names are lm-eval's.

    limit: documents of each task, or below 1 which part of them. switches: of the chat template. gen_kwargs: what
    to change about generation in every task that generates.
    """

    tasks: Sequence[str]
    limit: float | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None
    switches: Mapping[str, Any] = field(default_factory=dict)
    gen_kwargs: Mapping[str, Any] | None = None
    log_samples: bool = False
    seed: int = 1234
    bootstrap_iters: int = 1000
    confirm_run_unsafe_code: bool = False


def require() -> None:
    """`UsageError` where lm-eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "evaluation needs lm-eval, which is not installed",
            where="the optional packages of Hadron",
            found=str(error),
            accepted="the extra `eval`",
            hint=INSTALL,
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it tells of every setting that a task file has


class Tasks:
    """The task files that are known: lm-eval's, those that ship with Hadron, and those of further folders.

    A name in a later folder hides the same name of an earlier one.
    """

    def __init__(self, include_path: Sequence[Path] = ()) -> None:
        require()
        from lm_eval.tasks import TaskManager

        for path in include_path:
            if not path.is_dir():
                raise UsageError(
                    "a folder of tasks cannot be read",
                    where="--include-path",
                    found=f"{path}, which is {'a file' if path.exists() else 'not there'}",
                    accepted="a folder with task files (.yaml)",
                    hint="name the folder that the task file is in",
                )
        folders = [str(shipped.folder()), *map(str, include_path)]
        with _described("the task files cannot be read", ", ".join(map(str, include_path)) or "lm-eval"):
            self._own: Any = TaskManager(include_path=folders, include_defaults=False)
            # thousands of files, which takes seconds
            self._all: Callable[[], Any] = cache(lambda: TaskManager(include_path=folders))

    def manager(self, names: Sequence[str]) -> Any:
        """lm-eval's object that knows these names, which may be those of its own task files."""
        apart = {*self._own.all_subtasks, shipped.TAG}
        return self._own if set(names) <= apart else self._all()

    def listed(self) -> dict[str, list[str]]:
        """Names of groups, tags and tasks."""
        manager = self._all()
        return {"groups": manager.all_groups, "tags": manager.all_tags, "tasks": manager.all_subtasks}

    def matching(self, names: Sequence[str]) -> list[str]:
        """Every name, patterns such as `mmlu_*` replaced by what they match; `UsageError` for an unknown one."""
        manager = self.manager(names)
        known: list[str] = manager.all_tasks
        found: dict[str, None] = {}
        for name in names:
            matched = manager.match_tasks([name]) if set(name) & set("*?[") else [name] * (name in known)
            if not matched:
                close = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
                raise UsageError(
                    "there is no such task",
                    where="--tasks",
                    found=repr(name),
                    accepted=f"one of {len(known):,} names" + (f", such as {', '.join(close)}" if close else ""),
                    hint="`hadron eval --list-tasks` prints all; --include-path adds folders of task files",
                )
            found |= dict.fromkeys(matched)
        return list(found)


def evaluate(llm: LLM, asked: Asked, tasks: Tasks, progress: Progress) -> dict[str, Any]:
    """lm-eval's results: `results`, `configs`, `n-samples`, …, and `samples` where they were asked for.

    `shortened_requests` counts those whose context lost its beginning to fit. Errors of Hadron pass through;
    what lm-eval or a task file refuses is a `UsageError`.
    """
    from lm_eval.evaluator import simple_evaluate

    from hadron.eval.model import HadronLM

    names = tasks.matching(asked.tasks)
    model = HadronLM(llm, progress=progress, switches=asked.switches, seed=asked.seed)
    with _described("a task cannot be evaluated", ", ".join(names)[:200]), _without_foreign_bars():
        results: dict[str, Any] = simple_evaluate(
            model=model,
            tasks=list(names),
            num_fewshot=asked.num_fewshot,
            limit=asked.limit,
            bootstrap_iters=asked.bootstrap_iters,
            log_samples=asked.log_samples,
            system_instruction=asked.system_instruction,
            apply_chat_template=asked.apply_chat_template,
            fewshot_as_multiturn=asked.fewshot_as_multiturn,
            gen_kwargs=dict(asked.gen_kwargs) if asked.gen_kwargs else None,
            task_manager=tasks.manager(names),
            random_seed=asked.seed,
            numpy_random_seed=asked.seed,
            torch_random_seed=asked.seed,
            fewshot_random_seed=asked.seed,
            confirm_run_unsafe_code=asked.confirm_run_unsafe_code,
        )
    results["shortened_requests"] = model.shortened
    return results


@contextlib.contextmanager
def _without_foreign_bars() -> Iterator[None]:
    """lm-eval and datasets draw bars of their own, also into files; ours are enough. No argument stops them."""
    import datasets
    from lm_eval.api import task

    shown, bars = not datasets.are_progress_bars_disabled(), getattr(task, "tqdm", None)
    datasets.disable_progress_bars()
    if bars is not None:
        task.tqdm = lambda items, *_, **__: items
    try:
        yield
    finally:
        if bars is not None:
            task.tqdm = bars
        if shown:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def _described(what: str, where: str) -> Iterator[None]:
    """What a task file, its code or its data can cause is told as any other error, of whatever type it was.

    What our own code raised, called from there, is a bug of ours and stays what it is.
    """
    try:
        yield
    except HadronError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if Path(last.filename).is_relative_to(_PACKAGE):
            raise
        found = " ".join(f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})".split())
        raise UsageError(
            what,
            where=where,
            found=found[:400],
            accepted="a task of lm-eval whose data is on this machine or can be fetched",
            hint="docs/eval.md says which tasks need data; see the task's own README for more",
        ) from error
