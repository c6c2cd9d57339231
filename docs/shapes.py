"""The sizes that published models name in their `config.json`, and the numbers of parameters that they publish."""

from __future__ import annotations

from typing import Any


def _config(kind: str, *sizes: int, tied: bool = False, **others: Any) -> dict[str, Any]:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sized = dict(zip((*names, "vocab_size"), sizes, strict=True))
    return {"model_type": kind, "tie_word_embeddings": tied, **sized, **others}


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3-0.6B": (_config("qwen3", 28, 1024, 3072, 16, 8, 151936, tied=True, head_dim=128), 596_049_920),
    "Qwen3-4B": (_config("qwen3", 36, 2560, 9728, 32, 8, 151936, tied=True, head_dim=128), 4_022_468_096),
    "Qwen3-8B": (_config("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128), 8_190_735_360),
    "Qwen3-14B": (_config("qwen3", 40, 5120, 17408, 40, 8, 151936, head_dim=128), 14_768_307_200),
    "Qwen3-32B": (_config("qwen3", 64, 5120, 25600, 64, 8, 151936, head_dim=128), 32_762_123_264),
    "Qwen3-30B-A3B": (
        _config(
            "qwen3_moe",
            48,
            2048,
            6144,
            32,
            4,
            151936,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
        30_532_122_624,
    ),
    "gpt-oss-20b": (
        _config("gpt_oss", 24, 2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4),
        20_914_757_184,
    ),
    "gpt-oss-120b": (
        _config("gpt_oss", 36, 2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=128, num_experts_per_tok=4),
        116_829_156_672,
    ),
    "Qwen2.5-0.5B": (_config("qwen2", 24, 896, 4864, 14, 2, 151936, tied=True), 494_032_768),
    "Qwen2.5-1.5B": (_config("qwen2", 28, 1536, 8960, 12, 2, 151936, tied=True), 1_543_714_304),
    "Qwen2.5-3B": (_config("qwen2", 36, 2048, 11008, 16, 2, 151936, tied=True), 3_085_938_688),
    "Qwen2.5-7B": (_config("qwen2", 28, 3584, 18944, 28, 4, 152064), 7_615_616_512),
    "Llama-3.1-8B": (_config("llama", 32, 4096, 14336, 32, 8, 128256), 8_030_261_248),
    "Mistral-7B-v0.3": (_config("mistral", 32, 4096, 14336, 32, 8, 32768), 7_248_023_552),
    "SmolLM2-135M": (_config("llama", 30, 576, 1536, 9, 3, 49152, tied=True), 134_515_008),
    "gemma-3-1b": (
        {
            key: value
            for key, value in _config("gemma3_text", 26, 1152, 6912, 4, 1, 262144, head_dim=256).items()
            if key != "tie_word_embeddings"
        },
        999_885_952,
    ),
}
