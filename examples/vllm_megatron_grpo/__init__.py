"""The asynchronous GRPO of `examples.async_grpo` with real engines: vLLM generates, Megatron-core trains."""
