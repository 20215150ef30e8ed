"""What moves the bytes: one file an engine, imported only when it is chosen."""
