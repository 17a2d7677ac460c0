"""The memory on disk: its format, its writer, its reader, its audit. Open formats only, published atomically."""
