"""RL trainer for vision-language agents, based on Megatron-Core and vLLM."""
