"""Memory by arithmetic: parameters as the models' makers publish them, and worked numbers for one shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from docs.shapes import PUBLISHED
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.judgements import (
    GB,
    Machine,
    Models,
    Shape,
    engine_arguments,
    judge_memory,
    judge_model,
    memory,
)
from leyden.libs.contracts.judgements.memory import activation_bytes_a_token, forward_bytes, trained_parameters
from leyden.libs.contracts.overlay import overlay
from tests.support.builders import run_document

FLOAT32 = {"training": {"precision": "float32"}}
BFLOAT16 = {"training": {"precision": "bfloat16", "activation_checkpointing": True}}
LORA = {"training": {**BFLOAT16["training"], "lora": {"rank": 32}}}


def shape_of(name: str, **changes: Any) -> Shape:
    found = Shape.of({**PUBLISHED[name][0], **changes})
    assert found is not None
    return found


def run(changes: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(overlay(run_document(), changes))


def sizes(changes: dict[str, Any], machine: Machine, place: str = "gpu", model: str = "Qwen3-8B") -> dict[str, float]:
    """The parts that a place holds for certain, in GB."""
    found = memory(run(changes), Models(shape_of(model)), machine)
    return {one.name: round(one.size_bytes / GB, 1) for one in found if one.place == place and one.certain}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_has_the_published_number_of_parameters(name: str) -> None:
    config, published = PUBLISHED[name]
    found = Shape.of(config)
    assert found is not None
    assert found.size == published


def test_adapters_and_frozen_layers_count_what_trains() -> None:
    shape = shape_of("Qwen3-8B")
    # Rank 32 beside q, k, v, o, gate, up and down of 36 layers: 32 · 75776 · 36.
    layer = (4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 12288) * 3
    assert shape.adapters(32, "all-linear", ()) == 36 * 32 * layer == 87_293_952
    assert shape.adapters(32, ["q_proj", "o_proj"], ()) == 36 * 32 * 2 * 8192
    assert shape.trained(["model.layers.*", "lm_head.weight"]) == 151936 * 4096 + 4096
    assert shape.adapters(32, ["q_proj"], ["model.layers.[0-9].*"]) == 26 * 32 * 8192


def test_a_pass_of_eight_billion_parameters_without_gradients() -> None:
    shape = shape_of("Qwen3-8B")
    # Twice 1.24 billion outside and two layers of 0.19, in 2 bytes; four tiles of 64 MB.
    fixed = 2 * 2 * (2 * 151936 * 4096 + 4096 + 2 * 192_946_432) + 4 * 4 * 2**24
    token = activation_bytes_a_token(shape, 2)
    assert forward_bytes(shape, 2, "cuda", 1000, 0, 0, dense=False) == fixed + 1000 * token
    # Keys and values of 1024 in 36 layers, and states of 4096, in 2 and 4 bytes.
    behind = fixed + 1500 * token + 500 * 6 * (2 * 1024 * 36 + 4096)
    assert forward_bytes(shape, 2, "cuda", 1000, 500, 500, dense=False) == behind
    assert forward_bytes(shape, 2, "cuda", 1000, 500, 500, dense=True) == behind + 14 * 1000 * 1500


def test_states_of_eight_billion_parameters() -> None:
    one = {"weights": 32.8, "gradients": 32.8, "moments": 65.5}
    assert sizes(BFLOAT16, Machine()) == one
    # Gathered: 1.24 for embeddings, head and last norm, and two layers of 0.19; a gradient in 2 and in 4 bytes.
    eight = {
        "weights": 4.1, "gradients": 4.1, "gathered weights": 3.3, "gathered gradients": 7.5, "moments": 8.2,
    }  # fmt: skip
    assert sizes(BFLOAT16, Machine(gpus=8)) == sizes(BFLOAT16, Machine(gpus=4, hosts=2)) == eight
    assert sizes(BFLOAT16, Machine(gpus=8, hosts=2, copies=2)) == eight
    assert sizes(FLOAT32, Machine(gpus=8))["gathered weights"] == 6.5
    assert sizes({}, Machine(gpus=8)) == eight
    # 15.1 for matrices in bfloat16, 2.5 for embeddings and norms, 0.3 for adapters.
    assert sizes(LORA, Machine()) == {"weights": 18.0, "gradients": 0.3, "moments": 0.7}
    wide = overlay(LORA, {"training": {"lora": {"base_dtype": "float32"}}})
    assert sizes(wide, Machine()) == {"weights": 33.1, "gradients": 0.3, "moments": 0.7}
    assert sizes({**BFLOAT16, "optimizer": {"moments": "8bit"}}, Machine())["moments"] == 16.4
    penalty = {**BFLOAT16, "algorithm": {"type": "ppo_clip", "kl_coefficient": 0.1}}
    assert sizes(penalty, Machine()) == {**one, "reference": 32.8}
    hinted = {"algorithm": {"type": "reinforce", "distillation": {"hint": "It is {task.answer}."}}}
    assert sizes({**BFLOAT16, **hinted}, Machine()) == {**one, "teacher": 32.8}
    newest = overlay(hinted, {"algorithm": {"distillation": {"weights": "newest"}}})
    assert sizes({**BFLOAT16, **newest}, Machine()) == one
    assert "teacher" not in sizes({**LORA, **hinted}, Machine())
    critic = {"type": "ppo_clip", "critic": {"trunk": "own"}}
    own = {**BFLOAT16, "algorithm": critic, "credit": {"baseline": {"type": "value"}}}
    assert sizes(own, Machine()) == {"weights": 65.5, "gradients": 65.5, "moments": 131.1}


def test_a_critic_of_its_own_trains_all_of_its_weights_beside_adapters() -> None:
    critic = {"algorithm": {"type": "ppo_clip", "critic": {"trunk": "own"}}, "credit": {"baseline": {"type": "value"}}}
    adapted = {**LORA, **critic}
    # The adapters' 0.35 and the critic's 32.8 in gradients.
    assert sizes(adapted, Machine()) == {"weights": 50.7, "gradients": 33.1, "moments": 66.2}
    assert sizes(adapted, Machine(gpus=8))["gathered gradients"] == 7.5
    assert "gathered gradients" not in sizes(LORA, Machine(gpus=8))

    def copies(changes: dict[str, Any]) -> int:
        return next(
            one.size_bytes
            for one in memory(run(changes), Models(shape_of("Qwen3-8B")), Machine())
            if "copies" in one.name
        )

    size = shape_of("Qwen3-8B").size
    assert copies(adapted) == copies({**BFLOAT16, **critic}) == copies(BFLOAT16) == 2 * size
    assert copies(LORA) == 2 * 87_293_952


def test_a_named_model_counts_with_its_own_size() -> None:
    small, large = shape_of("Qwen3-0.6B"), shape_of("Qwen3-8B")
    taught = {"algorithm": {"type": "reinforce", "distillation": {"run": "run-1", "version": 3}}}
    valued = {
        "algorithm": {"type": "ppo_clip", "critic": {"trunk": "own", "model": "/critic"}},
        "credit": {"baseline": {"type": "value"}},
    }

    def needs(changes: dict[str, Any], models: Models) -> dict[str, tuple[int, bool]]:
        return {one.name: (one.size_bytes, one.certain) for one in memory(run(changes), models, Machine())}

    assert needs({**BFLOAT16, **taught}, Models(small, teacher=large))["teacher"] == (4 * large.size, True)
    of_folder = overlay(taught, {"algorithm": {"distillation": {"run": None, "version": None, "model": "/large"}}})
    assert needs({**BFLOAT16, **of_folder}, Models(small, teacher=large))["teacher"] == (4 * large.size, True)
    assert judge_memory(run({**LORA, **taught}), Models(large, teacher=small), Machine(1, 48 * GB)) == []
    found = needs({**BFLOAT16, **valued}, Models(small, critic=large))
    assert found["weights"] == found["gradients"] == (4 * (small.size + large.size), True)
    # Models that this machine does not see.
    assert needs({**BFLOAT16, **taught}, Models(small))["teacher"] == (0, False)
    found = needs({**BFLOAT16, **valued}, Models(small))
    assert (found["critic"], found["weights"]) == ((0, False), (4 * small.size, True))
    (judged,) = judge_memory(run({**BFLOAT16, **valued}), Models(large), Machine(1, 80 * GB))
    assert "critic not counted" in judged.reason


def test_processes_gather_the_layers_of_the_largest_model() -> None:
    taught = run({**BFLOAT16, "algorithm": {"type": "reinforce", "distillation": {"model": "/large"}}})
    needs = {
        one.name: one.size_bytes
        for one in memory(taught, Models(shape_of("Qwen3-0.6B"), teacher=shape_of("Qwen3-8B")), Machine(gpus=8))
    }
    assert round(needs["gathered weights"] / GB, 1) == 3.3
    assert round(needs["teacher"] / GB, 1) == 4.1


def test_an_older_version_is_counted_where_a_steps_gradients_need_less() -> None:
    def beyond(changes: dict[str, Any], machine: Machine) -> tuple[int, int]:
        needs = {need.name: need.size_bytes for need in memory(run(changes), Models(shape_of("Qwen3-8B")), machine)}
        freed = ("gradients", "gathered gradients", "activations", "bfloat16 copies")
        return needs.get("older version", 0), sum(needs.get(name, 0) for name in freed)

    assert beyond(BFLOAT16, Machine())[0] == beyond(BFLOAT16, Machine(gpus=8))[0] == 0
    # The last two layers train. A version has 2 bytes for each number of a matrix, and 4 for embeddings and norms.
    layers = ["model.layers.[0-9].*", "model.layers.[12][0-9].*", "model.layers.3[0-3].*"]
    top = overlay(BFLOAT16, {"training": {"frozen": ["model.embed_tokens.weight", *layers]}})
    shape = shape_of("Qwen3-8B")
    held = 4 * shape.size - 2 * shape.matrices
    found, freed = beyond(top, Machine())
    assert found == held - freed > 0
    # Two processes have a half of it each.
    found, freed = beyond(top, Machine(gpus=2))
    assert found == 0 < held // 2 < freed
    assert beyond(LORA, Machine())[0] == 0
    demonstrations = {"algorithm": {"type": "sft", "runs": ["run-1"]}}
    assert beyond({**top, **demonstrations}, Machine())[0] == 0


def test_hosts_hold_no_whole_model() -> None:
    # Embeddings, head and two layers in float64: more than the rows of a tensor that processes read at a time.
    assert sizes(BFLOAT16, Machine(gpus=1), "host") == {"reading the model": 13.0}
    # Each of 8 processes writes 1 GiB, which lies there twice.
    assert sizes(BFLOAT16, Machine(gpus=8), "host") == {"writing the model": 17.2}
    # Those of the second copy write nothing.
    assert sizes(BFLOAT16, Machine(gpus=8, copies=2), "host") == {"reading the model": 13.0}
    assert sizes(BFLOAT16, Machine(gpus=8, hosts=2, copies=2), "host") == {"writing the model": 17.2}
    # Moments of adapters are small: 0.7 of all ranks.
    assert sizes(LORA, Machine(gpus=8), "host") == {"reading the model": 13.0}
    offloaded = {**BFLOAT16, "optimizer": {"offload": True}}
    assert sizes(offloaded, Machine(gpus=8), "host") == {"offloaded moments": 65.5, "writing the model": 17.2}
    assert "moments" not in sizes(offloaded, Machine(gpus=8))
    critic = {"algorithm": {"type": "ppo_clip", "critic": {"trunk": "own"}}, "credit": {"baseline": {"type": "value"}}}
    assert sizes({**offloaded, **critic}, Machine(gpus=8), "host")["offloaded moments"] == 131.1


def test_a_rank_writes_no_more_than_its_share_of_a_checkpoint() -> None:
    # 0.6 billion parameters in 8 bytes of moments, and in 4 bytes of weights where versions round them: 7.2 GB of 8.
    small = {"training": {**BFLOAT16["training"], "export_dtype": "bfloat16"}}
    shape, parts = shape_of("Qwen3-0.6B"), sizes(small, Machine(gpus=8), "host", "Qwen3-0.6B")
    assert parts == {"writing the model": round(2 * 12 * shape.size / GB, 1)}
    whole = {"training": {**BFLOAT16["training"], "export_dtype": "float32"}}
    parts = sizes(whole, Machine(gpus=8), "host", "Qwen3-0.6B")
    assert parts == {"writing the model": round(2 * 8 * shape.size / GB, 1)}


def test_without_gpus_offload_frees_nothing() -> None:
    offloaded = {"optimizer": {"offload": True}}
    assert sizes(offloaded, Machine(gpus=0), "host") == sizes({}, Machine(gpus=0), "host")
    assert "moments" in sizes(offloaded, Machine(gpus=0), "host")


def test_an_engine_on_the_trainers_gpu_has_a_reserve_of_its_own_and_the_cache_that_is_counted() -> None:
    machine, shape = Machine(engine_gpus=1, shared=True), shape_of("Qwen3-8B")
    needs = {need.name: need.size_bytes for need in memory(run(LORA), Models(shape), machine)}
    assert (needs["reserve"], needs["engine reserve"]) == (2 * GB, 2 * GB)
    # Keys and values of 8 heads of 128 in 36 layers, in bfloat16.
    assert needs["engine cache"] == 32768 * (2 * 8 * 128 * 36 * 2)
    assert engine_arguments(machine) == "--max-total-tokens 32768"
    assert engine_arguments(replace(machine, shared=False)) is engine_arguments(replace(machine, gpus=0)) is None


def test_engines_have_their_weights_in_the_type_of_versions() -> None:
    assert sizes(BFLOAT16, Machine(engine_gpus=1), "engine") == {"engine weights": 16.4}
    assert sizes(FLOAT32, Machine(engine_gpus=4), "engine") == {"engine weights": 8.2}
    assert sizes(BFLOAT16, Machine(engine_gpus=1, shared=True))["engine weights"] == 16.4
    assert sizes(BFLOAT16, Machine(engine_gpus=1, shared=True), "engine") == {}
    evaluation = {"training": {"steps": 0}}
    assert sizes(evaluation, Machine(engine_gpus=1)) == {}
    # A CPU has all of it.
    cpu = sizes({}, Machine(gpus=0, engine_gpus=1), "host", "SmolLM2-135M")
    assert cpu == {"weights": 0.5, "gradients": 0.5, "moments": 1.1, "engine weights": 0.5}


@pytest.mark.parametrize(
    ("changes", "machine", "severity", "remedy"),
    [
        (BFLOAT16, Machine(1, 80 * GB), "cannot", "write training.lora {}, or give the trainer 4 GPUs"),
        (BFLOAT16, Machine(8, 33 * GB), None, ""),
        # The certain parts have 27.1 GB; activations and the reserve come to 32.9.
        (BFLOAT16, Machine(8, 28 * GB), "warns", "write optimizer.offload true"),
        (BFLOAT16, Machine(8, 80 * GB, 12 * GB), "cannot", "give the trainer's host 33.2 GB"),
        (LORA, Machine(1, 48 * GB), None, ""),
        (LORA, Machine(1, 24 * GB), "warns", "write training.micro_batch_tokens 1024"),
        (LORA, Machine(1, 18 * GB), "cannot", "give the trainer 4 GPUs"),
        (LORA, Machine(1, 49 * GB, engine_gpus=1, shared=True), None, ""),
        (LORA, Machine(1, 48 * GB, engine_gpus=1, shared=True), "warns", "write training.micro_batch_tokens 1024"),
        # The certain parts have 35.4 GB; 8 GPUs need 35.2 each.
        (LORA, Machine(1, 353 * GB // 10, engine_gpus=1, shared=True), "cannot", "give the trainer 8 GPUs"),
    ],
)
def test_a_machine_is_judged(changes: dict[str, Any], machine: Machine, severity: str | None, remedy: str) -> None:
    found = judge_memory(run(changes), Models(shape_of("Qwen3-8B")), machine)
    assert [one.severity for one in found] == ([severity] if severity else [])
    assert all(remedy in one.remedy for one in found)


def test_settings_that_suffice_together_are_named_together() -> None:
    plain = run({**FLOAT32, "algorithm": {"type": "ppo_clip", "kl_coefficient": 0.04}})
    (found,) = judge_memory(plain, Models(shape_of("Qwen3-8B")), Machine(1, 80 * GB))
    assert found.remedy == "write training.activation_checkpointing true, training.lora {}"


def test_adapters_are_named_with_frozen_routers_where_routers_train() -> None:
    trained = run({"training": {"precision": "bfloat16", "router": "trained"}})
    (found,) = judge_memory(trained, Models(shape_of("Qwen3-30B-A3B")), Machine(1, 141 * GB))
    assert "write training.lora {} with router 'frozen'" in found.remedy


def test_a_mixture_needs_memory_for_all_experts_and_activations_for_those_of_a_token() -> None:
    config, _ = PUBLISHED["Qwen3-30B-A3B"]
    mixture = shape_of("Qwen3-30B-A3B")
    assert judge_model(run(LORA), config, Machine(1, 141 * GB), "moe") == []
    # 30.2 billion in experts and matrices in 2 bytes, 0.3 of embeddings and routers in 4; adapters beside attention.
    layer = (2048 + 4096) * 2 + (2048 + 512) * 2
    assert mixture.adapters(32, "all-linear", ()) == 48 * 32 * layer
    assert sizes(LORA, Machine(), model="Qwen3-30B-A3B") == {"weights": 61.8, "gradients": 0.1, "moments": 0.2}
    routers = 48 * 128 * 2048
    assert trained_parameters(run({}), mixture) == mixture.size - routers
    assert trained_parameters(run({"training": {"router": "trained"}}), mixture) == mixture.size
    # Eight experts of 768 and their hidden states, whatever the number of experts.
    more = shape_of("Qwen3-30B-A3B", num_experts=256)
    assert activation_bytes_a_token(more, 2) == activation_bytes_a_token(mixture, 2)
    dense = replace(mixture, routed=0)
    assert activation_bytes_a_token(mixture, 2) - activation_bytes_a_token(dense, 2) == 2 * 3 * 8 * 2048
    assert (mixture.inner, mixture.outside) == (8 * 768, 2 * 151936 * 2048 + 2048)
    # transformers 5 writes the number by another name.
    rewritten = {**config, "num_local_experts": config["num_experts"]}
    del rewritten["num_experts"]
    assert Shape.of(rewritten) == mixture
    some = shape_of("Qwen3-30B-A3B", mlp_only_layers=[0], decoder_sparse_step=2)
    assert [name for name in some.parameters if "layers.0." in name and "mlp" in name] == [
        f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    ]
    assert sum(name.endswith("experts.down_proj") for name in some.parameters) == 24
    assert some.layer == mixture.layer
    assert some.adapters(32, "all-linear", ()) == mixture.adapters(32, "all-linear", ())


def test_another_mixture_of_experts_cannot_train_and_an_unknown_shape_is_not_judged() -> None:
    document, small = run({}), Machine(1, GB)
    assert [one.path for one in judge_model(document, {"num_experts": 8}, small, "moe")] == ["model"]
    assert Shape.of({**PUBLISHED["Qwen3-30B-A3B"][0], "model_type": "mixtral"}) is None
    assert judge_model(document, {"n_embd": 768}, small, "gpt2") == []


def test_a_gpt_oss_needs_memory_for_all_experts_and_its_gates() -> None:
    config, _ = PUBLISHED["gpt-oss-20b"]
    mixture = shape_of("gpt-oss-20b")
    assert judge_model(run(LORA), config, Machine(1, 80 * GB), "moe") == []
    # Experts, their biases and matrices in 2 bytes; embeddings, norms, biases of attention, sinks and routers in 4.
    wide = 201088 * 2880 + 2880 + 24 * (2 * 2880 + 4096 + 2 * 512 + 2880 + 64 + 32 * 2881)
    assert mixture.size - mixture.matrices == wide
    assert sizes(LORA, Machine(), model="gpt-oss-20b") == {"weights": 43.1, "gradients": 0.1, "moments": 0.1}
    assert trained_parameters(run({}), mixture) == mixture.size - 24 * 32 * 2881
    assert mixture.inner == 4 * 2880
    # Clamped gate, sigmoid and up for each expert of a token, and attention's output before its sinks.
    plain = replace(mixture, gate_tensors=4)
    assert activation_bytes_a_token(mixture, 2) - activation_bytes_a_token(plain, 2) == 2 * 3 * 4 * 2880
    quantized = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    (found,) = judge_model(run(LORA), quantized, Machine(1, 80 * GB), "moe")
    assert (found.severity, found.remedy) == ("cannot", "use the model's bfloat16 weights")
