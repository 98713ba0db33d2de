"""Makes tests/data/families: tiny random models of each family and their logits by transformers.

    pip install '.[oracle]'
    python tests/oracles/make_family_golden.py

Every directory is a checkpoint as `save_pretrained` writes it, in bfloat16. Its logits.safetensors
holds token ids and the float32 logits after each of them, of the model in float32 with eager
attention. Weights are large enough for soft caps, windows and norms to matter.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 40

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
}
GLOBAL = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": (
        "Qwen2",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {"num_hidden_layers": 2, "head_dim": 8, "rope_parameters": YARN}),
    "mistral": ("Mistral", {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": 6}),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 6,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "head_dim": 8,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                "full_attention": GLOBAL,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}


def randomise(model: torch.nn.Module, centre: float, seed: int) -> None:
    """Fill every parameter with values that bfloat16 holds; norms are spread around `centre`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = centre + 0.4 * noise
        elif name.endswith("bias"):
            noise = 0.5 * noise
        elif "embed_tokens" in name:
            noise = 0.6 * noise
        else:
            noise = 1.4 * noise * parameter.shape[1] ** -0.5
        parameter.data = noise.to(torch.bfloat16).to(torch.float32)


def main() -> None:
    for seed, (name, (family, changes)) in enumerate(FAMILIES.items()):
        config_type = getattr(transformers, f"{family}{'Text' * (family == 'Gemma3')}Config")
        config = config_type(**SIZES, **changes)
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
        randomise(model, 0.0 if family.startswith("Gemma") else 1.0, seed)
        tokens = torch.randint(48, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[0]
        directory = ROOT / "tests/data/families" / name
        shutil.rmtree(directory, ignore_errors=True)
        model.to(torch.bfloat16).save_pretrained(directory)
        (directory / "generation_config.json").unlink()
        golden = {"tokens": tokens[0].to(torch.int32), "logits": logits.contiguous()}
        save_file(golden, directory / "logits.safetensors")
        print(name, float(logits.abs().max()), float(logits.std()))


if __name__ == "__main__":
    main()
