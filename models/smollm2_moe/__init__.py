"""smollm2_moe: turns a dense SmolLM2-135M-Instruct into a Mixture-of-Experts model of the same weights."""
