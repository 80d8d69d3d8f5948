"""What benchmarks/out_of_core.py is made of: files, arms, rounds and figures."""
