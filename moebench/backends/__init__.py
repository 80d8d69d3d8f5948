"""Tensor libraries behind one small interface."""
