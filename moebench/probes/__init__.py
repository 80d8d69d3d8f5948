"""Short measurements of this machine, each with its spread: what a hardware profile says of it."""
