"""Running kernels: threads, chains of workers, scratch memory."""
