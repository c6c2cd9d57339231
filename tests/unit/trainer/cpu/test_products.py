from pathlib import Path

import pytest
import torch
from torch import nn

from leyden.libs.contracts.config import RunConfig
from leyden.services.trainer.model.cpu.products import use_fast_products
from leyden.services.trainer.state import assembly


@pytest.mark.parametrize("bias", [True, False])
def test_fast_products_equal_plain_ones(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    fast = nn.Linear(24, 40, bias=bias)
    fast.load_state_dict(plain.state_dict())
    use_fast_products(fast)
    inputs = torch.randn(2, 5, 24)
    results = []
    for layer in (plain, fast):
        x = inputs.clone().requires_grad_()
        layer(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-4, rtol=1e-5)


def test_bfloat16_products_round_what_is_multiplied_and_nothing_else() -> None:
    torch.manual_seed(0)
    layer, head = nn.Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False)
    both = nn.ModuleList([layer, head])
    use_fast_products(both, head=head, bfloat16=True)
    x = torch.randn(5, 24, requires_grad=True)
    rounded = (x.bfloat16() @ layer.weight.bfloat16().t()).float()
    assert torch.equal(layer(x), rounded)
    assert torch.allclose(head(x), x @ head.weight.t(), atol=1e-5)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(5, 24), atol=0.05)


def test_fast_products_do_not_affect_other_precisions() -> None:
    layer = nn.Linear(4, 4).double()
    use_fast_products(layer)
    assert type(layer) is nn.Linear
    assert layer(torch.ones(1, 4, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(("device", "replaced"), [("cpu", True), ("cuda", False)])
def test_off_the_cpu_the_plain_modules_run(tiny_model: Path, device: str, replaced: bool) -> None:
    config = RunConfig.model_validate({"name": "n", "dataset": "d", "agent": {"command": ["x"]}})
    model = assembly._read(tiny_model, config, torch.device(device))
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert any(type(layer) is not nn.Linear for layer in layers) == replaced
