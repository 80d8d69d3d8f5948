"""What a system costs in answers: accuracy on local tasks, paired deltas, token agreement."""
