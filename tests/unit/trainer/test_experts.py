"""Mixtures of experts: routers, adapters beside experts, weights held in bfloat16, and the files of a version."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from leyden.libs.contracts.config import PpoClip, RunConfig
from leyden.libs.contracts.judgements import Shape, model_config
from leyden.libs.contracts.weights import ADAPTER_FOLDER, weight_files
from leyden.services.trainer.model.experts import expert_modules, hold_experts, router_names
from leyden.services.trainer.model.held import hold_frozen
from leyden.services.trainer.model.load import read_model
from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.batch import trained_tokens
from leyden.services.trainer.state import folders
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.state.versions import adopt_weights, export_version
from leyden.services.trainer.step.gradients import batch_logprobs, plan_batch
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.step import optimizer_step
from tests.support.builders import run_document
from tests.unit.trainer.cases import agent_samples, tiny_experts, tiny_gpt_oss
from tests.unit.trainer.test_compute import assert_same, plain_gradients, shared_gradients

CPU = make_accelerator("cpu", "float32")
LORA = {"rank": 3, "target_modules": ["q_proj", "o_proj"]}
MIXTURES = {"qwen3_moe": tiny_experts, "gpt_oss": tiny_gpt_oss}


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "LEAST_PREFIX", 1)


@pytest.fixture(scope="module", params=MIXTURES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    MIXTURES[family](dtype=torch.float32).save_pretrained(folder)
    return folder


def config_of(**training: Any) -> RunConfig:
    training = {"micro_batch_tokens": 40, **training}
    return RunConfig.model_validate(
        run_document(optimizer={"learning_rate": 1e-2}, algorithm={"type": "ppo_clip"}, training=training)
    )


def trained(base: Path, **training: Any) -> Learner:
    learner = assemble_learner(base, config_of(**training), CPU)
    optimizer_step(learner, agent_samples(0), config_of(**training))
    return learner


def moved(base: Path, after: dict[str, torch.Tensor]) -> set[str]:
    before = read_model(base).state_dict()
    return {name for name, weight in before.items() if not torch.equal(after[name], weight)}


@pytest.mark.parametrize("router", ["frozen", "trained"])
def test_gradients_are_those_of_separate_rows_whether_or_not_the_router_trains(family: str, router: str) -> None:
    model, samples = MIXTURES[family](router=router), agent_samples(2)
    expected = plain_gradients(model, PpoClip(), samples)
    assert set(router_names(model)).isdisjoint(expected[1]) == (router == "frozen")
    assert any("experts" in name for name in expected[1])
    assert_same(shared_gradients(model, PpoClip(), samples), expected)


def test_a_router_learns_only_where_the_run_says_so(family: str, base: Path) -> None:
    routers = set(router_names(MIXTURES[family]()))
    assert len(routers) == {"qwen3_moe": 2, "gpt_oss": 6}[family]
    frozen, learns = (moved(base, trained(base, router=how).model.state_dict()) for how in ("frozen", "trained"))
    assert (frozen & routers, learns & routers) == (set(), routers)
    assert "model.layers.1.mlp.experts.down_proj" in frozen


def test_a_trained_router_needs_one_and_weights_that_train(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="has no router"):
        assemble_learner(tiny_model, config_of(router="trained"), CPU)
    with pytest.raises(ValidationError, match="remove one of them"):
        config_of(router="trained", lora={})


def test_a_folder_that_transformers_wrote_has_the_shape_of_the_model(family: str, base: Path) -> None:
    config = model_config(base)
    assert config is not None
    found = Shape.of(config)
    assert found is not None
    assert found.parameters == {name: tuple(one.shape) for name, one in MIXTURES[family]().named_parameters()}


def test_a_version_has_the_published_names_in_several_files(
    family: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "FILE_BYTES", 20_000)
    learner = trained(base)
    export = export_version(learner, base, tmp_path / "1")
    files = weight_files(export.path)
    names = {name for file in files for name in load_file(file)}
    assert len(files) > 1
    assert names == {name for file in weight_files(base) for name in load_file(file)}
    of_experts = {
        "qwen3_moe": {"4.gate_proj.weight", "4.up_proj.weight", "4.down_proj.weight"},
        "gpt_oss": {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"},
    }[family]
    assert {f"model.layers.2.mlp.experts.{one}" for one in of_experts} <= names
    assert adopt_weights(learner, export.path) == 0


def test_adapters_stand_beside_attention_and_not_beside_experts(base: Path, tmp_path: Path) -> None:
    learner = trained(base, lora=LORA)
    export = export_version(learner, base, tmp_path / "1")
    changed = moved(base, read_model(export.path).state_dict())
    assert changed == {f"model.layers.{n}.self_attn.{one}.weight" for n in range(3) for one in LORA["target_modules"]}
    assert (export.path / ADAPTER_FOLDER).is_dir()
    with pytest.raises(ValueError, match=r"\['down_proj'\] are matrices of experts.*train the weights"):
        assemble_learner(base, config_of(lora={"target_modules": ["q_proj", "down_proj"]}), CPU)


def test_all_linear_is_attention_also_where_some_layers_have_no_experts(base: Path, tmp_path: Path) -> None:
    learner = trained(base, lora={"rank": 3})
    export = export_version(learner, base, tmp_path / "1")
    changed = moved(base, read_model(export.path).state_dict())
    assert changed == {f"model.layers.{n}.self_attn.{one}_proj.weight" for n in range(3) for one in "qkvo"}


def test_frozen_experts_in_bfloat16_compute_what_rounded_ones_in_float32_do(base: Path) -> None:
    held, rounded = (assemble_learner(base, config_of(lora=LORA), CPU) for _ in range(2))
    hold_frozen(held.model, held.model.get_input_embeddings().weight)
    hold_experts(held.model)
    assert {p.dtype for module in expert_modules(held.model) for p in module.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        for own, narrow in zip(rounded.model.parameters(), held.model.parameters(), strict=True):
            own.copy_(narrow)
    samples = agent_samples(1)
    tokens = trained_tokens(samples)
    found = [batch_logprobs(one.policy, plan_batch(samples, tokens, 40), len(tokens), CPU) for one in (held, rounded)]
    assert found[0] == pytest.approx(found[1], abs=1e-6)
