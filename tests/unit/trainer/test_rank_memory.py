"""The memory of each of several processes beside that of one."""

import ctypes
import gc
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from leyden.libs.contracts.config import RunConfig
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.sharding import shard
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.optimizers import make_optimizer
from leyden.services.trainer.step.step import optimizer_step
from tests.bench.bench_trainer import status
from tests.fakes.forked_trainer import run_forked
from tests.support.shared import free_port
from tests.unit.trainer import ranked
from tests.unit.trainer.cases import VOCABULARY, agent_samples

LAYERS, HIDDEN, INNER = 16, 384, 1536
M_MMAP_THRESHOLD = -3
DOCUMENT = {"name": "n", "dataset": "d", "agent": {"command": ["x"]}, "optimizer": {"learning_rate": 1e-4}}


def _step(rank: int, size: int, port: int, folder: Path) -> None:
    """Writes the peak of resident memory in a step, above what a process has without a model, in model sizes."""
    ranks = ranked.join(rank, size, port)
    config = RunConfig.model_validate(DOCUMENT)
    # Freed tensors leave the process at once, and count no longer.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    before = status("VmRSS")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=None, attn_implementation="sdpa",
        )
    )  # fmt: skip
    size_bytes = 4 * sum(one.numel() for one in model.parameters())
    policy = Policy(model)
    if size > 1:
        shard(policy, torch.device("cpu"), size)
    learner = Learner(policy, make_optimizer(policy, config.optimizer), Accelerator(cpu=True), ranks=ranks)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    optimizer_step(learner, agent_samples(0, groups=1, siblings=2), config)
    (folder / f"{size}.{rank}").write_text(str((status("VmHWM") - before) / size_bytes))
    if size > 1:
        ranks.close()


def test_a_step_of_n_ranks_takes_a_share_of_the_memory(tmp_path: Path) -> None:
    for size in (1, 2, 4):
        run_forked(_step, size, free_port(), tmp_path, processes=size)
    found = {size: max(float((tmp_path / f"{size}.{rank}").read_text()) for rank in range(size)) for size in (1, 2, 4)}
    # Weights, gradients and two moments; a layer's complete weights and gradients, and activations, come on top.
    assert 4 < found[1] < 4.6
    assert found[2] < 0.5 * found[1] + 0.6
    assert found[4] < 0.25 * found[1] + 0.6
