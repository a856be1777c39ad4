"""Applications that emit and handle events, to copy from."""
