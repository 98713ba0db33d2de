"""Hugging Face transformers decoding the same weights, for comparison (extra `peers`)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig, RopeConfig
from jspec.errors import InputError, require
from jspec.model import Model
from jspec.quantization import is_quantized


@dataclasses.dataclass(frozen=True)
class PeerRun:
    """One prompt decoded by the peer.

    Attributes:
        token_ids: generated tokens.
        seconds: wall time of the whole call, prefill included.
        prefill: wall time of a call for one token.
    """

    token_ids: tuple[int, ...]
    seconds: float
    prefill: float


def _refuse_unlike(model: Model) -> None:
    """Raise `InputError` for what the peer would leave out in silence."""
    config = model.config
    plain = ModelConfig(
        name=config.name,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_context=config.max_context,
        norm_eps=config.norm_eps,
        rope=RopeConfig(theta=config.rope.theta),
        tie_embeddings=config.tie_embeddings,
        token_count=config.token_count,
    )
    names = [field.name for field in dataclasses.fields(config)]
    unlike = [name for name in names if getattr(config, name) != getattr(plain, name)]
    if any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(model.params)):
        unlike.append("weights that are not float32")
    require(
        not unlike,
        "model",
        model.name,
        f"has {', '.join(unlike)}, which the peer, a Llama in float32, is not set up for",
        "leave out --peers, or use a Llama in float32",
    )


class TransformersPeer:
    """transformers' greedy generate and prompt lookup on torch's CPU backend, in float32.

    Args:
        model: whose weights are shared with torch, not read again.
        threads: torch threads.

    Raises:
        InputError: torch or transformers is not installed.
    """

    def __init__(self, model: Model, threads: int) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise InputError(
                "peers",
                "transformers",
                f"is not installed ({error})",
                "in the checkout, pip install '.[peers]'",
            ) from None
        _refuse_unlike(model)
        require(
            not is_quantized(model.params),
            "weights",
            "int8",
            "has no counterpart in the peer",
            "leave out --peers or --weights",
        )
        torch.set_num_threads(threads)
        self._torch = torch
        self.versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        config = model.config
        with torch.device("meta"):
            network = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=config.vocab_size,
                    hidden_size=config.hidden_size,
                    intermediate_size=config.intermediate_size,
                    num_hidden_layers=config.num_layers,
                    num_attention_heads=config.num_heads,
                    num_key_value_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    max_position_embeddings=config.max_context,
                    rms_norm_eps=config.norm_eps,
                    rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
                    tie_word_embeddings=config.tie_embeddings,
                    eos_token_id=list(model.eos_token_ids),
                    pad_token_id=0,
                )
            )
        weights = {name: torch.from_numpy(array) for name, array in _weights(model).items()}
        network.load_state_dict(weights, strict=False, assign=True)
        network.tie_weights()
        # Buffers of a model built on the meta device have no values yet.
        rotary = network.model.rotary_emb
        network.model.rotary_emb = type(rotary)(config=network.config)
        self._network = network.eval()

    def generate(
        self, token_ids: Sequence[int], max_new_tokens: int, lookup_tokens: int = 0
    ) -> PeerRun:
        """Decode one prompt greedily.

        Args:
            token_ids: the prompt.
            max_new_tokens: budget.
            lookup_tokens: drafts a round by prompt lookup; 0 decodes plainly.
        """
        options: dict[str, Any] = {}
        if lookup_tokens:
            options["prompt_lookup_num_tokens"] = lookup_tokens
        _, prefill = self._call(token_ids, 1, {})
        tokens, seconds = self._call(token_ids, max_new_tokens, options)
        return PeerRun(tokens, seconds, prefill)

    def _call(
        self, token_ids: Sequence[int], max_new_tokens: int, options: dict[str, Any]
    ) -> tuple[tuple[int, ...], float]:
        torch = self._torch
        ids = torch.tensor([list(token_ids)])
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                **options,
            )
        seconds = time.perf_counter() - start
        return tuple(out[0, len(token_ids) :].tolist()), seconds


def _weights(model: Model) -> dict[str, np.ndarray]:
    """Return the parameters by their Hugging Face names."""
    config, params = model.config, model.params
    per, width = config.queries_per_kv, config.hidden_size
    arrays = {
        "model.embed_tokens.weight": np.asarray(params.embedding),
        "model.norm.weight": np.asarray(params.final_norm),
    }
    if params.head is not None:
        arrays["lm_head.weight"] = np.asarray(params.head)
    for index, layer in enumerate(params.layers):
        name = f"model.layers.{index}."
        qkv = np.asarray(layer.qkv)
        gate, up = np.asarray(layer.gate_up)
        arrays |= {
            name + "input_layernorm.weight": np.asarray(layer.attention_norm),
            name + "self_attn.q_proj.weight": qkv[:, :per].reshape(-1, width),
            name + "self_attn.k_proj.weight": qkv[:, per].reshape(-1, width),
            name + "self_attn.v_proj.weight": qkv[:, per + 1].reshape(-1, width),
            name + "self_attn.o_proj.weight": np.asarray(layer.attention_out),
            name + "post_attention_layernorm.weight": np.asarray(layer.mlp_norm),
            name + "mlp.gate_proj.weight": gate,
            name + "mlp.up_proj.weight": up,
            name + "mlp.down_proj.weight": np.asarray(layer.down),
        }
    # torch warns about arrays that it may not write to.
    return {name: np.array(array, np.float32) for name, array in arrays.items()}
