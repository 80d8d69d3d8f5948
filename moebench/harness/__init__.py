"""One cell is one run of one system on one machine with one workload; here cells are planned, built and run."""
