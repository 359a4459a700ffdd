"""Agents in separate processes that sample from the policy through OpenAI's chat completions."""
