"""Agents that inspect images with tools: tool protocols, image tools, environment and task."""
