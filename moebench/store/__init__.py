"""Experts on disk: packs, quantisation, read engines."""
