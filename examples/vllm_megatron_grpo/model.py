"""The model that both engines run: a small Llama, as vLLM's configuration file and as Megatron's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.async_grpo.task import FloatArray


def write_weights(weights: Mapping[str, FloatArray], folder: Path) -> None:
    """Writes weights, by the names of a Llama checkpoint, where vLLM looks for them in ``folder``."""
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(array) for name, array in weights.items()}
    save_file(contiguous, folder / "model.safetensors")


@dataclass(frozen=True)
class ModelConfig:
    """A Llama without a tokenizer: prompts and responses are token ids.

    Attributes:
        layers: Transformer layers.
        heads: Attention heads; a multiple of the tensor parallel sizes.
        head_dim: Width of a head; vLLM's CPU kernels refuse less than 32, and 16.
        ffn: Width of the feed-forward layer.
        vocabulary: Token ids.
        context: Longest sequence, prompt and response.
    """

    layers: int = 2
    heads: int = 2
    head_dim: int = 64
    ffn: int = 256
    vocabulary: int = 512
    context: int = 64

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    def write(self, folder: Path) -> Path:
        """Writes what vLLM reads, a configuration and random weights; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": None,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        rng = np.random.default_rng(0)
        weights = {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in self.shapes.items()}
        write_weights(weights, folder)
        return folder

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter, by the names of a Llama checkpoint."""
        square, wide, tall = (self.hidden, self.hidden), (self.ffn, self.hidden), (self.hidden, self.ffn)
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocabulary, self.hidden),
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            found |= {f"{prefix}.self_attn.{name}_proj.weight": square for name in "qkvo"}
            found |= {f"{prefix}.mlp.{name}_proj.weight": wide for name in ("gate", "up")}
            found[f"{prefix}.mlp.down_proj.weight"] = tall
            found |= {f"{prefix}.{name}_layernorm.weight": (self.hidden,) for name in ("input", "post_attention")}
        return found

    def megatron(self, *, tensor_parallel: int, timers: Any, on_cpu: bool) -> Any:
        """Returns Megatron's configuration of the same model.

        Args:
            tensor_parallel: Ranks that share a layer.
            timers: What Megatron times its steps with.
            on_cpu: There is no GPU.
        """
        import torch
        from megatron.core.transformer.transformer_config import TransformerConfig

        return TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            kv_channels=self.head_dim,
            ffn_hidden_size=self.ffn,
            tensor_model_parallel_size=tensor_parallel,
            normalization="RMSNorm",
            layernorm_epsilon=1e-5,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            use_cpu_initialization=on_cpu,
            pipeline_dtype=torch.float32,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            timers=timers,
        )
