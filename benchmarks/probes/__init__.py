"""Attacks on this project's servers, clients and file readers, each with a control.

The control is the same attack on a target without the defense.
"""
