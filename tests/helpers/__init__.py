"""What several test files share: small networks and runs, dense references, a viewer that is served."""
