"""Clients of HTTP services: endpoint pools, OpenAI clients, health checks and proxies."""
