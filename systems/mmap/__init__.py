"""mmap."""
