"""tinymoe: a small Mixture-of-Experts language model trained from scratch, shipped with moebench."""
