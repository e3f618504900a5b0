"""In place of Mooncake's package, where a test needs faults that the real one cannot be told to have."""
