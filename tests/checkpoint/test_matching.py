"""One matcher for every dialect: a table over all kinds of entry (BR-31)."""

from __future__ import annotations

import pytest

from hadron.checkpoint.formats.matching import NameMatcher

MLP = "model.layers.1.mlp."


@pytest.mark.parametrize(
    ("entry", "name", "expected"),
    [
        # exact, and everything below
        ("model.layers.1.mlp.gate_proj", MLP + "gate_proj", True),
        ("model.layers.1.mlp.gate_proj", MLP + "up_proj", False),
        ("model.layers.1.mlp.gate", MLP + "gate_proj", False),
        ("model.layers.1.mlp.gate_proj", MLP + "gate", False),
        ("model.layers.1.mlp.experts", MLP + "experts.7.down_proj", True),
        ("model.layers.1.mlp.shared_expert", MLP + "shared_expert_gate", False),
        ("model.layers.1.mlp.shared_experts", MLP + "shared_experts.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("lm_head", "lm_head", True),
        ("lm_head", "model.layers.8.shared_head.head", False),
        # globs, whose star crosses dots
        ("model.layers.1*", "model.layers.10.mlp.up_proj", True),
        ("model.layers.1.*", "model.layers.10.mlp.up_proj", False),
        ("*self_attn*", "model.layers.1.self_attn.indexer.wk", True),
        ("*mlp.gate", MLP + "gate", True),
        ("*mlp.gate", MLP + "gate_proj", False),
        ("*.layers.?.mlp.up_proj", MLP + "up_proj", True),
        ("*.layers.?.mlp.up_proj", "model.layers.12.mlp.up_proj", False),
        ("*.layers.[12].mlp.up_proj", MLP + "up_proj", True),
        ("*", "anything.at.all", True),
        # regular expressions, from the start
        ("re:.*mlp.gate$", MLP + "gate", True),
        ("re:.*mlp.gate$", MLP + "gate_proj", False),
        ("re:model.layers.1", MLP + "gate_proj", True),
        ("re:layers.1", MLP + "gate_proj", False),
        # a fused name covers its parts, a part does not cover the fused name
        ("model.layers.1.mlp.gate_up_proj", MLP + "gate_proj", True),
        ("model.layers.1.mlp.gate_up_proj", MLP + "up_proj", True),
        ("model.layers.1.mlp.gate_up_proj", MLP + "down_proj", False),
        ("model.layers.1.mlp.gate_proj", MLP + "gate_up_proj", False),
        ("model.layers.1.self_attn.qkv_proj", "model.layers.1.self_attn.k_proj", True),
        ("*self_attn.fused_qkv_a_proj", "model.layers.1.self_attn.kv_a_proj_with_mqa", True),
        # nothing else
        ("mlp.gate", MLP + "gate", False),
        ("gate_proj", MLP + "gate_proj", False),
    ],
)  # fmt: skip
def test_br31_one_table_for_every_kind_of_entry(entry: str, name: str, expected: bool) -> None:
    assert NameMatcher([entry]).find(name) == (entry if expected else None)


@pytest.mark.parametrize(
    ("entry", "name", "expected"),
    [
        ("mlp.gate", MLP + "gate", True),
        ("mlp.gate", MLP + "gate_proj", False),
        ("visual", "model.visual.blocks.0.attn.qkv", True),
        ("gate", MLP + "gate", True),
        ("model.layers.1.mlp.gate", "x.model.layers.1.mlp.gate", False),
    ],
)
def test_loose_entries_match_whole_components_anywhere(entry: str, name: str, expected: bool) -> None:
    assert NameMatcher([entry], loose=True).find(name) == (entry if expected else None)


def test_a_regex_matches_the_whole_name_where_the_dialect_says_so() -> None:
    assert NameMatcher(["re:.*mlp"], whole_regex=True).find(MLP + "gate") is None
    assert NameMatcher(["re:.*mlp.*"], whole_regex=True).find(MLP + "gate") == "re:.*mlp.*"


def test_an_exact_entry_wins_over_patterns_and_patterns_keep_their_order() -> None:
    matcher = NameMatcher(["re:.*gate.*", "re:.*gate_proj", MLP + "up_proj", "re:.*up_proj"])
    assert matcher.find(MLP + "gate_proj") == "re:.*gate.*"
    assert matcher.find(MLP + "up_proj") == MLP + "up_proj"


def test_unmatched_counts_what_an_entry_could_match_not_who_came_first() -> None:
    matcher = NameMatcher(["*mlp*", MLP + "gate_proj", "model.layers.9", "re:[", "*nothing*"])
    names = [MLP + "gate_proj", MLP + "up_proj"]
    for name in names:
        matcher.find(name)
    assert matcher.unmatched(names) == ["model.layers.9", "*nothing*"]
    assert [entry for entry, _ in matcher.invalid] == ["re:["]


def test_a_thousand_prefixes_are_looked_up_by_length() -> None:
    matcher = NameMatcher([f"model.layers.{i}.self_attn*" for i in range(1000)])
    assert len(matcher._prefixes) == 3 and not matcher._patterns  # digits: 1, 2, 3
    assert matcher.find("model.layers.999.self_attn.o_proj") == "model.layers.999.self_attn*"
