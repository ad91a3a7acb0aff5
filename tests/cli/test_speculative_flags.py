"""`--num-speculative-tokens` and `--speculative-config`: how they are read, and what is said of what they gave."""

from __future__ import annotations

from typing import Any

import click
import pytest

from conftest import DATA
from hadron import LLM
from hadron.cli.main import run
from hadron.cli.options import GroupedCommand, engine_options
from hadron.engine.config import EngineConfig
from hadron.errors import PlanError, UsageError

DRAFTING = str(DATA / "glm52-quark-mxfp4-attnptpc")
RUN = ["--kernels", "reference", "--dtype", "float32", "--threads", "1", "--temperature", "0", "--max-tokens", "12",
       "--ignore-eos"]  # fmt: skip


@click.command(cls=GroupedCommand)
@engine_options
@click.pass_context
def probe(ctx: click.Context, **settings: Any) -> None:
    """Nothing but the options."""
    ctx.obj.update(settings)


def settings_of(*flags: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    probe.main(list(flags), obj=found, standalone_mode=False)
    return found


def test_both_flags_are_one_field() -> None:
    wanted = {"method": "mtp", "num_speculative_tokens": 3}
    text = '{"method": "mtp", "num_speculative_tokens": 3}'
    assert settings_of("--num-speculative-tokens", "3")["speculative_config"] == wanted
    assert settings_of("--speculative-config", text)["speculative_config"] == wanted
    assert settings_of()["speculative_config"] is None
    assert "num_speculative_tokens" not in settings_of("--num-speculative-tokens", "3")
    assert EngineConfig(**settings_of("--num-speculative-tokens", "3")).num_speculative_tokens == 3
    assert EngineConfig(**settings_of()).num_speculative_tokens == 0


def test_what_cannot_be_read_is_said() -> None:
    for text in ("{", "3", '"mtp"'):
        with pytest.raises(UsageError) as error:
            settings_of("--speculative-config", text)
        assert (error.value.what, error.value.where) == ("how to draft cannot be read", "--speculative-config")
        assert repr(text) in error.value.found and '"num_speculative_tokens": 2' in error.value.accepted
    with pytest.raises(UsageError, match="drafting is asked for twice"):
        settings_of("--num-speculative-tokens", "2", "--speculative-config", "{}")


@pytest.mark.parametrize(
    "wanted",
    [
        {}, {"method": "mtp"}, {"method": "ngram", "num_speculative_tokens": 2}, {"num_speculative_tokens": 2},
        {"method": "mtp", "num_speculative_tokens": 0}, {"method": "mtp", "num_speculative_tokens": 17},
        {"method": "mtp", "num_speculative_tokens": True}, {"method": "mtp", "num_speculative_tokens": "2"},
        {"method": "mtp", "num_speculative_tokens": 2, "model": "x"}, "mtp",
    ],
)  # fmt: skip
def test_other_wishes_are_refused(wanted: Any) -> None:
    with pytest.raises(UsageError) as error:
        EngineConfig(speculative_config=wanted)
    assert (error.value.where, error.value.found) == ("--speculative-config", repr(wanted))
    assert error.value.accepted == '{"method": "mtp", "num_speculative_tokens": 1 to 16}'


def test_a_checkpoint_without_the_layer_is_refused_before_anything_is_loaded() -> None:
    wanted = {"method": "mtp", "num_speculative_tokens": 2}
    with pytest.raises(PlanError) as error:
        LLM(DATA / "glm52-ct-w4a16", speculative_config=wanted)
    assert "HC507" in str(error.value)
    assert "--num-speculative-tokens 2" in str(error.value), "what check must be given to say the same"


def test_check_plans_the_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", DRAFTING, "--num-speculative-tokens", "2"]) == 0
    assert "mtp        layer 5, usable: complete; drafts 2 a step" in capsys.readouterr().out
    assert run(["check", str(DATA / "glm52-ct-w4a16"), "--num-speculative-tokens", "2"]) == 1
    assert "HC507 drafting was asked for and is not possible" in capsys.readouterr().out


def test_generate_says_the_same_and_how_many_guesses_were_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", DRAFTING, "--prompt-ids", "5,9,2", *RUN]) == 0
    plain = capsys.readouterr()
    assert run(["generate", DRAFTING, "--prompt-ids", "5,9,2", "--num-speculative-tokens", "3", *RUN]) == 0
    shown = capsys.readouterr()
    assert shown.out == plain.out
    assert " guesses were right (" in shown.err and shown.err.endswith(" tokens a step\n")
    assert plain.err == ""
