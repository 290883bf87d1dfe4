"""Dense attention on strided blocks. Knows nothing of patterns or ranks; `problem` says what a backend is asked."""
