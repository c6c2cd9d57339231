import pytest
import torch
from torch import nn

from leyden.services.trainer.model import head
from leyden.services.trainer.model.head import sampled_outputs

VOCABULARY, HIDDEN = 23, 6


def case(dtype: torch.dtype, *, bias: bool, states: int = 9, tokens: int = 14) -> tuple[nn.Linear, list[torch.Tensor]]:
    torch.manual_seed(0)
    layer = nn.Linear(HIDDEN, VOCABULARY, bias=bias).to(dtype)
    hidden = torch.randn(states, HIDDEN, dtype=dtype, requires_grad=True)
    temperatures = torch.rand(states) + 0.5
    rows, token_ids = torch.randint(states, (tokens,)), torch.randint(VOCABULARY, (tokens,))
    return layer, [hidden, temperatures, rows, token_ids]


def plain(layer: nn.Linear, columns: list[torch.Tensor]) -> torch.Tensor:
    hidden, temperatures, rows, token_ids = columns
    logits = layer(hidden) / temperatures[:, None].to(hidden.dtype)
    return logits.log_softmax(-1)[rows, token_ids]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tile", [1, 40, 10_000])
def test_tiles_change_neither_log_probabilities_nor_gradients(
    monkeypatch: pytest.MonkeyPatch, tile: int, bias: bool
) -> None:
    monkeypatch.setattr(head, "tile_logits", lambda _: tile)
    monkeypatch.setattr(head, "TILE_ROWS", 4)
    layer, columns = case(torch.float64, bias=bias)
    # Two tokens share a state, and one moves nothing.
    columns[2][:2], upstream = 3, torch.randn(14, dtype=torch.float64)
    upstream[5] = 0
    wanted = [columns[0], *layer.parameters()]
    one, other = sampled_outputs(layer, *columns)[0], plain(layer, columns)
    assert torch.allclose(one, other, atol=1e-12)
    pairs = zip(torch.autograd.grad(one, wanted, upstream), torch.autograd.grad(other, wanted, upstream), strict=True)
    assert all(torch.allclose(ours, plain_one, atol=1e-12) for ours, plain_one in pairs)


@pytest.mark.parametrize("tile", [1, 40, 10_000])
def test_entropies_and_their_gradients_equal_those_of_all_logits(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    monkeypatch.setattr(head, "tile_logits", lambda _: tile)
    monkeypatch.setattr(head, "TILE_ROWS", 4)
    layer, columns = case(torch.float64, bias=True)
    wanted = [columns[0], *layer.parameters()]
    upstream_K, upstream_U = torch.randn(14, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    # A state of which the entropy alone moves anything, and one that nothing does.
    columns[2][columns[2] == 2], columns[2][columns[2] == 5] = 3, 3
    upstream_U[5] = 0
    one = sampled_outputs(layer, *columns, entropies=True)
    logprobs = (layer(columns[0]) / columns[1][:, None].double()).log_softmax(-1)
    other = plain(layer, columns), -(logprobs.exp() * logprobs).sum(-1)
    assert all(torch.allclose(ours, theirs, atol=1e-12) for ours, theirs in zip(one, other, strict=True))
    both = [upstream_K, upstream_U]
    ours, theirs = (torch.autograd.grad(outputs, wanted, both, retain_graph=True) for outputs in (one, other))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))
    # Each of the two alone.
    for place, upstream in enumerate(both):
        alone = (torch.autograd.grad(o[place], wanted, upstream, retain_graph=True) for o in (one, other))
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*alone, strict=True))


def test_autocast_rounds_no_entropy() -> None:
    torch.manual_seed(0)
    layer, hidden = nn.Linear(64, 500, bias=False).bfloat16(), (4 * torch.randn(30, 64)).bfloat16()
    columns = [hidden, torch.ones(30), torch.arange(30), torch.arange(30)]
    expected = sampled_outputs(layer, *columns, entropies=True)[1]
    with torch.autocast("cpu", torch.bfloat16):
        found = sampled_outputs(layer, *columns, entropies=True)[1]
    assert torch.equal(found, expected)


def test_no_log_probability_is_above_0_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "tile_logits", lambda _: 1000)
    torch.manual_seed(0)
    layer = nn.Linear(64, 500, bias=False).bfloat16()
    hidden = (20 * torch.randn(300, 64)).bfloat16()
    # Likely tokens, whose logits are the normalisers nearly.
    token_ids = layer(hidden).argmax(dim=1)
    with torch.no_grad():
        found = sampled_outputs(layer, hidden, torch.ones(300), torch.arange(300), token_ids)[0]
        expected = layer(hidden).float().log_softmax(-1)[range(300), token_ids]
    assert found.max() <= 1e-5
    assert torch.allclose(found, expected, atol=1e-4)


def test_no_positions_give_no_logprobs() -> None:
    layer, columns = case(torch.float32, bias=False, states=1, tokens=1)
    nothing = [columns[0][:0], columns[1][:0], columns[2][:0], columns[3][:0]]
    assert sampled_outputs(layer, *nothing)[0].tolist() == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_tile_is_larger_than_its_bound(device: str) -> None:
    for rows, tokens in ((1, 152_000), (300, 49_152), (100_000, 152_000), (5, 3)):
        tiles = list(head._tiles(rows, tokens, torch.device(device)))
        assert all((r.stop - r.start) * (t.stop - t.start) <= head.tile_logits(device) for r, t in tiles)
        assert sum((r.stop - r.start) * (t.stop - t.start) for r, t in tiles) == rows * tokens


def test_a_temperature_is_not_rounded_to_the_type_of_the_states() -> None:
    """In bfloat16 a temperature of 0.6 is 0.6016; states are rounded too, but in either direction."""
    layer = nn.Linear(1, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0], [0.0]])
    hidden = (torch.arange(1000) / 1000 + 1).bfloat16()[:, None]
    first = torch.zeros(1000, dtype=torch.long)
    found, _ = sampled_outputs(layer.bfloat16(), hidden, torch.full((1000,), 0.6), torch.arange(1000), first)
    logits = found.detach().exp().logit()
    assert (logits / (hidden[:, 0].float() / 0.6)).mean() == pytest.approx(1.0, abs=5e-4)
