"""What needs an extra of its own. Each module imports its library when it is imported itself, and nothing else does."""
