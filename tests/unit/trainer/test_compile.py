"""`training.compile`: the same gradients, from code that is compiled once for packs of all sizes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from leyden.libs.contracts.config import PpoClip, RunConfig
from leyden.services.trainer.model.cpu.products import use_fast_products
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.remedies import CompilationFailed, naming_settings
from leyden.services.trainer.ranks.collectives import ALONE
from leyden.services.trainer.ranks.messages import Load
from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.batch import Sample
from leyden.services.trainer.state import resume
from leyden.services.trainer.state.assembly import make_accelerator
from leyden.services.trainer.step.batch import Batch
from tests.support.builders import run_document
from tests.support.long import long_only
from tests.unit.trainer.cases import agent_samples, gradients_of, tiny_qwen

CPU = make_accelerator("cpu", "float32")


def gradients(policy: Policy, samples: list[Sample], pack_tokens: int) -> tuple[float, list[Tensor]]:
    policy.zero_grad()
    computed = gradients_of(policy, Batch(samples), PpoClip(), pack_tokens)
    return computed.loss, [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]


def make_policy(*, compiled: bool) -> Policy:
    model = tiny_qwen(dtype=torch.float32)
    use_fast_products(model, head=model.get_output_embeddings())
    return Policy(model, activation_checkpointing=True, compiled=compiled)


# The compiler warns of its own code.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(300)
@long_only
def test_compiled_layers_have_the_same_gradients_and_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "LEAST_PREFIX", 1)
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = make_policy(compiled=False), make_policy(compiled=True)
    graphs = []
    for seed, pack_tokens in enumerate((40, 60, 100, 33)):
        samples = agent_samples(seed, groups=1 + seed)
        loss, expected = gradients(plain, samples, pack_tokens)
        found_loss, found = gradients(compiled, samples, pack_tokens)
        assert found_loss == pytest.approx(loss, rel=1e-5)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
        graphs.append(counters["stats"]["unique_graphs"])
    # Norm, MLP, attention before and after the kernel; that one twice, without and with a prefix. Not for each layer.
    assert 4 <= graphs[0] <= 6
    assert graphs == [graphs[0]] * len(graphs)


@pytest.mark.parametrize(
    ("compiled", "remedy"), [(True, "training.compile false"), (False, "training.attention dense")]
)
def test_a_part_that_cannot_be_compiled_names_the_setting(compiled: bool, remedy: str) -> None:
    config = RunConfig.model_validate(run_document(training={"compile": compiled}))
    failing = pytest.raises(CompilationFailed, match=rf"write {remedy}.*no compiler")
    with failing, naming_settings(config, "the step"):
        raise TorchDynamoException("no compiler")


def test_a_learner_that_cannot_be_compiled_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TorchDynamoException("no compiler")

    monkeypatch.setattr(resume, "assemble_learner", fail)
    load = Load(Path("base"), RunConfig.model_validate(run_document(training={"compile": True})))
    with pytest.raises(CompilationFailed, match=r"write training.compile false.*no compiler"):
        resume.restore_learner(load, CPU, ALONE)
