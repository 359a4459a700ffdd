"""Attacks on our own servers, clients and readers of files, each with a control: the same attack where the defense is taken away."""
