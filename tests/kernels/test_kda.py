"""The delta rule against numpy and its chunked form; splitting a sequence changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hadron.kernels.reference.kda import chunked, forget_gate, recurrence, short_convolution, unit

HEADS, KEY, VALUE = 3, 5, 4


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int, steep: float = 1.0) -> tuple[torch.Tensor, ...]:
    q, k, v = (normal(tokens, HEADS, size, seed=i) for i, size in enumerate((KEY, KEY, VALUE)))
    g = -normal(tokens, HEADS, KEY, seed=3).abs() * steep
    return q, k, v, g, normal(tokens, HEADS, seed=4).sigmoid(), normal(HEADS, KEY, VALUE, seed=5)


def delta_rule(*tensors: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The update as Kimi Linear writes it: S = (I - beta k k^T) diag(exp g) S + beta k v^T."""
    q, k, v, g, beta, state = (t.double().numpy() for t in tensors)
    out = np.zeros(v.shape)
    state = state.copy()
    for h in range(q.shape[1]):
        for t in range(q.shape[0]):
            kn = k[t, h] / np.sqrt((k[t, h] ** 2).sum() + 1e-6)
            qn = q[t, h] / np.sqrt((q[t, h] ** 2).sum() + 1e-6) / np.sqrt(q.shape[2])
            erase = np.eye(len(kn)) - beta[t, h] * np.outer(kn, kn)
            state[h] = erase @ (np.exp(g[t, h])[:, None] * state[h]) + beta[t, h] * np.outer(kn, v[t, h])
            out[t, h] = state[h].T @ qn
    return out, state


@pytest.mark.parametrize("form", [recurrence, chunked])
@pytest.mark.parametrize(("tokens", "steep"), [(1, 1.0), (63, 0.1), (64, 1.0), (65, 5.0), (150, 0.01)])
def test_both_forms_against_numpy(form: object, tokens: int, steep: float) -> None:
    given = inputs(tokens, steep)
    expected, last = delta_rule(*given)
    out, state = form(*given)  # type: ignore[operator]
    assert out.dtype == state.dtype == torch.float32
    np.testing.assert_allclose(out.numpy(), expected, atol=2e-5)
    np.testing.assert_allclose(state.numpy(), last, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_chunked_equals_the_recurrence_at_any_chunk_size(chunk: int) -> None:
    given = inputs(40)
    expected, last = recurrence(*given)
    out, state = chunked(*given, chunk=chunk)
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.allclose(state, last, atol=1e-5)


def test_strong_decay_does_not_overflow() -> None:
    """-5 a token over a chunk of 64 is exp(320) the other way round."""
    q, k, v, _, beta, state = inputs(100)
    g = torch.full((100, HEADS, KEY), -5.0)
    expected, _ = recurrence(q, k, v, g, beta, state)
    out, _ = chunked(q, k, v, g, beta, state)
    assert torch.isfinite(out).all()
    assert torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("at", [1, 2, 3, 17, 39])
def test_a_split_anywhere_gives_the_same_bits(at: int) -> None:
    *sequence, state = inputs(40)
    whole, last = recurrence(*sequence, state)
    first, between = recurrence(*(x[:at] for x in sequence), state)
    second, end = recurrence(*(x[at:] for x in sequence), between)
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(end, last)


def test_the_state_that_was_given_is_not_changed() -> None:
    *sequence, state = inputs(4)
    before = state.clone()
    recurrence(*sequence, state)
    chunked(*sequence, state)
    assert torch.equal(state, before)


@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_short_convolution(kernel: int) -> None:
    x, weight = normal(9, 6), normal(6, kernel, seed=1)
    window = normal(6, kernel - 1, seed=2)
    padded = np.concatenate([window.T.numpy(), x.numpy()])
    expected = np.zeros((9, 6))
    for t in range(9):
        total = sum(weight[:, j].numpy() * padded[t + j] for j in range(kernel))
        expected[t] = total / (1 + np.exp(-total))
    y, after = short_convolution(x, window, weight)
    np.testing.assert_allclose(y.numpy(), expected, atol=1e-5)
    np.testing.assert_array_equal(after.T.numpy(), padded[9:])


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_convolution_splits_anywhere(at: int) -> None:
    """Chunks shorter than the window too."""
    x, weight, window = normal(6, 4), normal(4, 4, seed=1), torch.zeros(4, 3)
    whole, last = short_convolution(x, window, weight)
    first, window = short_convolution(x[:at], window, weight)
    second, window = short_convolution(x[at:], window, weight)
    # torch takes a SiLU's last elements by other code than the rest
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=0, atol=1e-6)
    assert torch.equal(window, last)


def test_the_lower_bound_multiplies_and_does_not_clamp() -> None:
    raw, a_log, bias = normal(5, HEADS, KEY), normal(HEADS, seed=1), normal(HEADS * KEY, seed=2)
    shifted = (raw + bias.view(HEADS, KEY)).double().numpy()
    rate = np.exp(a_log.double().numpy())[:, None]
    bounded = forget_gate(raw, a_log, bias, -5.0)
    np.testing.assert_allclose(bounded.numpy(), -5.0 / (1 + np.exp(-rate * shifted)), rtol=1e-5)
    free = forget_gate(raw, a_log, bias, None)
    np.testing.assert_allclose(free.numpy(), -rate * np.log1p(np.exp(shifted)), rtol=1e-5)


def test_the_softplus_gate_does_not_overflow() -> None:
    found = forget_gate(torch.full((1, 1, 2), 500.0), torch.zeros(1), torch.zeros(2), None)
    assert found.flatten().tolist() == [-500.0, -500.0]


def test_unit_adds_its_own_eps_under_the_root() -> None:
    assert unit(torch.tensor([[1e-3, 0.0]])).tolist() == [[pytest.approx(1 / np.sqrt(2)), 0.0]]
