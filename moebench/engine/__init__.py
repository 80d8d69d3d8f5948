"""The decode loop: steps, acquisition of experts, and the two drivers, live and replay."""
