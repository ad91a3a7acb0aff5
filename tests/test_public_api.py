"""The public names: what `import hadron` offers and loads, and that flags and keywords are called the same."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest

import hadron
from hadron import errors
from hadron.cli.generate import command
from hadron.engine.config import EngineConfig
from hadron.sampling_params import SamplingParams

PROMPT_FLAGS = {"apply_chat_template", "model", "source", "prompt", "prompt_ids", "as_json"}


def test_all_names_are_there_and_nothing_else() -> None:
    public = {name for name in dir(hadron) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(vars(hadron).get(name))}
    helpers = {"annotations", "Any", "TYPE_CHECKING"}
    assert public - modules - helpers == set(hadron.__all__) - {"__version__"}
    for name in hadron.__all__:
        assert getattr(hadron, name) is not None


def test_every_error_is_public() -> None:
    tree = {n for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, errors.HadronError)}
    assert tree <= set(hadron.__all__)
    assert all(issubclass(getattr(hadron, name), hadron.HadronError) for name in tree)


def test_the_names_are_the_objects_of_their_modules() -> None:
    from hadron.engine.single import linear
    from hadron.llm import LLM
    from hadron.preflight.build import make_plan

    assert (hadron.LLM, hadron.check, hadron.linear) == (LLM, make_plan, linear)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hadron' has no attribute 'nothing'"):
        _ = hadron.nothing


def test_importing_hadron_loads_no_library() -> None:
    code = (
        "import sys, hadron, hadron.errors; hadron.SamplingParams(); "
        "print({'torch', 'numpy', 'tokenizers', 'jinja2', 'rich', 'click', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_star_import_gives_the_public_names() -> None:
    code = "from hadron import *; import hadron; print(set(hadron.__all__) <= set(globals()), __version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"True {hadron.__version__}\n"


def test_signatures_are_typed() -> None:
    methods = [hadron.LLM.__init__, hadron.LLM.generate, hadron.LLM.chat, hadron.LLM.logits]
    for function in (*methods, hadron.linear, hadron.check):
        for name, parameter in inspect.signature(function).parameters.items():
            assert name == "self" or parameter.annotation is not inspect.Parameter.empty, (function, name)
        assert "return" in function.__annotations__, function


def test_keywords_of_llm_are_the_engines_options() -> None:
    keywords = {
        name: p.default
        for name, p in inspect.signature(hadron.LLM.__init__).parameters.items()
        if p.kind is p.KEYWORD_ONLY and name != "report"
    }
    assert keywords == {field.name: field.default for field in dataclasses.fields(EngineConfig)}


def test_every_option_has_a_flag_of_its_name() -> None:
    options = {p.name: p for p in command.params}
    fields = {f.name for f in dataclasses.fields(EngineConfig)} | {f.name for f in dataclasses.fields(SamplingParams)}
    short = {"num_speculative_tokens"}  # for speculative_config
    assert set(options) - PROMPT_FLAGS - short == fields
    for name in fields:
        assert f"--{name.replace('_', '-')}" in options[name].opts


def test_flags_default_to_what_keywords_default_to() -> None:
    flags = command.make_context("generate", []).params
    for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(SamplingParams)):
        if field.name not in ("max_tokens", "stop_token_ids"):  # a terminal wants longer texts; ids are parsed
            assert flags[field.name] == field.default, field.name
