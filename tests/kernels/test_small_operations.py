"""Norms, rotary embedding, embedding rows, tied logits, and the latent form of attention, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hadron.kernels.provider import Provider
from hadron.kernels.reference import embedding, lm_head, mla, norm, rope


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm() -> None:
    x, weight = normal(5, 8), normal(8, seed=1)
    expected = x.numpy() / np.sqrt((x.numpy() ** 2).mean(-1, keepdims=True) + 1e-3) * weight.numpy()
    np.testing.assert_allclose(norm.rms_norm(x, weight, 1e-3, torch.float32).numpy(), expected, rtol=1e-5)
    assert torch.equal(
        norm.rms_norm(x, None, 1e-3, torch.float32), norm.rms_norm(x, torch.ones(8), 1e-3, torch.float32)
    )
    assert norm.rms_norm(x, weight, 1e-3, torch.bfloat16).dtype == torch.bfloat16


def test_gated_rms_norm() -> None:
    x, gate, weight = normal(5, 8), normal(5, 8, seed=1), normal(8, seed=2)
    expected = norm.rms_norm(x, weight, 1e-5, torch.float32).numpy() / (1 + np.exp(-gate.numpy()))
    np.testing.assert_allclose(norm.gated_rms_norm(x, gate, weight, 1e-5, torch.float32).numpy(), expected, rtol=1e-5)


def test_layer_norm() -> None:
    x, weight, bias = normal(5, 8) * 3 + 1, normal(8, seed=1), normal(8, seed=2)
    centred = x.numpy() - x.numpy().mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * weight.numpy() + bias.numpy()
    np.testing.assert_allclose(norm.layer_norm(x, weight, bias, 1e-6, torch.float32).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("interleave", [True, False])
def test_rope_turns_pairs(interleave: bool) -> None:
    x, positions = normal(4, 2, 6), torch.tensor([0, 1, 7, 300])
    found = rope.rotate(x, positions, 50.0, interleave).numpy()
    for t, position in enumerate(positions.tolist()):
        for i in range(3):
            a, b = (2 * i, 2 * i + 1) if interleave else (i, i + 3)
            turn = np.exp(1j * position * 50.0 ** (-2 * i / 6))
            turned = (x[t, :, a].numpy() + 1j * x[t, :, b].numpy()) * turn
            np.testing.assert_allclose(found[t][:, a], turned.real, atol=1e-4)
            np.testing.assert_allclose(found[t][:, b], turned.imag, atol=1e-4)


def test_rope_of_nothing_is_nothing() -> None:
    x = torch.zeros(3, 0)
    assert rope.rotate(x, torch.arange(3), 50.0, True) is x


def test_embedding_rows_and_tied_logits() -> None:
    table, hidden = normal(9000, 6).bfloat16(), normal(2, 6, seed=1)
    found = embedding.rows(table, torch.tensor([8999, 0]))
    assert found.dtype == torch.float32
    assert torch.equal(found, table[[8999, 0]].float())
    np.testing.assert_allclose(lm_head.bind(table)(hidden).numpy(), hidden.numpy() @ table.float().numpy().T, atol=1e-5)


def test_br53_attention_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Halves:
        key, value, scale = normal(2, 3, 4), normal(2, 5, 4, seed=1), 0.5

    query, rows = normal(6, 2, 6, seed=2), normal(20, 6, seed=3)
    slots = torch.tensor([[0, 3, 5], [1, -1, -1], [-1, -1, -1], [19, 18, 2], [7, 8, -1], [4, 4, 4]])
    context = normal(11, 6, seed=4)
    whole = (
        mla.sparse_attend(query, rows, slots, Halves()),
        mla.dense_attend(normal(6, 2, 5, seed=5), context, 5, Halves()),
    )
    monkeypatch.setattr(mla, "BOUND", 40)
    tiled = (
        mla.sparse_attend(query, rows, slots, Halves()),
        mla.dense_attend(normal(6, 2, 5, seed=5), context, 5, Halves()),
    )
    for a, b in zip(whole, tiled, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert not whole[0][2].any()  # a query that selects nothing attends to nothing


@pytest.mark.parametrize(
    ("selection", "table", "words"),
    [
        ([[8]], [[0, 1]], "outside a table of 2 pages"),
        ([[5]], [[0, -1]], "block outside"),
        ([[5]], [[0, 9]], "block outside"),
    ],
)
def test_br54_selected_positions_out_of_range_raise(
    selection: list[list[int]], table: list[list[int]], words: str
) -> None:
    with pytest.raises(IndexError, match=words):
        mla.selected_slots(torch.tensor(selection), torch.tensor(table), 4, 4)


def test_unselected_slots_stay_unselected() -> None:
    found = mla.selected_slots(torch.tensor([[1, 6, -1]]), torch.tensor([[3, 0]]), 4, 4)
    assert found.tolist() == [[13, 2, -1]]


def test_a_provider_replaces_an_operation_by_name() -> None:
    assert Provider().function("norm", "rms_norm") is norm.rms_norm
    with pytest.raises(ValueError, match="not operations: nrom"):
        Provider({"nrom": "cpu"})
    with pytest.raises(ValueError, match="'nrom' is not an operation"):
        Provider().function("nrom", "rms_norm")
    with pytest.raises(ModuleNotFoundError, match="elsewhere"):
        Provider({"norm": "elsewhere"}).function("norm", "rms_norm")
