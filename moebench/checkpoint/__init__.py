"""Checkpoints as people download them: folders of safetensors, found, checked, and read expert by expert."""
