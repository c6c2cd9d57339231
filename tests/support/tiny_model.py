"""Makes a tiny random Llama with a byte-level tokenizer, without downloads, for tests that serve and train a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    folder: Path,
    seed: int = 0,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context_length: int = 4096,
    chat_template: str = CHATML_TEMPLATE,
) -> Path:
    """Writes a random float32 Llama of about 100,000 parameters, its tokenizer and its chat template to `folder`.

    The tokenizer maps every byte to one token (ids 0 to 255); ChatML markers and unused tokens follow. The end of a
    turn, `<|im_end|>`, is the end of sequence. The same seed gives the same weights.

    Args:    vocab_size: at least 259 (256 bytes and 3 markers)
    """
    # Imported late: few callers make a model, and importing transformers takes seconds.
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    eos, pad = _write_tokenizer(folder, vocab_size, chat_template)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return _write_random(folder, LlamaForCausalLM, config, seed)


def make_tiny_experts(folder: Path, seed: int = 0) -> Path:
    """Writes a random float32 Qwen3-MoE with the same tokenizer: three layers, a dense one first, with two of six
    experts for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    eos, pad = _write_tokenizer(folder, 320, CHATML_TEMPLATE)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return _write_random(folder, Qwen3MoeForCausalLM, config, seed)


def _write_random(folder: Path, family: Any, config: Any, seed: int) -> Path:
    """Writes a float32 model of a family of transformers with random weights."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        family(config).to(torch.float32).save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path, vocab_size: int, chat_template: str) -> tuple[int, int]:
    """Writes the tokenizer; returns the ids of the end of sequence and of padding."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    fillers = vocab_size - tokenizer.get_vocab_size()
    if fillers < 0:
        raise ValueError(f"vocab_size {vocab_size} is too small: write at least {vocab_size - fillers}")
    tokenizer.add_tokens([AddedToken(f"<filler_{index}>", special=False) for index in range(fillers)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return fast.eos_token_id, fast.pad_token_id
