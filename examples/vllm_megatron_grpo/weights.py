"""Weights on their way from Megatron's shards to vLLM's workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from examples.async_grpo.task import FloatArray
from examples.vllm_megatron_grpo.model import ModelConfig

Shard = Mapping[str, FloatArray]


def llama_weights(shards: Sequence[Shard], model: ModelConfig) -> dict[str, FloatArray]:
    """Joins the shards of a Megatron ``GPTModel`` and names them as a Llama checkpoint does.

    Megatron keeps query, key and value of a head side by side, and gate and up projection one above the other, in each
    rank's shard; it splits these, and the vocabulary, by rows, and what leads back into the residual stream by columns.

    Args:
        shards: Parameter name to array, one mapping for each tensor parallel rank, in order.
        model: The model.
    """

    def rows(name: str) -> FloatArray:
        return np.concatenate([shard[name] for shard in shards])

    def columns(name: str) -> FloatArray:
        return np.concatenate([shard[name] for shard in shards], axis=1)

    found = {
        "model.embed_tokens.weight": rows("embedding.word_embeddings.weight"),
        "model.norm.weight": shards[0]["decoder.final_layernorm.weight"],
        "lm_head.weight": rows("output_layer.weight"),
    }
    for layer in range(model.layers):
        ours, theirs = f"model.layers.{layer}", f"decoder.layers.{layer}"
        qkv = rows(f"{theirs}.self_attention.linear_qkv.weight")
        per_head = qkv.reshape(model.heads, 3, model.head_dim, model.hidden)
        for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
            found[f"{ours}.self_attn.{name}.weight"] = per_head[:, place].reshape(-1, model.hidden)
        found[f"{ours}.self_attn.o_proj.weight"] = columns(f"{theirs}.self_attention.linear_proj.weight")
        halves = [np.split(shard[f"{theirs}.mlp.linear_fc1.weight"], 2) for shard in shards]
        found[f"{ours}.mlp.gate_proj.weight"] = np.concatenate([gate for gate, _ in halves])
        found[f"{ours}.mlp.up_proj.weight"] = np.concatenate([up for _, up in halves])
        found[f"{ours}.mlp.down_proj.weight"] = columns(f"{theirs}.mlp.linear_fc2.weight")
        found[f"{ours}.input_layernorm.weight"] = shards[0][f"{theirs}.input_layernorm.weight"]
        found[f"{ours}.post_attention_layernorm.weight"] = shards[0][f"{theirs}.pre_mlp_layernorm.weight"]
    return found
