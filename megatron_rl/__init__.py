"""RL trainer for vision-language agents: Megatron-Core trains, vLLM generates."""
