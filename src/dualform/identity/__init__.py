"""The pure mathematics of the identity: how a parameter is made of patterns, and what it does to a query."""
