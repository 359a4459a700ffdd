"""Gymnasium environments with pictures as a task."""
