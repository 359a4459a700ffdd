"""Agents that inspect images with tools: tool protocols, image tools, one environment, one task."""
