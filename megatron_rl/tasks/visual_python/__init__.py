"""Agents that look at pictures with tools: protocols (how tools are spoken), image tools, one environment, one task."""
