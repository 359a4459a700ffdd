"""RL trainer for vision-language agents, based on Megatron-Core and vLLM."""

__version__ = "0.1.0"
