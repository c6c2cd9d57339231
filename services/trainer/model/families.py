"""Refuses models that token trees would compute wrongly."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from leyden.libs.contracts.judgements.memory import CHECKED_LAYERS
from leyden.libs.contracts.judgements.shape import EXPERT_FAMILIES, quantization
from leyden.services.trainer.model.forward import Policy, Reads
from leyden.services.trainer.model.load import read_model
from leyden.services.trainer.model.remedies import raising_host_memory
from leyden.services.trainer.rows.tree import plan_forest

MAX_HEAD_GAP = 1e-9
MAX_TREE_GAP = 1e-6
"""Nats. In float64 families that trees compute right differ by 1e-13; norms that round to float32 inside may round one
state differently, which is 1e-7. Families that trees compute wrong differ by more than 1e-3."""

WINDOWED_FAMILIES = ("gemma3_text", "gpt_oss", "mistral", "qwen2", "qwen3")
"""Families whose layers give attention their sliding window; rows of the check below are shorter than any window."""
_EXPERTS = re.compile("moe|expert", re.IGNORECASE)


class UnsupportedModel(ValueError):
    """Token trees do not reproduce a part of the model's computation; the message names it."""


def check_family(folder: Path) -> None:
    """Raises UnsupportedModel unless token trees compute the log-probabilities of the model in `folder`.

    The answer depends on the code of the model's family, so a run asks once, of the models that its document names, and
    never of weights that it made. The structure is read whole, without weights. The arithmetic is tried in float64 on
    the lowest layers, up to the first of each kind: a Llama of 8 billion parameters takes 12 GiB of host memory for two
    layers and its embeddings.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        check_structure(AutoModelForCausalLM.from_config(config))
    with _without_warnings():
        lowest = read_model(folder, torch.float64, _lowest_layers(config))
    check_arithmetic(lowest)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """transformers warns about each weight that the lowest layers leave out."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _lowest_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the same model with its lowest layers alone, among them one of each kind."""
    kinds = getattr(config, "layer_types", None)
    layers = max(CHECKED_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds))) if kinds else CHECKED_LAYERS
    lowest = copy.deepcopy(config)
    lowest.num_hidden_layers = min(layers, config.num_hidden_layers)
    if kinds:
        lowest.layer_types = kinds[: lowest.num_hidden_layers]
    return lowest


def check_arithmetic(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel unless token trees compute the log-probabilities of a float64 model; tries three short
    rows."""
    family = model.config.model_type
    try:
        with raising_host_memory(), torch.no_grad():
            head_gap, tree_gap = _head_gap(model), _tree_gap(model)
    except torch.OutOfMemoryError:
        raise
    # Whatever it is, the first step would end with it, too.
    except Exception as error:
        raise UnsupportedModel(
            f"{family}: token trees cannot compute it ({type(error).__name__}: {error}): choose another model"
        ) from error
    if not head_gap <= MAX_HEAD_GAP:
        raise UnsupportedModel(
            f"{family}: logits differ by {head_gap:.2g} from the head's product (scaling or capping): choose another"
            " model"
        )
    if not tree_gap <= MAX_TREE_GAP:
        raise UnsupportedModel(
            f"{family}: log-probabilities over a token tree differ by {tree_gap:.2g} nats from those of one row at a"
            " time: choose another model"
        )


def check_structure(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel where token trees cannot compute a part of the model, for its kind; reads no weight."""
    config, family = model.config, model.config.model_type
    if config.get_text_config() is not config:
        raise UnsupportedModel(
            f"{family}: a model of several parts, such as vision and text: choose a text model, such as gemma3_text"
        )
    if method := quantization(getattr(config, "quantization_config", None)):
        raise UnsupportedModel(f"{family}: quantized weights ({method}): use the model's bfloat16 weights")
    experts = next((type(m).__name__ for m in model.modules() if _EXPERTS.search(type(m).__name__)), None)
    if experts and family not in EXPERT_FAMILIES:
        raise UnsupportedModel(
            f"{family}: a mixture of experts ({experts}), which are tested for {', '.join(EXPERT_FAMILIES)} only:"
            " choose one of these, or a dense model"
        )
    windowed = getattr(config, "sliding_window", None) is not None
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if windowed else "full_attention"])
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            f"{family}: layers of kinds {sorted(other)}: token trees need attention in every layer, full or with a"
            " sliding window: choose another model"
        )
    if "sliding_attention" in kinds and family not in WINDOWED_FAMILIES:
        raise UnsupportedModel(
            f"{family}: layers with a sliding window, which are tested for {', '.join(WINDOWED_FAMILIES)} only: choose"
            " another model, or set sliding_window to null in its config.json if no row of the run is longer"
        )
    # Their tables depend on the length of the longest row in a pass; no short row shows it.
    if ropes := {kind for module in model.modules() for kind in _rope_types(module)} & {"dynamic", "longrope"}:
        raise UnsupportedModel(
            f"{family}: position embeddings of type {ropes.pop()!r} change with a row's length, and rows of a tree"
            " differ in length: choose another model or a fixed RoPE type such as yarn"
        )


def _rope_types(module: nn.Module) -> list[str]:
    """Those of a position embedding: one, or one for each kind of layer."""
    kinds = getattr(module, "rope_type", None)
    return [str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])]


def _ordinary_ids(model: PreTrainedModel, count: int) -> NDArray[np.int32]:
    """Token ids from the middle half of the vocabulary: control tokens and untrained rows lie at its ends."""
    vocabulary = model.config.vocab_size
    return np.linspace(vocabulary / 4, vocabulary * 3 / 4, count, endpoint=False).astype(np.int32)


def _head_gap(model: PreTrainedModel) -> float:
    ids = torch.from_numpy(_ordinary_ids(model, 8)).long().to(model.device)[None]
    hidden = model.base_model(input_ids=ids).last_hidden_state
    return float((model.get_output_embeddings()(hidden) - model(input_ids=ids).logits).abs().max())


def _tree_gap(model: PreTrainedModel) -> float:
    """The largest difference in nats between rows that fork behind a prefix and the same rows one by one."""
    ids_T = _ordinary_ids(model, 12)
    stem, tails = ids_T[:4], ids_T[np.array([[4, 5, 6], [4, 7, 8], [9, 10, 11]])]
    alone = []
    for tail in tails:
        ids = torch.from_numpy(np.concatenate([stem, tail])).long()[None].to(model.device)
        logits = model(input_ids=ids).logits[0, len(stem) - 1 : -1]
        alone.append(logits.log_softmax(-1).gather(1, ids[0, len(stem) :, None])[:, 0])
    policy, before = Policy(model), len(stem)
    (prefix,), (pack,) = plan_forest([stem], 100).packs, plan_forest(list(tails), 100).packs
    pack = replace(pack, depths_M=pack.depths_M + before, path=(0,), prefix_tokens=before)
    places = [np.concatenate([[before - 1], before + nodes[:-1]]) for nodes in pack.nodes]
    token_ids_K = tails[pack.rows].reshape(-1).astype(np.int64)
    reads = Reads(np.concatenate(places), token_ids_K, np.ones(len(token_ids_K), np.float32))
    together = policy(pack, [policy.prefix(prefix, [])], reads).logprobs_K
    return float((together - torch.cat([alone[row] for row in pack.rows])).abs().max())
