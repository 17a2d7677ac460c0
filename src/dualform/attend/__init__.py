"""Ask a memory: views of it, queries, the streaming engine, and the answers."""
