"""BigMoMo (arXiv 2609.14643): the verification window of speculative decoding as an I/O window."""
